#include "to_device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <string>

namespace gradscale {

namespace {

namespace py = pybind11;

at::Tensor copied(
    const at::Tensor& scalar,
    const std::string& function,
    const std::string& argument,
    c10::Device device,
    at::ScalarType dtype) {
  {
    const py::gil_scoped_acquire gil;
    py::module_::import("gradscale_ext._context").attr("refuse_in_capture")(function, argument, py::cast(device));
  }
  return scalar.to(device, dtype, /*non_blocking=*/true);
}

} // namespace

at::Tensor to_device(
    const at::Tensor& tensor, c10::Device device, at::ScalarType dtype, const char* function, const char* argument) {
  if (tensor.device().is_cpu() && !device.is_cpu()) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("gradscale_ext::to_device", "").typed<decltype(copied)>();
    return op.call(tensor, function, argument, device, dtype);
  }
  return tensor.to(device, dtype, /*non_blocking=*/true);
}

// Shapes for tracers, and the rule for vmap, are in gradscale_ext/_flow_rules.py.
TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  m.def("to_device(Tensor scalar, str function, str argument, Device device, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(gradscale_ext, CompositeExplicitAutograd, m) {
  m.impl("to_device", copied);
}

TORCH_LIBRARY_IMPL(gradscale_ext, Autograd, m) { // scalars are constants
  m.impl("to_device", torch::CppFunction::makeFallthrough());
}

} // namespace gradscale
