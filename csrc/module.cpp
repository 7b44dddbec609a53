// The Python module. Operators that torch.compile must see register themselves with TORCH_LIBRARY in their
// own files; this pybind11 module holds the entry points of eager mode, whose calls have the least overhead.
#include "capture/guards.h"
#include "cuda/driver.h"
#include "flow/identity.h"
#include "loss/python.h"
#include "returns/returns.h"
#include "statistics/statistics.h"
#include "support/support.h"
#include "torch/gradient_pool.h"
#include "torch/refusal.h"
#include "torch/tensor_element.h"

#include <ATen/Version.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

namespace gradscale {

int32_t vector_bytes() { // declared in cpu/each_instruction_set.h
  const std::string capability = at::get_cpu_capability();
  return capability.rfind("AVX512", 0) == 0 ? 64 : (capability == "AVX2" ? 32 : 16);
}

} // namespace gradscale

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = GRADSCALE_TORCH_VERSION;
  // isinstance() takes less time for a class whose metaclass is `type`.
  pybind11::class_<gradscale::Refusal>(m, "Refusal", pybind11::metaclass(reinterpret_cast<PyObject*>(&PyType_Type)))
      .def_readonly("argument", &gradscale::Refusal::argument)
      .def_readonly("problem", &gradscale::Refusal::problem)
      .def("__bool__", [](const gradscale::Refusal&) { return false; });
  m.def("set_kernel_images", &gradscale::set_kernel_images);
  m.def("use_driver_for_cpu", &gradscale::use_driver_for_cpu);
  m.def("record_kernels", &gradscale::record_kernels);
  m.def("cpu_capability", &at::get_cpu_capability);
  m.def("ordinary_context", &gradscale::ordinary_context);
  m.def("ordinary_or_inference_context", &gradscale::ordinary_or_inference_context);
  m.def("release_gradient_pool", &gradscale::release_gradient_pool);
  for (const auto add_operator : gradscale::eager_operators()) { // the gradient-flow operators
    add_operator(m);
  }
  gradscale::define_support(m);
  gradscale::define_loss(m);
  gradscale::define_returns(m);
  gradscale::define_statistics(m);
  gradscale::define_guards(m);
}
