// Sums kept apart by lane: a loop over lanes vectorises whatever the instruction set, and the order of additions is the
// same for all of them. Included once for each instruction set.
#include "../formulas/port.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

template <class A>
struct LaneSum {
  alignas(64) A lanes[kLanes] = {};

  // Adds up by halves: a chain of 16 additions would wait longer than the rest of a short row takes.
  A total() const {
    A sums[8];
    for (int k = 0; k < 8; ++k) {
      sums[k] = lanes[k] + lanes[k + 8];
    }
    for (int k = 0; k < 4; ++k) {
      sums[k] += sums[k + 4];
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
  }
};

template <class Power>
double lane_sum(int64_t size, Power power) {
  LaneSum<double> sum;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
#pragma omp simd
    for (int k = 0; k < kLanes; ++k) {
      sum.lanes[k] += power(i + k);
    }
  }
  for (int k = 0; i < size; ++i, ++k) {
    sum.lanes[k] += power(i);
  }
  return sum.total();
}

// The largest magnitude; NaN where there is one.
template <class Magnitude>
double largest(int64_t size, Magnitude magnitude) {
  double maximum = 0;
  int unordered = 0;
#pragma omp simd reduction(max : maximum) reduction(| : unordered)
  for (int64_t i = 0; i < size; ++i) {
    const double value = magnitude(i);
    maximum = value > maximum ? value : maximum;
    unordered |= value != value;
  }
  return unordered ? static_cast<double>(NAN) : maximum;
}

template <class Magnitude>
double plain_power_sum(int64_t size, double p, Magnitude magnitude) {
  if (p == 1) {
    return lane_sum(size, magnitude);
  }
  if (p == 2) {
    return lane_sum(size, [=](int64_t i) { return magnitude(i) * magnitude(i); });
  }
  return lane_sum(size, [=](int64_t i) { return std::pow(magnitude(i), p); });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
