// The memory that the gradients of a call are written to.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>

namespace gradscale {

// Fresh pages cost more at their first touch than the loss itself, so that a module keeps its block, and takes it again
// when no gradient of the last call is alive any more.
class GradientMemory {
 public:
  using Block = std::shared_ptr<c10::DataPtr>;

  explicit GradientMemory(bool keeps) : keeps_(keeps) {
  }

  // At least `size` bytes that nobody uses.
  Block take(int64_t size) const;

  // A contiguous tensor of the shape of `like` at `offset` bytes of the block, with a storage of its own: saved, it
  // takes its own size, and resizing it is an error instead of reaching into its neighbour.
  static at::Tensor piece_of(const Block& block, int64_t offset, const at::Tensor& like, at::ScalarType dtype);

 private:
  bool keeps_;
  mutable std::mutex mutex_;
  mutable Block block_;
  mutable int64_t size_ = 0;
};

} // namespace gradscale
