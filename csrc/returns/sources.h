// Operands of a call as the CPU's kernels read them: along one dimension, a piece at a time. Contiguous pieces of the
// kernel's type are read in place; others are copied to a buffer that fits in the L1 cache.
#pragma once

#include "call.h"

#include <algorithm>
#include <cstring>

namespace gradscale {

constexpr int kMostLanes = 16;

// Element i is data[i * advance]. If `advance` is 0, all elements are equal, and `data` holds kMostLanes copies.
template <class A>
struct Piece {
  const A* data;
  int64_t advance;

  A operator[](int64_t i) const {
    return data[i * advance];
  }
};

// An operand along the dimension `inner`: numbers, or flags if A is uint8_t.
template <class A>
class Source {
 public:
  Source() = default;

  Source(const Operand& operand, int inner)
      : operand_(&operand),
        inner_(inner),
        inner_stride_(operand.strides[inner]),
        outer_stride_(operand.strides[1 - inner]) {
    if constexpr (kIsFlag) {
      is_run_ = inner_stride_ == 1;
    } else {
      is_run_ = inner_stride_ == 1 && operand.element == ElementOf<A>::value;
    }
    if (inner_stride_ == 0 && outer_stride_ == 0) {
      fill(element_at<A>(operand, 0, 0));
    }
  }

  // `count` elements from `begin` on, at index `outer` of the other dimension, padded with zeros to `padded` elements.
  // Numbers that are all equal are not padded with zeros, but with the same number.
  Piece<A> piece(int64_t outer, int64_t begin, int64_t count, int64_t padded, A* buffer) {
    const bool is_constant = kIsFlag ? operand_->data == nullptr && count == padded : inner_stride_ == 0;
    if (is_constant) {
      if (outer_stride_ != 0) {
        fill(inner_ == kStep ? element_at<A>(*operand_, outer, 0) : element_at<A>(*operand_, 0, outer));
      }
      return {copies_, 0};
    }
    const int64_t offset = outer * outer_stride_ + begin * inner_stride_;
    if (is_run_ && count == padded) {
      return {static_cast<const A*>(operand_->data) + offset, 1};
    }
    copy(offset, count, buffer);
    std::fill(buffer + count, buffer + padded, A(0));
    return {buffer, 1};
  }

 private:
  static constexpr bool kIsFlag = std::is_same_v<A, uint8_t>;

  void fill(A value) {
    std::fill(copies_, copies_ + kMostLanes, value);
  }

  void copy(int64_t offset, int64_t count, A* buffer) const {
    if (operand_->data == nullptr) {
      std::fill(buffer, buffer + count, copies_[0]);
      return;
    }
    if (is_run_) {
      memcpy(buffer, static_cast<const A*>(operand_->data) + offset, count * sizeof(A));
      return;
    }
    dispatch_operand<A>(*operand_, [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(operand_->data) + offset;
      for (int64_t i = 0; i < count; ++i) {
        buffer[i] = static_cast<A>(to_accumulate(from[i * inner_stride_]));
      }
    });
  }

  const Operand* operand_ = nullptr;
  int inner_ = kStep;
  int64_t inner_stride_ = 0;
  int64_t outer_stride_ = 0;
  bool is_run_ = false;
  A copies_[kMostLanes];
};

// Joins rows begin to end - 1 into `one`, a call with one row. Returns false if the rows are not contiguous.
inline bool joined(const ReturnsCall& call, int64_t begin, int64_t end, ReturnsCall& one) {
  one = call;
  one.rows = 1;
  one.steps = (end - begin) * call.steps;
  bool is_dense = true;
  const auto move = [&](auto& tensor, int64_t size) {
    const bool is_constant = tensor.data == nullptr || (tensor.strides[kRow] == 0 && tensor.strides[kStep] == 0);
    is_dense = is_dense && (is_constant || (tensor.strides[kStep] == 1 && tensor.strides[kRow] == call.steps));
    if (!is_constant) {
      using Pointer = decltype(tensor.data);
      tensor.data = reinterpret_cast<Pointer>(reinterpret_cast<intptr_t>(tensor.data) + begin * call.steps * size);
    }
  };
  for (int k = 0; k < kOperands; ++k) {
    move(one.operands[k], k < kNumbers ? element_size(one.operands[k].element) : 1);
  }
  for (ReturnsOutput& output : one.outputs) {
    move(output, element_size(call.element));
  }
  return is_dense;
}

} // namespace gradscale
