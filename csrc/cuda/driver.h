// What Python decides about the kernels of devices.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

namespace gradscale {

// `image(file, name, major, minor)` gives the image of a kernel for GPUs of this compute capability, as bytes, and the
// name of its entry. Called with Python's lock, at the first launch of a kernel on a device. Without one, no kernels
// run for CUDA tensors.
void set_kernel_images(std::optional<pybind11::function> image);

// Until the next call without a library, CPU tensors are treated as tensors of a GPU with this driver, a library that
// stands in for CUDA's.
void use_driver_for_cpu(const std::optional<std::string>& library);

// Until the next call without a function, `record(file, name)` is called for CPU and CUDA tensors alike instead of
// starting kernels. What they should have computed is left as it was.
void record_kernels(std::optional<pybind11::function> record);

} // namespace gradscale
