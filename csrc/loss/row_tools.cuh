// The rows of all heads on a device are made of these, as those on a CPU are of row_tools.h.
//
// A row is read in windows of 16 bytes. Rows of logits keep their exponentials in registers, 128 bytes a thread; a row
// of more than all threads of a block can keep is read again, and its exponentials taken again, for each pass over it.
// Loops over a few elements of a row (the bins of a target) read it again, from the cache, instead of asking who of the
// group has them.
#pragma once

#include "../math/exponential.h"
#include "../math/losses.h"
#include "../math/rows.cuh"
#include "block_of_rows.cuh"

namespace gradscale {

// A row of a segment and the group that has it.
struct RowTask {
  const BlockOfRows& block;
  Group group;
  int64_t row;
  int32_t width; // 0 for threads beyond the last row, which take part in reductions
  bool active;
  bool counts; // neither masked nor skipped
  double coefficient;

  GRADSCALE_DEVICE const DeviceHead& head() const {
    return block.head;
  }
  GRADSCALE_DEVICE const DeviceSegment& segment() const {
    return block.segment;
  }
  GRADSCALE_DEVICE bool leads() const {
    return active && group.rank == 0;
  }
  GRADSCALE_DEVICE void store_loss(double loss) const {
    if (leads()) {
      block.store_loss(row, loss, counts);
    }
  }
  GRADSCALE_DEVICE void store_detail(double value) const {
    if (leads()) {
      block.store_detail(row, value);
    }
  }
  template <class T>
  GRADSCALE_DEVICE const T* prediction() const {
    return static_cast<const T*>(segment().prediction) + row * segment().prediction_stride;
  }

  // Writes elements first .. first + size of the row's gradient, but for those in skip_begin .. skip_end.
  template <class T, int size, class A>
  GRADSCALE_DEVICE void write_gradient(int32_t first, A* values, int32_t skip_begin = 0, int32_t skip_end = 0) const {
#pragma unroll
    for (int k = 0; k < size; ++k) {
      values[k] = counts ? values[k] : A(0);
    }
    if (static_cast<Element>(segment().gradient_element) == ElementOf<T>::value) {
      T* to = static_cast<T*>(segment().gradient) + row * segment().gradient_stride;
      write_elements<size>(to, width, first, skip_begin, skip_end, values);
    } else {
      A* to = static_cast<A*>(segment().gradient) + row * segment().gradient_stride;
      write_elements<size>(to, width, first, skip_begin, skip_end, values);
    }
  }
};

// A row of logits. With `cached` its elements stay in registers.
template <class T, class A, bool cached>
class LogitsRow {
 public:
  static constexpr int kSize = kVector<T>;
  static constexpr int kCachedWindows = cached_windows(sizeof(T));

  GRADSCALE_DEVICE LogitsRow(const T* logits, int32_t width, const Group& group)
      : logits_(logits), width_(width), group_(group), windows_(logits, width) {
    if constexpr (cached) {
      Vector<T> raw[kCachedWindows]; // all are asked for before the first is waited for
#pragma unroll
      for (int c = 0; c < kCachedWindows; ++c) {
        if (is_whole(window_of(c))) {
          raw[c] = load16<Vector<T>>(logits_ + windows_.first(window_of(c)));
        }
      }
#pragma unroll
      for (int c = 0; c < kCachedWindows; ++c) {
        if (is_whole(window_of(c))) {
#pragma unroll
          for (int k = 0; k < kSize; ++k) {
            values_[c][k] = static_cast<A>(to_accumulate(raw[c].elements[k]));
          }
        } else if (window_of(c) < windows_.count) {
          read(window_of(c), values_[c]);
        }
      }
    }
  }

  GRADSCALE_DEVICE A operator[](int32_t j) const {
    return static_cast<A>(to_accumulate(logits_[j]));
  }

  // Calls function(values, first) for the windows of this thread: logits, which it may replace. Logits outside the row
  // are -inf.
  template <class Function>
  GRADSCALE_DEVICE void each_window(Function function) {
    if constexpr (cached) {
#pragma unroll
      for (int c = 0; c < kCachedWindows; ++c) {
        if (window_of(c) < windows_.count) {
          function(values_[c], windows_.first(window_of(c)));
        }
      }
    } else {
      for (int32_t window = group_.rank; window < windows_.count; window += group_.size) {
        A values[kSize];
        read(window, values);
        function(values, windows_.first(window));
      }
    }
  }

  // Calls function(exponentials, first) likewise, with exp(logit - maximum), which each_window has put into the place
  // of the logits.
  template <class Function>
  GRADSCALE_DEVICE void each_window_of_exponentials(A maximum, Function function) {
    each_window([&](A* values, int32_t first) {
      if constexpr (!cached) {
#pragma unroll
        for (int k = 0; k < kSize; ++k) {
          values[k] = exp_nonpositive(values[k] - maximum);
        }
      }
      function(values, first);
    });
  }

  // The largest logit of the row; -inf for a row of NaN.
  GRADSCALE_DEVICE A maximum() {
    A largest = -static_cast<A>(INFINITY);
    each_window([&](const A* values, int32_t) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        largest = larger(largest, values[k]);
      }
    });
    return group_.maximum(largest);
  }

 private:
  // The window that is cached at c.
  GRADSCALE_DEVICE int32_t window_of(int c) const {
    return group_.rank + c * group_.size;
  }
  // Whether the whole window is in the row; windows begin at multiples of 16 bytes.
  GRADSCALE_DEVICE bool is_whole(int32_t window) const {
    return windows_.first(window) >= 0 && windows_.first(window) + kSize <= width_;
  }
  GRADSCALE_DEVICE void read(int32_t window, A* values) const {
    read_elements<kSize>(logits_, width_, windows_.first(window), -static_cast<A>(INFINITY), values);
  }

  const T* logits_;
  int32_t width_;
  Group group_;
  Windows<T> windows_;
  A values_[cached ? kCachedWindows : 1][kSize];
};

template <class T>
GRADSCALE_DEVICE bool fits_registers(int64_t width, const Group& group) {
  return windows_at_most(width, sizeof(T)) <= cached_windows(sizeof(T)) * group.size;
}

template <class A>
GRADSCALE_DEVICE A smoothing_of_bin(const DeviceHead& head) {
  const double smoothing = head.head.label_smoothing;
  return smoothing == 0 ? A(0) : static_cast<A>(smoothing / static_cast<double>(head.width));
}

} // namespace gradscale
