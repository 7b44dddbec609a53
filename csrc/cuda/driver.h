// The devices that run kernels, their streams, and what Python decides about them.
#pragma once

#include "launch.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>
#include <optional>
#include <string>

namespace gradscale {

// True for GPUs when kernels are available. CPU tensors run device kernels only in tests.
bool runs_kernels(c10::Device device);

// The device of a tensor is the current one as long as this lives; launches go to its current stream.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device) : guard_(device) {
    if (!device.is_cpu()) {
      stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
    }
  }

  Stream stream() const {
    return stream_;
  }

 private:
  c10::DeviceGuard guard_;
  Stream stream_ = nullptr;
};

// Allocates memory for a launch, which is given back in the order of the stream.
inline at::Tensor make_workspace(int64_t bytes, const at::Tensor& like) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(like.device()));
}

// ---- Python ---------------------------------------------------------------------------------------------------------

// `image(file, name, major, minor)` gives the image of a kernel for GPUs of this compute capability, as bytes, and the
// name of its entry. Called with Python's lock, at the first launch of a kernel on a device. Without one, no kernels
// run for CUDA tensors.
void set_kernel_images(std::optional<pybind11::function> image);

// Until the next call without a library, CPU tensors are treated as tensors of a GPU with this driver, a library that
// stands in for CUDA's.
void use_driver_for_cpu(const std::optional<std::string>& library);

// Until the next call without a function, `record(file, name)` is called for CPU and CUDA tensors alike instead of
// starting kernels. Their outputs are not written.
void record_kernels(std::optional<pybind11::function> record);

} // namespace gradscale
