// Memory for the rows that a thread works on, and what a row costs.
#pragma once

#include "cpu_kernel.h"

#include <cstdint>
#include <memory>

namespace gradscale {

// Rows are padded to whole vectors.
inline int64_t padded_width(int64_t width) {
  return (width + kLanes - 1) / kLanes * kLanes;
}

// Rows of at most this many elements are computed together, one in each lane.
constexpr int64_t kShortRow = 32;

// The cost of a row, in elements of a long one: in addition to its elements there are its target, its logarithm and its
// sums. Short rows are computed together.
inline int64_t row_cost(int64_t width) {
  return width == 1 ? 16 : (width <= kShortRow ? 2 * width + 48 : width + 128);
}

// The room for two rows, each with the lanes before its first element.
inline int64_t scratch_elements(int64_t width) {
  return 2 * (padded_width(width) + kLanes);
}

// On the heap: a row of a wide head needs more than a stack should hold.
class Scratch {
 public:
  explicit Scratch(int64_t width) : memory_(new double[scratch_elements(width) + 8]) {
  }

  double* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return reinterpret_cast<double*>((address + 63) / 64 * 64);
  }

 private:
  std::unique_ptr<double[]> memory_;
};

} // namespace gradscale
