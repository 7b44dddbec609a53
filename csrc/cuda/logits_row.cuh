// A row of logits of any type and width, by a group of threads that walks over it 16 bytes each at a time.
#pragma once

#include "../formulas/exponential.h"
#include "../formulas/support.h"
#include "rows.cuh"

namespace gradscale {

// A row of logits, by the group of threads that has it.
template <class T>
struct LogitsRow {
  using A = typename AccumulateType<T>::type;
  static constexpr int kSize = kVector<T>;
  const T* logits;
  int32_t width; // 0 for threads that have no row
  Group group;

  // Calls function(logits, first) for the windows of this thread; logits outside of the row are -inf.
  template <class Function>
  GRADSCALE_DEVICE void each_window(Function function) const {
    const Windows<T> windows(logits, width);
    for (int32_t window = group.rank; window < windows.count; window += group.size) {
      A values[kSize];
      read_elements<kSize>(logits, width, windows.first(window), -static_cast<A>(INFINITY), values);
      function(values, windows.first(window));
    }
  }

  // The largest logit; -inf for a row of NaN. Also finds the largest magnitude of this thread's finite logits.
  GRADSCALE_DEVICE A maximum(A& largest_finite) const {
    A largest = -static_cast<A>(INFINITY);
    largest_finite = A(0);
    each_window([&](const A* x, int32_t) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        largest = larger(largest, x[k]);
        largest_finite = larger(largest_finite, finite_magnitude(x[k]));
      }
    });
    return group.maximum(largest);
  }
  GRADSCALE_DEVICE A maximum() const {
    A largest_finite;
    return maximum(largest_finite);
  }

  // The distance of a bin from the middle of the row, in bins.
  GRADSCALE_DEVICE A position(int32_t bin) const {
    return static_cast<A>(bin) - static_cast<A>(0.5) * static_cast<A>(width - 1);
  }
};

// sum_j e_j c_j over raw centres c_j, bins at equal distance from the middle taken together, as on the CPU.
template <class T, class A>
GRADSCALE_DEVICE A raw_moment(const LogitsRow<T>& row, A maximum, const A* centers) {
  const auto e = [&](int32_t j) { return exp_nonpositive(static_cast<A>(to_accumulate(row.logits[j])) - maximum); };
  const int32_t last = row.width - 1;
  A sum = 0;
  for (int32_t j = row.group.rank; j < (row.width + 1) / 2; j += row.group.size) {
    sum += j == last - j ? e(j) * centers[j] : pair_moment(centers[j], centers[last - j], e(j), e(last - j));
  }
  return row.group.sum(sum);
}

// Decodes a row to its scalar. `moment` is the sum of e_j times centre j, or times position j if centres are not raw.
template <class A>
GRADSCALE_DEVICE A decoded_row(A moment, A sum, const Support& support) {
  return support.raw ? moment / sum : decoded_moment(2 * moment / sum, support);
}

} // namespace gradscale
