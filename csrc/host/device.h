// The choice of the kernels that run for the tensors of a device, and of the stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#if GRADSCALE_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace gradscale {

// A function that gives the table of a family by its name: tests run the kernels of the simulator for CPU tensors.
using FindKernels = const void* (*)(const char* family);
inline FindKernels find_kernels_for_cpu = nullptr;

// The table of a family's kernels for a device; null where the CPU's own kernels run.
template <class Kernels>
const Kernels* device_kernels(c10::Device device) {
#if GRADSCALE_WITH_CUDA
  if (device.is_cuda()) {
    static const Kernels linked{};
    return &linked;
  }
#endif
  const bool simulated = find_kernels_for_cpu != nullptr && device.is_cpu();
  return simulated ? static_cast<const Kernels*>(find_kernels_for_cpu(Kernels::kFamily)) : nullptr;
}

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

// Allocates memory for a launch, which is given back in the order of the stream.
inline at::Tensor make_workspace(int64_t bytes, const at::Tensor& beside) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(beside.device()));
}

} // namespace gradscale
