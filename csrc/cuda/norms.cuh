// Sums of powers by the threads of a group, as range_kernels.h takes them on a CPU.
#pragma once

#include "../formulas/norms.h"
#include "windows.cuh"

namespace gradscale {

// Calls function(values, first) for the windows of this thread; values outside 0 .. size are 0.
template <class T, class Function>
GRADSCALE_DEVICE void each_window_of_range(const T* from, int32_t size, const Group& group, Function function) {
  using A = typename AccumulateType<T>::type;
  const Windows<T> windows(from, size);
  for (int32_t window = group.rank; window < windows.count; window += group.size) {
    A values[kVector<T>];
    read_elements<kVector<T>>(from, size, windows.first(window), A(0), values);
    function(values, windows.first(window));
  }
}

// Adds up (|g| reciprocal^2)^p, where p is a number.
template <class T>
GRADSCALE_DEVICE double plain_power_sum(const T* from, int32_t size, double p, double reciprocal, const Group& group) {
  using A = typename AccumulateType<T>::type;
  double sum = 0;
  const auto add = [&](auto power) {
    each_window_of_range(from, size, group, [&](const A* values, int32_t) {
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) {
        sum += power(std::abs(static_cast<double>(values[k])) * reciprocal * reciprocal);
      }
    });
  };
  if (p == 2) {
    add([](double magnitude) { return magnitude * magnitude; });
  } else if (p == 1) {
    add([](double magnitude) { return magnitude; });
  } else {
    add([=](double magnitude) { return positive_power(magnitude, p); });
  }
  return group.sum(sum);
}

// The largest magnitude; NaN where there is one.
template <class T>
GRADSCALE_DEVICE double largest_of_range(const T* from, int32_t size, const Group& group) {
  using A = typename AccumulateType<T>::type;
  double largest = 0;
  double unordered = 0;
  each_window_of_range(from, size, group, [&](const A* values, int32_t) {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      const double magnitude = std::abs(static_cast<double>(values[k]));
      largest = magnitude > largest ? magnitude : largest;
      unordered = magnitude != magnitude ? 1 : unordered;
    }
  });
  largest = group.maximum(largest);
  return group.sum(unordered) > 0 ? static_cast<double>(NAN) : largest;
}

// True if `value` is true in any thread of the warp. All threads of the warp must call it.
GRADSCALE_DEVICE bool any_of_warp(bool value) {
  return __any_sync(kWholeWarp, value) != 0;
}

template <class T>
GRADSCALE_DEVICE PowerSum power_sum_of_range(const T* from, int32_t size, double p, const Group& group) {
  if constexpr (!std::is_same_v<T, double>) {
    if (p == 2) { // squares of such elements neither overflow nor vanish in double
      return {sum_of_squares(from, size, group), 1};
    }
  }
  const bool is_maximum = std::isinf(p);
  const double sum = is_maximum ? largest_of_range(from, size, group) : plain_power_sum(from, size, p, 1.0, group);
  if (!any_of_warp(!is_safe(sum))) {
    return {sum, 1};
  }
  const double maximum = is_maximum ? sum : largest_of_range(from, size, group);
  const bool scaled = !is_safe(sum) && maximum > 0 && !std::isinf(maximum);
  const double root = scaled ? root_for(maximum) : 1;
  const double reciprocal = 1 / root;
  const double again =
      is_maximum ? maximum * reciprocal * reciprocal : plain_power_sum(from, size, p, reciprocal, group);
  if (is_safe(sum)) {
    return {sum, 1};
  }
  return scaled ? PowerSum{again, root} : PowerSum{maximum, 1};
}

// A block adds up the sums of the parts of a whole.
GRADSCALE_DEVICE PowerSum total_power_sum(const PowerSum* sums, int64_t count, double p, const Group& block) {
  double root = 0;
  for (int64_t i = block.rank; i < count; i += block.size) {
    root = sums[i].sum != 0 && sums[i].root > root ? sums[i].root : root;
  }
  root = block.maximum(root);
  root = root > 0 ? root : 1;
  double sum = 0;
  double largest = 0;
  double unordered = 0;
  for (int64_t i = block.rank; i < count; i += block.size) {
    const double part = sums[i].sum == 0 ? 0 : sums[i].sum * from_root_to_root(sums[i].root, root, p);
    sum += part;
    largest = part > largest ? part : largest;
    unordered = part != part ? 1 : unordered;
  }
  if (!std::isinf(p)) {
    return {block.sum(sum), root};
  }
  largest = block.maximum(largest);
  return {block.sum(unordered) > 0 ? static_cast<double>(NAN) : largest, root};
}

} // namespace gradscale
