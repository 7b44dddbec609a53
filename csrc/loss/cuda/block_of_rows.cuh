// What a block of loss_rows stores about its rows, of any kind.
//
// A kind of rows is a type that is one of the template arguments of loss_rows, with
//
// - kBlocks: the number of blocks of kRowThreads threads that a multiprocessor is to hold;
// - kHasHalves: its gradients may be bfloat16;
// - kSharedBytes: the shared memory of a block, one for all kinds of a call;
// - rows_of_block(const BlockOfRows&), static: a block has that many rows, the last block of a segment perhaps fewer;
// - run(const BlockOfRows&), static: all threads of a block compute its rows.
//
// row_specification.h has the names of these types and the rows that a block of each has.
#pragma once

#include "../../cuda/device.h"
#include "device_pass.h"

namespace gradscale {

// Zeros, subnormal and infinite numbers are none.
GRADSCALE_DEVICE bool is_power_of_two(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x) & 0x7fffffffu;
  return (bits & 0x7fffffu) == 0 && bits != 0 && bits != 0x7f800000u;
}

struct BlockOfRows {
  const Pass& pass;
  int32_t rows_of_warp; // as in DevicePass
  const char* table;
  const Span& span;
  const Head& head;
  const Coefficients& coefficients;
  const Segment& segment;
  int32_t index; // of the block, in the segment
  char* shared;  // the kind's kSharedBytes, at a multiple of 16

  GRADSCALE_DEVICE bool is_backward() const {
    return pass.grad_output.data != nullptr;
  }

  // True if the gradients of the forward pass can be scaled in bfloat16 without a second rounding: by a power of two.
  GRADSCALE_DEVICE bool multiplies_halves() const {
    const Slab& by = pass.grad_output;
    return is_backward() && pass.has_gradients && by.stride == 0 && is_power_of_two(static_cast<float>(by.load(0))) &&
           segment.gradient.element == Element::bfloat16;
  }

  // Raw centres of the type of sums; null where the support has none.
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
      result = coefficients.of_row(segment, row, is_backward() ? pass.grad_output.load(row) : 1);
    }
    result.counts = result.counts && !is_skipped(row);
    return result;
  }

  // A scalar target.
  template <class A>
  GRADSCALE_DEVICE A target(int64_t row) const {
    A value = 0;
    dispatch_element(segment.target.element, [&](auto type) {
      using U = decltype(type);
      value = static_cast<A>(to_accumulate(static_cast<const U*>(segment.target.data)[row * segment.target.stride]));
    });
    return value;
  }

  // The backward pass leaves losses and details as they are.
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
