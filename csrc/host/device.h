// Which kernels run on a device, and where.
#pragma once

#include "../device_kernels.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#if GRADSCALE_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace gradscale {

// Null: the CPU's own, of variants/kernels.h.
const DeviceKernels* device_kernels(c10::Device device);

// Tests run those of the simulator on CPU tensors; null ends that.
void use_device_kernels_for_cpu(const DeviceKernels* kernels);

// The device of a tensor is the current one as long as this lives; launches go to its current stream.
class OnDevice {
 public:
#if GRADSCALE_WITH_CUDA
  explicit OnDevice(c10::Device device) : guard_(device.is_cuda() ? std::optional(device) : std::nullopt) {
    if (device.is_cuda()) {
      stream_ = c10::cuda::getCurrentCUDAStream(device.index()).stream();
    }
  }
#else
  explicit OnDevice(c10::Device /*device*/) {
  }
#endif

  void* stream() const {
    return stream_;
  }

 private:
#if GRADSCALE_WITH_CUDA
  c10::cuda::OptionalCUDAGuard guard_;
#endif
  void* stream_ = nullptr;
};

// Memory for a launch, given back in the order of the stream.
inline at::Tensor make_workspace(int64_t bytes, const at::Tensor& beside) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(beside.device()));
}

} // namespace gradscale
