// The front door of the C++ side. Operators that torch.compile must see register themselves with TORCH_LIBRARY in their
// own files; this pybind11 module holds the entry points of eager mode, whose calls have the least overhead.
#include "capture/guards.h"
#include "cuda/driver.h"
#include "flow/identity.h"
#include "formulas/statistics.h"
#include "loss/python.h"
#include "returns/returns.h"
#include "statistics/tensors.h"
#include "support/support.h"
#include "torch/gradient_pool.h"
#include "torch/tensor_element.h"

#include <ATen/Version.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace gradscale {

int32_t vector_bytes() { // declared in cpu/each_instruction_set.h
  const std::string capability = at::get_cpu_capability();
  return capability.rfind("AVX512", 0) == 0 ? 64 : (capability == "AVX2" ? 32 : 16);
}

} // namespace gradscale

namespace {

using gradscale::Plan;

// The tensor, if the kernels can read it in this context; otherwise undefined.
at::Tensor readable(py::handle given) {
  at::Tensor tensor;
  const bool is_read = THPVariable_Check(given.ptr()) && gradscale::ordinary_or_inference_context() &&
                       gradscale::read_ordinary(THPVariable_Unpack(given.ptr()), tensor) &&
                       gradscale::has_element(tensor);
  return is_read ? tensor : at::Tensor();
}

// Decoded values, or None if the fused kernel does not accept these logits.
py::object decode(
    const std::shared_ptr<gradscale::OwnedSupport>& support, const py::object& python_support, py::handle logits) {
  const at::Tensor tensor = readable(logits);
  if (!tensor.defined() || tensor.dim() < 1 || tensor.size(-1) != support->get().num_bins) {
    return py::none();
  }
  return py::cast(gradscale::decode(support, python_support, tensor));
}

// Distributions, or None if a gradient is wanted, or the kernel does not accept these scalars.
py::object encode(const std::shared_ptr<gradscale::OwnedSupport>& support, double sigma_ratio, py::handle scalars) {
  const at::Tensor tensor = readable(scalars);
  if (!tensor.defined() || (at::GradMode::is_enabled() && tensor.requires_grad())) {
    return py::none();
  }
  return py::cast(gradscale::encode(support->get(), sigma_ratio, tensor));
}

// Projected probabilities, or None if the kernel does not accept these tensors.
py::object project(
    const std::shared_ptr<gradscale::OwnedSupport>& support,
    py::handle probabilities,
    py::handle rewards,
    py::handle discounts) {
  const at::Tensor p = readable(probabilities), r = readable(rewards), d = readable(discounts);
  if (!p.defined() || !r.defined() || !d.defined() || p.dim() < 1 || p.size(-1) != support->get().num_bins ||
      r.sizes() != p.sizes().slice(0, p.dim() - 1) || d.sizes() != r.sizes() || r.device() != p.device() ||
      d.device() != p.device()) {
    return py::none();
  }
  py::gil_scoped_release no_gil;
  at::Tensor result = gradscale::project(support->get(), p, r, d);
  py::gil_scoped_acquire gil;
  return py::cast(std::move(result));
}

// The loss, or None if the fused pass does not accept these tensors.
py::object l2_loss(std::vector<at::Tensor> parameters, double weight) {
  if (!gradscale::ordinary_or_inference_context()) {
    return py::none();
  }
  for (at::Tensor& parameter : parameters) {
    if (!gradscale::read_ordinary(at::Tensor(parameter), parameter) || !gradscale::has_element(parameter) ||
        parameter.device() != parameters[0].device()) {
      return py::none();
    }
  }
  return py::cast(gradscale::l2_loss(std::move(parameters), weight));
}

// (values, counts, histogram), and norms if there are weights, or None if these tensors are not all on one device and
// accepted by the kernels. A weight is None if its gradient needs no norms.
py::object tensor_statistics(
    const gradscale::OptionalTensors& gradients,
    double p,
    const std::optional<gradscale::OptionalTensors>& weights,
    bool rows) {
  TORCH_CHECK(
      !weights || (p == 2 && weights->size() == gradients.size()),
      "tensor_statistics: weights need p = 2 and one gradient each");
  const at::Tensor* first = nullptr;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const std::optional<at::Tensor>& gradient = gradients[i];
    if (gradient) {
      first = first == nullptr ? &*gradient : first;
      if (!gradscale::ordinary_gradient(*gradient) || gradient->device() != first->device()) {
        return py::none();
      }
    }
    if (weights && (*weights)[i]) {
      const at::Tensor& weight = *(*weights)[i];
      if (!gradient || !gradscale::ordinary_gradient(weight) || gradient->layout() != at::kStrided ||
          weight.layout() != at::kStrided || weight.device() != gradient->device() ||
          weight.sizes() != gradient->sizes()) {
        return py::none();
      }
    }
  }
  if (!gradscale::ordinary_context()) {
    return py::none();
  }
  const auto [values, counts, histogram, norms] = gradscale::tensor_statistics(gradients, p, weights, rows);
  if (weights) {
    return py::make_tuple(values, counts, histogram, norms);
  }
  return py::make_tuple(values, counts, histogram);
}

// The gradients of a list of parameters, or nothing if the list is unusual: with other classes than PyTorch's own, a
// tensor twice, or a gradient that the kernels do not accept.
std::optional<gradscale::OptionalTensors> usual_gradients(py::handle parameters) {
  if (!PyList_CheckExact(parameters.ptr()) || !gradscale::ordinary_context()) {
    return std::nullopt;
  }
  const Py_ssize_t count = PyList_GET_SIZE(parameters.ptr());
  gradscale::OptionalTensors gradients;
  std::vector<const PyObject*> objects;
  gradients.reserve(count);
  objects.reserve(count);
  const at::Tensor* first = nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const object = PyList_GET_ITEM(parameters.ptr(), i);
    if (!THPVariable_CheckExact(object)) {
      return std::nullopt;
    }
    const at::Tensor& parameter = THPVariable_Unpack(object);
    if (!(parameter.is_floating_point() || parameter.is_complex()) ||
        !(parameter.is_leaf() || parameter.retains_grad())) { // PyTorch warns of other tensors, whose gradient is None
      return std::nullopt;
    }
    objects.push_back(object);
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) {
      gradients.emplace_back();
      continue;
    }
    gradients.emplace_back(gradient);
    first = first == nullptr ? &*gradients.back() : first;
    if (!gradscale::ordinary_gradient(gradient) || gradient.device() != first->device()) {
      return std::nullopt;
    }
  }
  std::sort(objects.begin(), objects.end());
  if (first == nullptr || std::adjacent_find(objects.begin(), objects.end()) != objects.end()) {
    return std::nullopt;
  }
  return gradients;
}

// (values, counts, histogram, clipping), after clipping, or None if the list of parameters is unusual.
py::object clip_gradients(py::handle parameters, double p, const gradscale::Value& max_norm, bool skip_nonfinite) {
  const std::optional<gradscale::OptionalTensors> gradients = usual_gradients(parameters);
  if (!gradients) {
    return py::none();
  }
  const auto statistics = gradscale::tensor_statistics(*gradients, p, std::nullopt, /*rows=*/false);
  const at::Tensor clipping = gradscale::clipping_of(statistics.values, statistics.counts, p, max_norm, skip_nonfinite);
  std::vector<at::Tensor> distinct; // parameters may share a gradient
  std::unordered_set<const at::TensorImpl*> seen;
  distinct.reserve(gradients->size());
  seen.reserve(gradients->size());
  for (const std::optional<at::Tensor>& gradient : *gradients) {
    if (gradient && seen.insert(gradient->unsafeGetTensorImpl()).second) {
      distinct.push_back(*gradient);
    }
  }
  gradscale::clip_units(distinct, clipping.narrow(0, 1, 1), /*rows=*/false, skip_nonfinite);
  return py::make_tuple(statistics.values, statistics.counts, statistics.histogram, clipping);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = GRADSCALE_TORCH_VERSION;
  m.def("set_kernel_images", &gradscale::set_kernel_images);
  m.def("use_driver_for_cpu", &gradscale::use_driver_for_cpu);
  m.def("record_kernels", &gradscale::record_kernels);
  m.def("cpu_capability", &at::get_cpu_capability);
  m.def("ordinary_context", &gradscale::ordinary_context);
  m.def("ordinary_or_inference_context", &gradscale::ordinary_or_inference_context);
  m.def("reads", [](const at::Tensor& given) { // true if the kernels read a tensor of one of their dtypes
    at::Tensor tensor;
    return gradscale::read_ordinary(given, tensor);
  });
  for (const auto add_operator : gradscale::eager_operators()) { // the gradient-flow operators
    add_operator(m);
  }
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def(py::init(&gradscale::make_plan));
  m.def("multi_step_loss", &gradscale::multi_step_loss);
  m.def("outputs", [] { // name -> true for a list by head; in the order in which the operator returns them
    const gradscale::Outputs none;
    py::dict outputs;
    gradscale::Outputs::each(none, [&](const char* name, const auto& output) {
      outputs[name] = !std::is_same_v<std::decay_t<decltype(output)>, at::Tensor>;
    });
    return outputs;
  });
  m.def("release_gradient_pool", &gradscale::release_gradient_pool);
  py::class_<gradscale::OwnedSupport, std::shared_ptr<gradscale::OwnedSupport>>(m, "Support")
      .def(py::init([](const std::vector<std::string>& names, const std::vector<double>& numbers) {
        return std::make_shared<gradscale::OwnedSupport>(gradscale::support_from(names, numbers));
      }));
  m.def("encode", &encode);
  m.def("project", &project);
  m.def("decode", &decode);
  m.def("l2_loss", &l2_loss);
  gradscale::define_returns(m);
  m.attr("histogram_bins") = gradscale::kHistogramBins;
  m.attr("histogram_first_edge") = gradscale::kFirstEdge;
  m.def(
      "tensor_statistics",
      &tensor_statistics,
      py::arg("gradients"),
      py::arg("p"),
      py::arg("weights") = py::none(),
      py::arg("rows") = false);
  m.def("clip_gradients", &clip_gradients);
  m.def("clipping_of", &gradscale::clipping_of);
  m.def("unit_factors", &gradscale::unit_factors);
  m.def("clip_units", &gradscale::clip_units);
  m.def("update_norms", &gradscale::update_norms);
  gradscale::define_guards(m);
}
