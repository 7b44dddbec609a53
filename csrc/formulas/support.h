// A categorical support: num_bins centres, equally spaced over minimum..maximum in transformed coordinates; and the
// categorical targets of a scalar over its bins.
#pragma once

#include "transforms.h"

namespace gradscale {

struct Support {
  double minimum;
  double maximum;
  double eps;
  int32_t num_bins;
  Transform transform;
  bool raw;                       // interpolation and expectation use the centres transformed back
  const double* raw_centers;      // the centres transformed back, when raw: [num_bins]
  const float* raw_centers_float; // the same
};

GRADSCALE_HOST_DEVICE double bin_width(const Support& support) {
  return (support.maximum - support.minimum) / (support.num_bins - 1);
}

// The centre of a bin; exactly antisymmetric for a symmetric support.
GRADSCALE_HOST_DEVICE double center(const Support& support, int64_t bin) {
  const double middle = 0.5 * (support.minimum + support.maximum);
  return middle + 0.5 * bin_width(support) * static_cast<double>(2 * bin + 1 - support.num_bins);
}

GRADSCALE_HOST_DEVICE double raw_center(const Support& support, int64_t bin) {
  return inverse_transform_value(support.transform, center(support, bin), support.eps);
}

// Clamps x; NaN stays NaN.
GRADSCALE_HOST_DEVICE double clamp_between(double x, double low, double high) {
  return x < low ? low : (x > high ? high : x);
}

// Clamps x to the finite numbers, because a transform of infinity may compute inf * 0. NaN stays NaN.
GRADSCALE_HOST_DEVICE double clamp_finite(double x) {
  constexpr double largest = std::numeric_limits<double>::max();
  return clamp_between(x, -largest, largest);
}

GRADSCALE_HOST_DEVICE double transformed_target(double x, const Support& support) {
  return transform_value(support.transform, clamp_finite(x), support.eps);
}

// A target has mass only in bins begin to end - 1. If the scalar is NaN, these bins are valid and their mass is NaN.

struct TwoHotTarget {
  int32_t begin;
  int32_t end;
  double upper; // the mass of the upper bin; the lower one has the rest

  GRADSCALE_HOST_DEVICE double mass(int32_t bin) const {
    return bin == begin ? 1 - upper : upper;
  }
  GRADSCALE_HOST_DEVICE bool is_nan() const {
    return upper != upper;
  }

  // Calls function(bin, mass) for bins begin to end - 1.
  template <class Function>
  GRADSCALE_HOST_DEVICE void for_each(Function function) const {
    function(begin, 1 - upper);
    function(begin + 1, upper);
  }
};

// The position of y, in transformed coordinates, among the bins: 0 is the centre of the first.
GRADSCALE_HOST_DEVICE double position_among_bins(double y, const Support& support) {
  const double last_bin = support.num_bins - 1;
  return clamp_between((y - support.minimum) * (last_bin / (support.maximum - support.minimum)), 0, last_bin);
}

// The lower of the two bins around a position.
GRADSCALE_HOST_DEVICE int32_t bin_below(double position, const Support& support) {
  // The comparison is false for NaN, so that the bin is always valid.
  const double floor_position = position > 0 ? std::floor(position) : 0;
  const int32_t below_last = support.num_bins - 2;
  return floor_position < below_last ? static_cast<int32_t>(floor_position) : below_last;
}

// The target of x, given its position among the bins and its lower bin.
GRADSCALE_HOST_DEVICE TwoHotTarget two_hot_from(double x, double position, int32_t bin, const Support& support) {
  double upper = position - bin;
  if (support.raw) {
    const double low = raw_center(support, bin);
    upper = clamp_between((x - low) / (raw_center(support, bin + 1) - low), 0, 1);
  }
  return {bin, bin + 2, upper};
}

GRADSCALE_HOST_DEVICE TwoHotTarget two_hot(double x, const Support& support) {
  const double position = position_among_bins(transformed_target(x, support), support);
  return two_hot_from(x, position, bin_below(position, support), support);
}

constexpr double kRootOfHalf = 0.70710678118654752440; // 1 / sqrt(2)

// A normal distribution around the target with a standard deviation of sigma_ratio bins, truncated to the support.
struct HLGaussTarget {
  int32_t begin;
  int32_t end;
  double first; // the lowest edge minus the target, in units of sqrt(2) standard deviations
  double width; // of a bin, in the same units
  double total;

  GRADSCALE_HOST_DEVICE double mass(int32_t bin) const {
    return (std::erf(first + width * (bin + 1)) - std::erf(first + width * bin)) / total;
  }
  GRADSCALE_HOST_DEVICE bool is_nan() const {
    return total != total;
  }

  // Calls function(bin, mass) for bins begin to end - 1, with one erf per bin.
  template <class Function>
  GRADSCALE_HOST_DEVICE void for_each(Function function) const {
    const double inverse_total = 1 / total;
    double below = std::erf(first + width * begin);
    for (int32_t bin = begin; bin < end; ++bin) {
      const double above = std::erf(first + width * (bin + 1));
      function(bin, (above - below) * inverse_total);
      below = above;
    }
  }
};

GRADSCALE_HOST_DEVICE HLGaussTarget hl_gauss(double x, const Support& support, double sigma_ratio) {
  constexpr double reach = 6; // erf is 1 from 5.93 on
  const double y = clamp_between(transformed_target(x, support), support.minimum, support.maximum);
  // Beyond these limits the distribution is a point or uniform, and its edges would not be finite.
  const double width = clamp_between(kRootOfHalf / sigma_ratio, 1e-100, 1e100);
  const double first = (support.minimum - y) / bin_width(support) * width - 0.5 * width;
  const double total = std::erf(first + width * support.num_bins) - std::erf(first);
  const double low = (-reach - first) / width - 1e-9; // for a target on an edge, the bin below has mass too
  const double high = (reach - first) / width + 1;
  const int32_t begin = low > 0 ? static_cast<int32_t>(low < support.num_bins ? low : support.num_bins) : 0;
  const int32_t end = high < support.num_bins ? static_cast<int32_t>(high) : support.num_bins;
  return {begin, end, first, width, total};
}

// low_weight * low + high_weight * high, for two raw centres at equal distance from the middle. The common part of the
// weights multiplies low + high, so that equal weights of an antisymmetric pair give exactly 0. The rest of a weight
// multiplies its own centre, so that a small centre is not lost next to a large one, and a single nonzero weight gives
// its centre exactly.
template <class T>
GRADSCALE_HOST_DEVICE T pair_moment(T low, T high, T low_weight, T high_weight) {
  const T common = low_weight < high_weight ? low_weight : high_weight;
  return common * (low + high) + ((low_weight - common) * low + (high_weight - common) * high);
}

// Expectation in transformed coordinates from the moment sum_j p_j (2j - num_bins + 1). The integer weights are
// antisymmetric, so that uniform probabilities give exactly the middle of the support, and exactly 0 if the support is
// symmetric.
template <class T>
GRADSCALE_HOST_DEVICE T expectation_from_moment(T moment, const Support& support) {
  const T middle = T(0.5 * (support.minimum + support.maximum));
  const T half_spacing = T(0.5 * bin_width(support));
  return middle + half_spacing * moment;
}

// The decoded scalar, from the moment of expectation_from_moment().
template <class T>
GRADSCALE_HOST_DEVICE T decoded_moment(T moment, const Support& support) {
  return inverse_transform_value(support.transform, expectation_from_moment(moment, support), T(support.eps));
}

} // namespace gradscale
