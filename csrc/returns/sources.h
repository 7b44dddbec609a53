// Operands of a call as the CPU's kernels read them: along one dimension, a piece at a time. Contiguous pieces of the
// kernel's type are read in place; others are copied to a buffer that fits in the L1 cache.
#pragma once

#include "call.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

namespace gradscale {

template <class A>
A read_number(const void* data, int64_t index, Element element) {
  switch (element) {
    case Element::float64:
      return static_cast<A>(static_cast<const double*>(data)[index]);
    case Element::float32:
      return static_cast<A>(static_cast<const float*>(data)[index]);
    case Element::bfloat16:
      return static_cast<A>(to_accumulate(static_cast<const BFloat16Bits*>(data)[index]));
    case Element::float16:
      return static_cast<A>(to_accumulate(static_cast<const HalfBits*>(data)[index]));
    case Element::int64:
      break;
  }
  return A(0);
}

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

// Numbers of any type along the dimension `inner`.
template <class A>
class Source {
 public:
  Source(const Operand& operand, int inner)
      : operand_(operand),
        inner_stride_(operand.strides[inner]),
        outer_stride_(operand.strides[1 - inner]),
        is_run_(operand.element == ElementOf<A>::value && inner_stride_ == 1) {
    if (operand.data == nullptr) {
      fill(static_cast<A>(operand.constant));
    } else if (inner_stride_ == 0 && outer_stride_ == 0) {
      fill(read_number<A>(operand.data, 0, operand.element));
    }
  }

  // `count` elements from `begin` on, at index `outer` of the other dimension, padded with zeros to `padded` elements
  // unless all elements are equal.
  Piece<A> piece(int64_t outer, int64_t begin, int64_t count, int64_t padded, A* buffer) {
    if (operand_.data == nullptr || (inner_stride_ == 0 && outer_stride_ == 0)) {
      return {copies_, 0};
    }
    const int64_t offset = outer * outer_stride_;
    if (inner_stride_ == 0) {
      fill(read_number<A>(operand_.data, offset, operand_.element));
      return {copies_, 0};
    }
    if (is_run_ && count == padded) {
      return {static_cast<const A*>(operand_.data) + offset + begin, 1};
    }
    copy(offset + begin * inner_stride_, count, buffer);
    std::fill(buffer + count, buffer + padded, A(0));
    return {buffer, 1};
  }

 private:
  void fill(A value) {
    std::fill(copies_, copies_ + kMostLanes, value);
  }

  void copy(int64_t offset, int64_t count, A* buffer) const {
    if (is_run_) {
      memcpy(buffer, static_cast<const A*>(operand_.data) + offset, count * sizeof(A));
      return;
    }
    dispatch_element(operand_.element, [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(operand_.data) + offset;
      for (int64_t i = 0; i < count; ++i) {
        buffer[i] = static_cast<A>(to_accumulate(from[i * inner_stride_]));
      }
    });
  }

  const Operand& operand_;
  int64_t inner_stride_;
  int64_t outer_stride_;
  bool is_run_;
  A copies_[kMostLanes];
};

// The same for flags.
class FlagSource {
 public:
  FlagSource(const FlagOperand& operand, int inner)
      : operand_(operand), inner_stride_(operand.strides[inner]), outer_stride_(operand.strides[1 - inner]) {
    memset(copies_, operand.constant, sizeof(copies_));
  }

  Piece<uint8_t> piece(int64_t outer, int64_t begin, int64_t count, int64_t padded, uint8_t* buffer) const {
    if (operand_.data == nullptr && count == padded) {
      return {copies_, 0};
    }
    if (inner_stride_ == 1 && count == padded) {
      return {operand_.data + outer * outer_stride_ + begin, 1};
    }
    if (operand_.data == nullptr) {
      memset(buffer, operand_.constant, count);
    } else {
      const uint8_t* from = operand_.data + outer * outer_stride_ + begin * inner_stride_;
      for (int64_t i = 0; i < count; ++i) {
        buffer[i] = from[i * inner_stride_];
      }
    }
    memset(buffer + count, 0, padded - count);
    return {buffer, 1};
  }

 private:
  const FlagOperand& operand_;
  int64_t inner_stride_;
  int64_t outer_stride_;
  uint8_t copies_[kMostLanes];
};

// Joins rows begin to end - 1 into `one`, a call with one row. Returns false if the rows are not contiguous.
inline bool joined(const ReturnsCall& call, int64_t begin, int64_t end, ReturnsCall& one) {
  one = call;
  one.rows = 1;
  one.steps = (end - begin) * call.steps;
  bool is_dense = true;
  const auto move = [&](const auto& from, auto& operand, int64_t size) {
    const bool is_constant = from.data == nullptr || (from.strides[kRow] == 0 && from.strides[kStep] == 0);
    is_dense = is_dense && (is_constant || (from.strides[kStep] == 1 && from.strides[kRow] == call.steps));
    if (!is_constant) {
      using Pointer = decltype(operand.data);
      operand.data = reinterpret_cast<Pointer>(reinterpret_cast<intptr_t>(from.data) + begin * call.steps * size);
    }
  };
  for (Operand ReturnsCall::* operand :
       {&ReturnsCall::rewards,
        &ReturnsCall::values,
        &ReturnsCall::next_values,
        &ReturnsCall::discount,
        &ReturnsCall::lambda,
        &ReturnsCall::ratios}) {
    move(call.*operand, one.*operand, element_size((call.*operand).element));
  }
  for (FlagOperand ReturnsCall::* flags : {&ReturnsCall::terminated, &ReturnsCall::truncated, &ReturnsCall::mask}) {
    move(call.*flags, one.*flags, 1);
  }
  for (int k = 0; k < kOutputs; ++k) {
    move(call.outputs[k], one.outputs[k], call.is_double ? 8 : 4);
  }
  return is_dense;
}

} // namespace gradscale
