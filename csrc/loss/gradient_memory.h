// The memory that the gradients of a call are written to.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

namespace gradscale {

// Fresh pages cost more at their first touch than the loss itself, so that a module keeps a block for each head, and
// takes it again when no gradient of that head is alive any more. A gradient that is kept holds its head's block alone.
class GradientMemory {
 public:
  using Block = std::shared_ptr<c10::DataPtr>;

  explicit GradientMemory(bool keeps) : keeps_(keeps) {
  }

  // At least `size` bytes that nobody uses.
  Block take(size_t head, int64_t size) const;

  // A contiguous tensor of the shape of `like` at `offset` bytes of the block, with a storage of its own: saved, it
  // takes its own size, and resizing it is an error instead of reaching into its neighbour.
  static at::Tensor piece_of(const Block& block, int64_t offset, const at::Tensor& like, at::ScalarType dtype);

 private:
  bool keeps_;
  mutable std::mutex mutex_;
  struct Kept {
    Block block;
    int64_t size = 0;
  };
  mutable std::vector<Kept> kept_; // by head
};

} // namespace gradscale
