// Copies of scalars from the CPU to a device.
#pragma once

#include <ATen/core/Tensor.h>

namespace gradscale {

// Converts a tensor to a dtype, on this device, to which a scalar on the CPU is copied without waiting. In graphs of
// compilers, that copy is an operator of its own. Raises for a scalar on the CPU while a CUDA graph is captured: each
// replay would copy it again, from memory that may have another use by then. `function` and `argument` are for this
// error.
at::Tensor to_device(
    const at::Tensor& tensor, c10::Device device, at::ScalarType dtype, const char* function, const char* argument);

} // namespace gradscale
