// One call of the multi-step loss as its kernels on a device look it up.
#pragma once

#include "../math/row_shape.h"
#include "device_calls.h"

#include "../port/table.h"

namespace gradscale {

struct DeviceHead {
  Head head; // the raw centres of its support are in the table
  Coefficients coefficients;
  Slab loss;   // those of its first step; the other steps follow
  Slab detail; // likewise
  int64_t width;
  int64_t raw_centers_float;  // the place of raw centres in the table, for sums in float; -1: none
  int64_t raw_centers_double; // likewise, for sums in double
  int32_t threads_per_row;    // in GroupRows
  int32_t num_segments;
  const double* divisor; // on the device, where coefficients are divided by it
};

struct DeviceSegment {
  const void* prediction;
  const void* target;
  void* gradient;
  int64_t prediction_stride;
  int64_t target_stride;
  int64_t gradient_stride;
  double step_weight;
  double gradient_scale;
  int32_t head;
  int32_t step;
  int8_t prediction_element;
  int8_t target_element;
  int8_t gradient_element;

  GRADSCALE_HOST_DEVICE Rows target_rows() const {
    return {const_cast<void*>(target), target_stride, static_cast<Element>(target_element)};
  }
};

// Segments of one head that follow each other and have rows of the same kind, so that each takes as many blocks of
// loss_rows.
struct SegmentSpan {
  int32_t first_segment;
  int32_t first_block;
  int32_t blocks_of_segment;
  int32_t kind_of_rows; // its place among the template arguments of loss_rows
};

struct LossTable {
  Table table;
  int64_t heads;    // their place in the table
  int64_t segments; // likewise
  int64_t spans;    // likewise
  int64_t num_heads;
  int64_t num_segments;
  int64_t num_spans;

  GRADSCALE_HOST_DEVICE const DeviceHead& head(int64_t index) const {
    return table.at<DeviceHead>(heads)[index];
  }
  GRADSCALE_HOST_DEVICE const DeviceSegment& segment(int64_t index) const {
    return table.at<DeviceSegment>(segments)[index];
  }
};

struct RowsArguments {
  LossTable table;
  int64_t batch;
  int32_t rows_of_warp;  // in LossRows: rows_per_warp() rounds it up
  unsigned* blocks_done; // a counter for loss_totals, which comes next: set to 0
  Slab grad_output;      // no data: this is the forward pass
  bool has_gradients;    // gradients for grad_output 1 are there
  Slab skipped;          // the backward pass skips samples whose loss here is not finite; no data: it skips none
};

// The sums of each block: contributions to the loss, samples that are not finite, and of every head its losses, its
// unmasked entries and its share of the loss.
struct PartialSums {
  double* data; // [blocks][2 + 3 num_heads]
  int64_t num_heads;

  enum OfHead { kPlain, kUnmasked, kShare };

  GRADSCALE_HOST_DEVICE int64_t size() const {
    return 2 + 3 * num_heads;
  }
  GRADSCALE_HOST_DEVICE int64_t index_of(OfHead sum, int64_t head) const {
    return 2 + sum * num_heads + head;
  }
  GRADSCALE_HOST_DEVICE double& at(int64_t block, int64_t index) const {
    return data[block * size() + index];
  }
};

struct TotalsArguments {
  LossTable table;
  int64_t batch;
  bool each_sample;
  bool skip_nonfinite;
  Slab per_sample;
  Slab skipped;
  Slab loss;
  Slab head_means;
  Slab head_losses;
  int64_t* num_nonfinite;
  PartialSums partial;
  unsigned* blocks_done;
};

struct CountArguments {
  LossTable table;
  int64_t batch;
  double* divisors; // by head: the number of unmasked entries, at least 1
};

} // namespace gradscale
