// The targets of TwoHot and HLGauss on a GPU, where one lane holds the target of a row: a few bins with mass. The type
// of a target has
//
// - kLanes: the largest number of lanes that may share the bins of a target;
// - begin: the first of these bins;
// - count_of(lane): the number of bins of the target that `lane` holds;
// - from_lane(lane): the target that `lane` holds;
// - each_bin(part, shift, function): calls function(bin, mass) for the bins of one of 2^shift parts.
#pragma once

#include "../cuda/lanes.cuh"
#include "../formulas/support.h"

namespace gradscale {

// Twice the mass of a normal distribution beyond an edge, with the sign of the edge. The edge is relative to the mean,
// in units of sqrt(2) standard deviations.
GRADSCALE_DEVICE float signed_tail(float edge) {
  return std::copysign(approximate_erfc(std::abs(edge)), edge);
}

// Twice the mass between two edges, from their signed tails, whose difference loses no digits.
GRADSCALE_DEVICE float mass_between(float low_tail, float high_tail) {
  const bool has_middle = bit_cast<int32_t>(low_tail) < 0 && bit_cast<int32_t>(high_tail) >= 0;
  return low_tail - high_tail + (has_middle ? 2.0f : 0.0f);
}

struct TwoHotBins {
  static constexpr int kLanes = 1;
  int32_t begin;
  float low_mass, high_mass;

  GRADSCALE_DEVICE TwoHotBins(double x, double /*sigma_ratio*/, const Support& support) {
    const TwoHotTarget target = two_hot(x, support);
    begin = target.begin;
    low_mass = static_cast<float>(1 - target.upper);
    high_mass = static_cast<float>(target.upper);
  }
  GRADSCALE_DEVICE bool is_nan() const {
    return high_mass != high_mass;
  }
  GRADSCALE_DEVICE static int32_t count_of(int /*lane*/) {
    return 2;
  }
  GRADSCALE_DEVICE TwoHotBins from_lane(int /*lane*/) const {
    return *this;
  }
  template <class Function>
  GRADSCALE_DEVICE void each_bin(int /*part*/, int /*shift*/, Function function) const {
    function(begin, low_mass);
    function(begin + 1, high_mass);
  }
};

// A normal distribution around the target. The mass of a bin is a difference of tails (erfc), on the bin's side of the
// mean.
struct GaussBins {
  static constexpr int kLanes = 16;
  int32_t begin, end;
  float bin_width;  // in sqrt(2) standard deviations
  float first_edge; // the lower edge of bin `begin`, minus the target, in bins
  float inverse_total;

  GRADSCALE_DEVICE GaussBins(double x, double sigma_ratio, const Support& support)
      : bin_width(static_cast<float>(kRootOfHalf / sigma_ratio)) {
    const double position = position_among_bins(transformed_target(x, support), support);
    const int32_t center = position > 0 ? static_cast<int32_t>(position + 0.5) : 0; // in range for NaN too
    const auto offset = static_cast<float>(position - center);
    const auto reach = static_cast<int32_t>(6 / bin_width + 1.5f); // erf is 1 from 5.93 on, in double
    const int32_t last = support.num_bins - 1;
    begin = center > reach ? center - reach : 0;
    end = center + reach < last ? center + reach + 1 : last + 1;
    first_edge = static_cast<float>(begin - center) - 0.5f - offset;
    const float below = (static_cast<float>(center) + offset + 0.5f) * bin_width;
    const float above = (static_cast<float>(last - center) - offset + 0.5f) * bin_width;
    inverse_total = 1 / (2 - approximate_erfc(below) - approximate_erfc(above));
  }
  GRADSCALE_DEVICE bool is_nan() const {
    return inverse_total != inverse_total;
  }
  GRADSCALE_DEVICE int32_t count_of(int lane) const {
    return __shfl_sync(kWholeWarp, end - begin, lane);
  }
  GRADSCALE_DEVICE GaussBins from_lane(int lane) const {
    GaussBins result = *this; // bin_width is the same for all rows
    result.begin = __shfl_sync(kWholeWarp, begin, lane);
    result.end = __shfl_sync(kWholeWarp, end, lane);
    result.first_edge = __shfl_sync(kWholeWarp, first_edge, lane);
    result.inverse_total = __shfl_sync(kWholeWarp, inverse_total, lane);
    return result;
  }
  template <class Function>
  GRADSCALE_DEVICE void each_bin(int part, int shift, Function function) const {
    const int32_t bins = (end - begin + (1 << shift) - 1) >> shift; // of a part
    const int32_t first = begin + part * bins;
    const int32_t behind = first + bins < end ? first + bins : end;
    float edge = first_edge + static_cast<float>(part * bins);
    float tail = signed_tail(edge * bin_width);
#pragma unroll 1
    for (int32_t bin = first; bin < behind; ++bin) {
      edge += 1;
      const float next = signed_tail(edge * bin_width);
      function(bin, mass_between(tail, next) * inverse_total);
      tail = next;
    }
  }
};

// The sums of a row over bins: of exponentials, and of exponentials times the bin's distance from the middle. If all
// exponentials are 1, only integers are added, so that the expectation of a uniform row is exactly the middle.
struct BinSums {
  enum Sum { kSum, kMoment, kShifted };

  template <class Units>
  GRADSCALE_DEVICE static float target(const Units&, int, float t) {
    return t;
  }
  template <class Units, int count>
  GRADSCALE_DEVICE static void add(float (&sums)[count], const Units& units, int n, float e, float d, float) {
    sums[kSum] += e;
    sums[kMoment] += e * Units::distance(n);
    if constexpr (count > kShifted) {
      sums[kShifted] += units.exists(n) ? d : 0.0f;
    }
  }
  template <class Units, int count>
  GRADSCALE_DEVICE static void add_lane(float (&sums)[count], const Units& units) {
    sums[kMoment] += sums[kSum] * units.middle();
  }
};

} // namespace gradscale
