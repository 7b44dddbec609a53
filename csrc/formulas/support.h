// A categorical support: num_bins centres, equally spaced over minimum..maximum in transformed coordinates.
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
