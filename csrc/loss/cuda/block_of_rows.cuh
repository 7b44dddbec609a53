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

#include "../../cuda/thread_group.cuh"
#include "../kernels.h"

namespace gradscale {

struct BlockOfRows {
  const Pass& pass;
  int32_t rows_per_warp; // as in DevicePass
  const char* table;
  const RowRange& row_range;
  const Head& head;
  const Coefficients& coefficients;
  const Segment& segment;
  const Rows* fields; // of all segments
  int32_t index;      // of the block in the segment
  int32_t thread;     // of the block
  char* shared;       // kSharedBytes of the kind of rows, aligned to 16 bytes

  GRADSCALE_DEVICE RowFactor factor_of(int64_t row) const {
    RowFactor result{coefficients.mask.includes(row, segment.step), 0};
    if (segment.wants_gradient()) {
      result = coefficients.row_factor(segment, row, pass.grad_output);
    }
    const bool may_skip = pass.is_backward && pass.skipped.data != nullptr;
    result.counts = result.counts && !(may_skip && !std::isfinite(pass.skipped.load(row)));
    return result;
  }

  // The backward pass does not change losses, details and metrics.
  GRADSCALE_DEVICE void store(int64_t row, bool counts, double loss, double detail, const RowMetrics& metrics) const {
    if (pass.is_backward) {
      return;
    }
    segment.loss.store(row, counts ? loss : 0.0);
    segment.metrics[row] = counts ? metrics : RowMetrics{0, 0};
    if (segment.detail.data != nullptr) {
      segment.detail.store(row, detail);
    }
  }
};

} // namespace gradscale
