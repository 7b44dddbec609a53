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
#include "../segment.h"

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
    return pass.is_backward;
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
      result = coefficients.row_factor(segment, row);
    }
    result.counts = result.counts && !is_skipped(row);
    return result;
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

} // namespace gradscale
