// The devices that run kernels, their streams, and the settings that Python makes for them.
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

// Makes a device current during the lifetime of this object. stream() is the device's current stream.
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

// Allocates memory for a launch. PyTorch's allocator reuses it in the order of the stream.
inline at::Tensor make_workspace(int64_t bytes, const at::Tensor& like) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(like.device()));
}

// ---- Python ---------------------------------------------------------------------------------------------------------

// `image(file, name, major, minor)` returns the image of a kernel for GPUs of this compute capability, as bytes, and
// the name of its entry point. It is called with the GIL held, at the first launch of a kernel on a device. If no
// function is set, no kernels run for CUDA tensors.
void set_kernel_images(std::optional<pybind11::function> image);

// Treats CPU tensors as tensors of a GPU whose driver is `library`, a substitute for the CUDA driver, until the next
// call without a library.
void use_driver_for_cpu(const std::optional<std::string>& library);

// Calls `record(file, name)` for CPU and CUDA tensors instead of starting kernels, until the next call without a
// function. The outputs of kernels are not written.
void record_kernels(std::optional<pybind11::function> record);

} // namespace gradscale
