// Operands of a call as the CPU's kernels read them, along one dimension. Included once for each instruction set.
#pragma once

#include "call.h"

#include <cstring>

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

// The most lanes of a kernel.
constexpr int kMostLanes = 16;

// Numbers along `kInner` at one place of the other dimension. They are read in place: as a run, as one number for all,
// or wherever their stride leads.
template <class A>
class Source {
 public:
  Source(const Operand& operand, int inner)
      : operand_(operand), inner_stride_(operand.strides[inner]), outer_stride_(operand.strides[1 - inner]) {
    if (operand.data == nullptr) {
      fill(static_cast<A>(operand.constant));
    }
    is_run_ = operand.element == ElementOf<A>::value && inner_stride_ == 1;
    is_fixed_ = operand.data == nullptr;
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  // Moves to a place of the other dimension.
  void enter(int64_t outer) {
    if (is_fixed_) {
      return;
    }
    offset_ = outer * outer_stride_;
    if (is_run_) {
      run_ = static_cast<const A*>(operand_.data) + offset_;
      advance_ = 1;
    } else if (inner_stride_ == 0) {
      fill(read_number<A>(operand_.data, offset_, operand_.element));
      is_fixed_ = outer_stride_ == 0;
    } else {
      run_ = nullptr;
    }
  }

  // Elements i .. i + count, a vector: a run of them, or a copy in `buffer`.
  const A* read(int64_t i, int count, A* buffer) const {
    if (run_ != nullptr) {
      return run_ + i * advance_;
    }
    for (int k = 0; k < count; ++k) {
      buffer[k] = at(i + k);
    }
    return buffer;
  }

  // Elements 0 .. count: the run itself, or a copy in `buffer`.
  const A* row(int64_t count, A* buffer) const {
    if (run_ != nullptr && advance_ == 1) {
      return run_;
    }
    for (int64_t i = 0; i < count; ++i) {
      buffer[i] = at(i);
    }
    return buffer;
  }

  A at(int64_t i) const {
    return run_ != nullptr ? run_[i * advance_]
                           : read_number<A>(operand_.data, offset_ + i * inner_stride_, operand_.element);
  }

 private:
  void fill(A value) {
    for (A& copy : copies_) {
      copy = value;
    }
    run_ = copies_;
    advance_ = 0;
  }

  const Operand& operand_;
  int64_t inner_stride_;
  int64_t outer_stride_;
  int64_t offset_ = 0;
  const A* run_ = nullptr;
  int64_t advance_ = 0;
  bool is_run_;
  bool is_fixed_;
  A copies_[kMostLanes];
};

// The same of flags.
class FlagSource {
 public:
  FlagSource(const FlagOperand& operand, int inner)
      : operand_(operand), inner_stride_(operand.strides[inner]), outer_stride_(operand.strides[1 - inner]) {
    if (operand.data == nullptr) {
      fill(operand.constant);
    }
  }
  FlagSource(const FlagSource&) = delete;
  FlagSource& operator=(const FlagSource&) = delete;

  void enter(int64_t outer) {
    if (operand_.data == nullptr) {
      return;
    }
    offset_ = outer * outer_stride_;
    if (inner_stride_ == 1) {
      run_ = operand_.data + offset_;
      advance_ = 1;
    } else if (inner_stride_ == 0) {
      fill(operand_.data[offset_]);
    }
  }

  const uint8_t* read(int64_t i, int count, uint8_t* buffer) const {
    if (run_ != nullptr) {
      return run_ + i * advance_;
    }
    for (int k = 0; k < count; ++k) {
      buffer[k] = at(i + k);
    }
    return buffer;
  }

  bool at(int64_t i) const {
    return (run_ != nullptr ? run_[i * advance_] : operand_.data[offset_ + i * inner_stride_]) != 0;
  }

 private:
  void fill(uint8_t value) {
    memset(copies_, value, sizeof(copies_));
    run_ = copies_;
    advance_ = 0;
  }

  const FlagOperand& operand_;
  int64_t inner_stride_;
  int64_t outer_stride_;
  int64_t offset_ = 0;
  const uint8_t* run_ = nullptr;
  int64_t advance_ = 0;
  uint8_t copies_[kMostLanes];
};

} // namespace gradscale
