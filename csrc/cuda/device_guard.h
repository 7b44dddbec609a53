// The devices that run kernels, and their streams.
#pragma once

#include "launch.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

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

} // namespace gradscale
