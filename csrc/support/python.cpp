// What Python calls in eager mode.
#include "../torch/tensor_element.h"
#include "support.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gradscale {

namespace {

// The tensor, if the kernels can read it in this context; otherwise undefined.
at::Tensor readable(py::handle given) {
  at::Tensor tensor;
  const bool is_read = THPVariable_Check(given.ptr()) && ordinary_or_inference_context() &&
                       read_ordinary(THPVariable_Unpack(given.ptr()), tensor) && has_element(tensor);
  return is_read ? tensor : at::Tensor();
}

// Decoded values, or None if the fused kernel does not accept these logits.
py::object decode_in_eager_mode(
    const std::shared_ptr<OwnedSupport>& support, const py::object& python_support, py::handle logits) {
  const at::Tensor tensor = readable(logits);
  if (!tensor.defined() || tensor.dim() < 1 || tensor.size(-1) != support->get().num_bins) {
    return py::none();
  }
  return py::cast(decode(support, python_support, tensor));
}

// Distributions, or None if a gradient is wanted, or the kernel does not accept these scalars.
py::object encode_in_eager_mode(const std::shared_ptr<OwnedSupport>& support, double sigma_ratio, py::handle scalars) {
  const at::Tensor tensor = readable(scalars);
  if (!tensor.defined() || (at::GradMode::is_enabled() && tensor.requires_grad())) {
    return py::none();
  }
  return py::cast(encode(support->get(), sigma_ratio, tensor));
}

// Projected probabilities, or None if the kernel does not accept these tensors.
py::object project_in_eager_mode(
    const std::shared_ptr<OwnedSupport>& support, py::handle probabilities, py::handle rewards, py::handle discounts) {
  const at::Tensor p = readable(probabilities), r = readable(rewards), d = readable(discounts);
  if (!p.defined() || !r.defined() || !d.defined() || p.dim() < 1 || p.size(-1) != support->get().num_bins ||
      r.sizes() != p.sizes().slice(0, p.dim() - 1) || d.sizes() != r.sizes() || r.device() != p.device() ||
      d.device() != p.device()) {
    return py::none();
  }
  py::gil_scoped_release no_gil;
  at::Tensor result = project(support->get(), p, r, d);
  py::gil_scoped_acquire gil;
  return py::cast(std::move(result));
}

} // namespace

void define_support(py::module_& m) {
  py::class_<OwnedSupport, std::shared_ptr<OwnedSupport>>(m, "Support")
      .def(py::init([](const std::vector<std::string>& names, const std::vector<double>& numbers) {
        return std::make_shared<OwnedSupport>(support_from(names, numbers));
      }));
  m.def("encode", &encode_in_eager_mode);
  m.def("project", &project_in_eager_mode);
  m.def("decode", &decode_in_eager_mode);
}

} // namespace gradscale
