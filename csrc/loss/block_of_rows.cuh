// What a block of loss_rows knows of its rows, whatever kind they are of.
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

#include "../port/device.h"
#include "device_table.h"

namespace gradscale {

// The factors of the gradients of a head.
GRADSCALE_DEVICE double head_factor(const DeviceHead& head) {
  const double factor = head.coefficients.factor;
  return head.divisor == nullptr ? factor : factor / *head.divisor;
}

// Zeros, subnormal and infinite numbers are none.
GRADSCALE_DEVICE bool is_power_of_two(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x) & 0x7fffffffu;
  return (bits & 0x7fffffu) == 0 && bits != 0 && bits != 0x7f800000u;
}

// What one row is multiplied by.
struct RowFactor {
  bool counts;        // neither masked nor skipped: or else loss and gradient are 0
  double coefficient; // of the gradient
};

struct BlockOfRows {
  const RowsArguments& arguments;
  const char* table;
  const DeviceHead& head;
  const DeviceSegment& segment;
  int32_t index; // of the block, among those of the segment
  char* shared;  // the kind's kSharedBytes, at a multiple of 16

  GRADSCALE_DEVICE bool is_backward() const {
    return arguments.grad_output.data != nullptr;
  }

  // Whether gradients of bfloat16 are there and multiplying them is exact: they are rounded once.
  GRADSCALE_DEVICE bool multiplies_halves() const {
    const Slab& by = arguments.grad_output;
    return is_backward() && arguments.has_gradients && by.stride == 0 &&
           is_power_of_two(static_cast<float>(by.load(0))) &&
           static_cast<Element>(segment.gradient_element) == Element::bfloat16;
  }

  // Raw centres of the type of sums; null where the support has none.
  template <class A>
  GRADSCALE_DEVICE const A* raw_centers() const {
    const int64_t place = sizeof(A) == 8 ? head.raw_centers_double : head.raw_centers_float;
    return place < 0 ? nullptr : reinterpret_cast<const A*>(table + place);
  }

  GRADSCALE_DEVICE bool counts(int64_t row) const {
    return head.coefficients.mask.includes(row, segment.step) &&
           (!is_backward() || arguments.skipped.data == nullptr || std::isfinite(arguments.skipped.load(row)));
  }

  GRADSCALE_DEVICE double gradient_scale(int64_t row) const {
    return segment.gradient_scale * head.coefficients.step_gradient_scale.at(row, segment.step);
  }

  GRADSCALE_DEVICE RowFactor factor_of(int64_t row) const {
    RowFactor result{counts(row), 0};
    if (segment.gradient != nullptr) {
      const Coefficients& c = head.coefficients;
      const double scale = gradient_scale(row);
      result.coefficient = head_factor(head) * segment.step_weight * scale * c.step_weights.at(row, segment.step) *
                           c.importance_weights.at(row, 0);
      if (is_backward()) {
        result.coefficient *= arguments.grad_output.load(row);
      }
      result.coefficient = scale == 0 ? 0 : result.coefficient; // also where another factor is not finite
    }
    return result;
  }

  // A scalar target.
  template <class A>
  GRADSCALE_DEVICE A target(int64_t row) const {
    A value = 0;
    dispatch_element(static_cast<Element>(segment.target_element), [&](auto type) {
      using U = decltype(type);
      value = static_cast<A>(to_accumulate(static_cast<const U*>(segment.target)[row * segment.target_stride]));
    });
    return value;
  }

  // The backward pass leaves losses and details as they are.
  GRADSCALE_DEVICE void store_loss(int64_t row, double loss, bool counts) const {
    if (!is_backward()) {
      head.loss.from(segment.step - head.head.first_step).store(row, counts ? loss : 0.0);
    }
  }
  GRADSCALE_DEVICE void store_detail(int64_t row, double value) const {
    if (!is_backward() && head.detail.data != nullptr) {
      head.detail.from(segment.step - head.head.first_step).store(row, value);
    }
  }
};

} // namespace gradscale
