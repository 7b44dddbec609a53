// The number of lanes, memory for the rows that a thread works on, and the cost of a row.
#pragma once

#include "../formulas/port.h"

#include <memory>

namespace gradscale {

// The number of lanes: CPU kernels compute this many numbers at a time, in one vector or several. 64 bytes of float.
constexpr int64_t kLanes = 16;

// Rows are padded to whole vectors.
inline int64_t padded_width(int64_t width) {
  return (width + kLanes - 1) / kLanes * kLanes;
}

// Rows of at most this many elements are computed together, one in each lane.
constexpr int64_t kShortRow = 32;

// The cost of a row, in units of one element of a long row. The constants are the costs of the row's target, logarithm
// and sums. They are smaller for short rows, which are computed together.
inline int64_t row_cost(int64_t width) {
  return width == 1 ? 16 : (width <= kShortRow ? 2 * width + 48 : width + 128);
}

// The number of elements for two rows, and for the lanes before the first element of each.
inline int64_t scratch_elements(int64_t width) {
  return 2 * (padded_width(width) + kLanes);
}

// Memory for two rows, on the heap: a row of a wide head needs more than a stack should hold.
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
