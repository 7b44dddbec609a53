// The rows of one block of loss_rows, for all kinds of rows: reads their factors and targets, and stores their results.
//
// A kind of rows is a type, a template argument of loss_rows, with
//
// - kBlocks: the number of blocks of kRowThreads threads that must fit on a multiprocessor;
// - kSharedBytes: the shared memory that a block needs, allocated once for all kinds of a call;
// - run(const BlockOfRows&), static: computes the rows of a block, with all of its threads.
//
// launch_loss.cpp repeats the names of these types, and determines the rows of a block. The last block of a segment may
// have fewer.
#pragma once

#include "../../cuda/rows.cuh"
#include "device_pass.h"

namespace gradscale {

struct BlockOfRows {
  const Pass& pass;
  int32_t rows_per_warp; // as in DevicePass
  const char* table;
  const Span& span;
  const Head& head;
  const Coefficients& coefficients;
  const Segment& segment;
  int32_t index; // of the block in the segment
  char* shared;  // kSharedBytes of the kind of rows, aligned to 16 bytes

  GRADSCALE_DEVICE bool is_backward() const {
    return pass.grad_output.data != nullptr;
  }

  // The raw centres in A, the type of sums; null if the support has none.
  template <class A>
  GRADSCALE_DEVICE const A* raw_centers() const {
    return span.raw_centers < 0 ? nullptr : reinterpret_cast<const A*>(table + span.raw_centers);
  }

  GRADSCALE_DEVICE bool is_skipped(int64_t row) const {
    return is_backward() && pass.skipped.data != nullptr && !std::isfinite(pass.skipped.load(row));
  }

  GRADSCALE_DEVICE RowFactor factor_of(int64_t row) const {
    RowFactor result{coefficients.mask.includes(row, segment.step), 0};
    if (segment.gradient.data != nullptr) {
      result = coefficients.row_factor(segment, row, is_backward() ? pass.grad_output.load(row) : 1);
    }
    result.counts = result.counts && !is_skipped(row);
    return result;
  }

  // The scalar target of a row.
  template <class A>
  GRADSCALE_DEVICE A target(int64_t row) const {
    A value = 0;
    dispatch_element(segment.target.element, [&](auto type) {
      using U = decltype(type);
      value = static_cast<A>(to_accumulate(static_cast<const U*>(segment.target.data)[row * segment.target.stride]));
    });
    return value;
  }

  // The backward pass does not change losses, metrics and details.
  GRADSCALE_DEVICE void store_loss(int64_t row, double loss, bool counts) const {
    if (!is_backward()) {
      segment.loss.store(row, counts ? loss : 0.0);
    }
  }
  GRADSCALE_DEVICE void store_metrics(int64_t row, const RowMetrics& metrics, bool counts) const {
    if (!is_backward()) {
      segment.metrics[row] = counts ? metrics : RowMetrics{0, 0};
    }
  }
  GRADSCALE_DEVICE void store_detail(int64_t row, double value) const {
    if (!is_backward() && segment.detail.data != nullptr) {
      segment.detail.store(row, value);
    }
  }
};

// ---- Rows of any type, width and support, which a group of threads reads in windows of 16 bytes ---------------------

// A row of a segment and the group of threads that owns it.
struct RowTask {
  const BlockOfRows& block;
  Group group;
  int64_t row;
  int32_t width; // 0 for groups after the last row, which only take part in reductions
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

  // Reduces the sums and maxima of the group's threads, and stores the result.
  GRADSCALE_DEVICE void store_metrics(double gradient_square, double largest_logit) const {
    const RowMetrics metrics{group.sum(gradient_square), group.maximum(largest_logit)};
    if (leads()) {
      block.store_metrics(row, metrics, counts);
    }
  }

  // Writes `size` elements of the row's gradient, from element `first` on, and returns the sum of their squares.
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
GRADSCALE_DEVICE A bin_smoothing(const RowTask& task) {
  const double smoothing = task.head().label_smoothing;
  return smoothing == 0 ? A(0) : static_cast<A>(smoothing / static_cast<double>(task.segment().width));
}

} // namespace gradscale
