// The targets of policies' short rows, where a thread has a row. Each gives its elements in any order.
#pragma once

#include "../math/thread_row.cuh"
#include "device_table.h"

namespace gradscale {

// A distribution, in shared memory.
template <class U, int width>
class ProbabilitiesOfThread {
  using Staged = StagedRows<U, width>;

 public:
  static constexpr int kUnit = Staged::kUnit;
  static constexpr int kBytes = Staged::kBytes; // of shared memory

  GRADSCALE_DEVICE ProbabilitiesOfThread(const DeviceSegment& segment, const WarpOfRows& rows, char* shared)
      : rows_(rows.of(static_cast<const U*>(segment.target), segment.target_stride)), staged_(shared, rows.lane) {
  }
  GRADSCALE_DEVICE bool are_windows() const {
    return rows_.are_windows(width);
  }
  GRADSCALE_DEVICE void ask() {
    staged_.ask(rows_, 0);
  }
  GRADSCALE_DEVICE void put(bool windows) {
    if (windows) {
      staged_.put(0);
      staged_.bring(rows_, 1);
    } else {
      staged_.put_elements(rows_);
    }
  }
  GRADSCALE_DEVICE void prepare(const DeviceSegment& /*segment*/, int64_t /*row*/) {
  }
  template <int size>
  GRADSCALE_DEVICE void get(int first, float (&values)[size]) const {
    staged_.get(first, values);
  }

 private:
  RowsOfWarp<const U> rows_;
  Staged staged_;
};

// A class. One that no logit stands for gives NaN.
template <int width>
class ClassOfThread : public NotStaged {
 public:
  static constexpr int kUnit = 1;
  static constexpr int kBytes = 0;

  GRADSCALE_DEVICE ClassOfThread(const DeviceSegment& /*segment*/, const WarpOfRows& /*rows*/, char* /*shared*/) {
  }
  GRADSCALE_DEVICE void prepare(const DeviceSegment& segment, int64_t row) {
    const int64_t chosen = static_cast<const int64_t*>(segment.target)[row * segment.target_stride];
    const bool valid = chosen >= 0 && chosen < width;
    chosen_ = valid ? static_cast<int32_t>(chosen) : -1;
    elsewhere_ = valid ? 0.0f : NAN;
  }
  template <int size>
  GRADSCALE_DEVICE void get(int first, float (&values)[size]) const {
#pragma unroll
    for (int k = 0; k < size; ++k) {
      values[k] = chosen_ == first + k ? 1.0f : elsewhere_;
    }
  }

 private:
  int32_t chosen_ = -1;
  float elsewhere_ = 0;
};

} // namespace gradscale
