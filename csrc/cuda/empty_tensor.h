// Allocates tensors without PyTorch's dispatcher, which takes longer than the allocation itself.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

namespace gradscale {

// The same as at::empty for a CPU or a GPU: a contiguous tensor in memory of PyTorch's allocator. For callers below
// autograd, where no dispatch mode can see the call.
inline at::Tensor empty_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const c10::Device device = options.device();
  if (device.is_cpu()) {
    return at::Tensor(at::detail::empty_cpu(sizes, options));
  }
  const c10::DeviceGuard guard(device); // where the allocator allocates
  return at::Tensor(at::detail::empty_generic(
      sizes,
      c10::GetAllocator(device.type()),
      c10::DispatchKeySet(c10::DispatchKey::CUDA),
      options.dtype().toScalarType(),
      /*memory_format_opt=*/std::nullopt));
}

} // namespace gradscale
