#include "gradient_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

namespace gradscale {

GradientMemory::Block GradientMemory::take(size_t head, int64_t size) const {
  const auto fresh = [=] { return std::make_shared<c10::DataPtr>(c10::GetCPUAllocator()->allocate(size)); };
  if (!keeps_) {
    return fresh();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (kept_.size() <= head) {
    kept_.resize(head + 1);
  }
  Kept& kept = kept_[head];
  if (!kept.block || kept.block.use_count() > 1 || kept.size < size) {
    kept = {fresh(), size};
  }
  return kept.block;
}

at::Tensor GradientMemory::piece_of(const Block& block, int64_t offset, const at::Tensor& like, at::ScalarType dtype) {
  const int64_t bytes = like.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  c10::DataPtr data(
      static_cast<char*>(block->get()) + offset,
      new Block(block),
      [](void* owner) { delete static_cast<Block*>(owner); },
      c10::Device(c10::DeviceType::CPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, std::move(data), /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor piece = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  piece.unsafeGetTensorImpl()->set_sizes_contiguous(like.sizes());
  return piece;
}

} // namespace gradscale
