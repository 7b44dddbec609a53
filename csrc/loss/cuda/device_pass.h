// One pass over a call's rows as it is copied to a device: the pass itself, and its lists as a table.
#pragma once

#include "../../cuda/row_shape.h"
#include "../../cuda/table.h"
#include "../segment.h"

namespace gradscale {

// Consecutive segments of one head with the same kind of rows, so that all of them take the same number of blocks of
// loss_rows.
struct Span {
  int32_t head;
  int32_t first_segment;
  int32_t first_block;
  int32_t blocks_per_segment;
  int32_t row_kind;        // the index of the kind of rows among the template arguments of loss_rows
  int32_t threads_per_row; // in GroupRows
  int64_t raw_centers;     // the offset in the table of the raw centres, in the type of sums; -1: none
};

// Sums over samples: their part of the loss, and the number of those whose loss is not finite.
struct LossSums {
  double loss;
  double nonfinite;
};

// The sums of each block of loss_totals.
struct PartialSums {
  LossSums* losses; // [blocks]
  HeadSums* heads;  // [blocks][num_heads]
};

// The argument of all kernels of the loss. The lists of the pass are at these offsets in the table.
struct DevicePass {
  Pass pass;
  Table table;
  int64_t heads;
  int64_t coefficients;
  int64_t segments;
  int64_t spans;
  int64_t num_spans;
  int32_t rows_per_warp; // LossRows rounds it up, with rounded_rows_per_warp()
  PartialSums partial;   // of loss_totals
  unsigned* blocks_done; // a counter for loss_totals, which loss_rows sets to 0

  GRADSCALE_HOST_DEVICE const Head& head(int64_t index) const {
    return table.at<Head>(heads)[index];
  }
  GRADSCALE_HOST_DEVICE const Coefficients& coefficients_of(int64_t head) const {
    return table.at<Coefficients>(coefficients)[head];
  }
  GRADSCALE_HOST_DEVICE const Segment& segment(int64_t index) const {
    return table.at<Segment>(segments)[index];
  }
};

} // namespace gradscale
