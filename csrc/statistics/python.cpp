// Eager entry points.
#include "../torch/run_or_refuse.h"
#include "statistics.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace gradscale {

namespace {

// The loss. A weight that is a tensor is read if it is a constant on the CPU.
py::object l2_loss_in_eager_mode(const std::vector<py::object>& given, py::handle weight) {
  require_ordinary_context();
  double factor = 0;
  if (THPVariable_Check(weight.ptr())) {
    const at::Tensor tensor = read_tensor(weight, [] { return "weight"; });
    if (!tensor.is_cpu() || tensor.requires_grad()) {
      throw Refusal{"weight", "is a tensor: give a number, if one is known and needs no gradient"};
    }
    factor = tensor.item<double>();
  } else {
    factor = weight.cast<double>();
  }
  std::vector<at::Tensor> parameters;
  parameters.reserve(given.size());
  for (const py::object& parameter : given) {
    const auto words = [&] { return c10::str("parameters[", parameters.size(), "]"); };
    parameters.push_back(read_floats(parameter, words));
    if (parameters.back().device() != parameters[0].device()) {
      throw Refusal{};
    }
  }
  return py::cast(l2_loss(std::move(parameters), factor));
}

// Refuses a tensor that the kernels do not accept. Python splits lists of tensors on several devices.
void require_gradient(const at::Tensor& tensor, const char* argument, c10::Device device) {
  if (tensor.device() != device || !(tensor.is_cpu() || runs_kernels(device))) {
    throw Refusal{};
  }
  if (!ordinary_gradient(tensor)) {
    throw Refusal{argument, "is not a plain torch.Tensor (it " + described(tensor) + "): convert it"};
  }
}

// (values, counts), and norms if there are weights. A weight is None if its gradient needs no norms.
py::object statistics_in_eager_mode(
    const OptionalTensors& gradients, double p, const std::optional<OptionalTensors>& weights, bool rows) {
  TORCH_CHECK(
      !weights || (p == 2 && weights->size() == gradients.size()),
      "tensor_statistics: weights need p = 2 and one gradient each");
  if (!ordinary_context()) {
    throw Refusal{};
  }
  const at::Tensor* first = nullptr;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const std::optional<at::Tensor>& gradient = gradients[i];
    if (gradient) {
      first = first == nullptr ? &*gradient : first;
      require_gradient(*gradient, "a gradient", first->device());
    }
    if (weights && (*weights)[i]) {
      const at::Tensor& weight = *(*weights)[i];
      if (!gradient || gradient->layout() != at::kStrided || weight.layout() != at::kStrided ||
          weight.sizes() != gradient->sizes()) {
        throw Refusal{};
      }
      require_gradient(weight, "a parameter", gradient->device());
    }
  }
  const auto [values, counts, norms] = tensor_statistics(gradients, p, weights, rows);
  if (weights) {
    return py::make_tuple(values, counts, norms);
  }
  return py::make_tuple(values, counts);
}

// The gradients of a list of parameters, or nothing if the list is unusual: with other classes than PyTorch's own, a
// tensor twice, or a gradient that the kernels do not accept. Python then clips in several passes.
std::optional<OptionalTensors> usual_gradients(py::handle parameters) {
  if (!PyList_CheckExact(parameters.ptr()) || !ordinary_context()) {
    return std::nullopt;
  }
  const Py_ssize_t count = PyList_GET_SIZE(parameters.ptr());
  OptionalTensors gradients;
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
    if (!ordinary_gradient(gradient) || gradient.device() != first->device()) {
      return std::nullopt;
    }
  }
  std::sort(objects.begin(), objects.end());
  if (first == nullptr || std::adjacent_find(objects.begin(), objects.end()) != objects.end()) {
    return std::nullopt;
  }
  return gradients;
}

// (values, counts, clipping), after clipping, or None if the list of parameters is unusual.
py::object clip_gradients_in_eager_mode(py::handle parameters, double p, const Value& max_norm, bool skip_nonfinite) {
  const std::optional<OptionalTensors> gradients = usual_gradients(parameters);
  if (!gradients) {
    return py::none();
  }
  const auto statistics = tensor_statistics(*gradients, p, std::nullopt, /*rows=*/false);
  const at::Tensor clipping = clipping_of(statistics.values, statistics.counts, p, max_norm, skip_nonfinite);
  std::vector<at::Tensor> distinct; // parameters may share a gradient
  std::unordered_set<const at::TensorImpl*> seen;
  distinct.reserve(gradients->size());
  seen.reserve(gradients->size());
  for (const std::optional<at::Tensor>& gradient : *gradients) {
    if (gradient && seen.insert(gradient->unsafeGetTensorImpl()).second) {
      distinct.push_back(*gradient);
    }
  }
  clip_units(distinct, clipping.narrow(0, 1, 1), /*rows=*/false, skip_nonfinite);
  return py::make_tuple(statistics.values, statistics.counts, clipping);
}

} // namespace

void define_statistics(py::module_& m) {
  m.def("l2_loss", run_or_refuse(&l2_loss_in_eager_mode));
  m.def(
      "tensor_statistics",
      run_or_refuse(&statistics_in_eager_mode),
      py::arg("gradients"),
      py::arg("p"),
      py::arg("weights") = py::none(),
      py::arg("rows") = false);
  m.def("clip_gradients", &clip_gradients_in_eager_mode);
  m.def("clipping_of", &clipping_of);
  m.def("unit_factors", &unit_factors);
  m.def("clip_units", &clip_units);
}

} // namespace gradscale
