// A row of loss_rows whose type, width and support may be any, and the group of threads that computes it together. The
// row is read in windows of 16 bytes.
#pragma once

#include "../../cuda/rows.cuh"
#include "../../formulas/exponential.h"
#include "../../formulas/losses.h"
#include "block_of_rows.cuh"

namespace gradscale {

// A row of a segment and the group that has it.
struct RowTask {
  const BlockOfRows& block;
  Group group;
  int64_t row;
  int32_t width; // 0 for threads beyond the last row, which take part in reductions
  bool active;
  bool counts; // neither masked nor skipped
  double coefficient;

  GRADSCALE_DEVICE const Head& head() const {
    return block.head;
  }
  GRADSCALE_DEVICE const Segment& segment() const {
    return block.segment;
  }
  GRADSCALE_DEVICE bool leads() const {
    return active && group.rank == 0;
  }
  GRADSCALE_DEVICE void store_loss(double loss) const {
    if (leads()) {
      block.store_loss(row, loss, counts);
    }
  }
  GRADSCALE_DEVICE void store_detail(double value) const {
    if (leads()) {
      block.store_detail(row, value);
    }
  }
  template <class T>
  GRADSCALE_DEVICE const T* prediction() const {
    return static_cast<const T*>(segment().prediction.data) + row * segment().prediction.stride;
  }

  // From the parts of all threads of the group: a sum, and a largest magnitude.
  GRADSCALE_DEVICE void store_metrics(double gradient_square, double largest_logit) const {
    const RowMetrics metrics{group.sum(gradient_square), group.maximum(largest_logit)};
    if (leads()) {
      block.store_metrics(row, metrics, counts);
    }
  }

  // Writes elements first .. first + size of the row's gradient, and returns the sum of their squares.
  template <class T, int size, class A>
  GRADSCALE_DEVICE A write_gradient(int32_t first, A* values) const {
    A square = 0;
#pragma unroll
    for (int k = 0; k < size; ++k) {
      values[k] = counts ? values[k] : A(0);
      square += first + k >= 0 && first + k < width ? values[k] * values[k] : A(0);
    }
    if (segment().gradient.element == ElementOf<T>::value) {
      T* to = static_cast<T*>(segment().gradient.data) + row * segment().gradient.stride;
      write_elements<size>(to, width, first, values);
    } else {
      A* to = static_cast<A*>(segment().gradient.data) + row * segment().gradient.stride;
      write_elements<size>(to, width, first, values);
    }
    return square;
  }
};

template <class A>
GRADSCALE_DEVICE A smoothing_of_bin(const RowTask& task) {
  const double smoothing = task.head().label_smoothing;
  return smoothing == 0 ? A(0) : static_cast<A>(smoothing / static_cast<double>(task.segment().width));
}

} // namespace gradscale
