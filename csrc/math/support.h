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
};

// The target puts `upper` on bin `lower_bin + 1` and `1 - upper` on bin `lower_bin`. NaN in, NaN weight out, on bin 0.
template <class T>
struct TwoHotTarget {
  int32_t lower_bin;
  T upper;
};

template <class T>
GRADSCALE_HOST_DEVICE TwoHotTarget<T> two_hot(T x, const Support& support) {
  const T last_bin = T(support.num_bins - 1);
  const T y = transform_value(support.transform, x, T(support.eps));
  T position = (y - T(support.minimum)) * (last_bin / T(support.maximum - support.minimum));
  position = position < T(0) ? T(0) : (position > last_bin ? last_bin : position); // NaN stays NaN
  // The comparison is false for NaN, so that the index is in range whatever came in.
  const T floor_position = position > T(0) ? std::floor(position) : T(0);
  const int32_t bin = static_cast<int32_t>(floor_position);
  const int32_t lower_bin = bin < support.num_bins - 2 ? bin : support.num_bins - 2;
  return {lower_bin, position - T(lower_bin)};
}

// Expectation from the moment sum_j p_j (2j - S + 1). The integer weights are antisymmetric, so that uniform
// probabilities give exactly the middle of the support: exactly 0 when it is symmetric.
template <class T>
GRADSCALE_HOST_DEVICE T expectation_from_moment(T moment, const Support& support) {
  const T middle = T(0.5 * (support.minimum + support.maximum));
  const T half_spacing = T(0.5 * (support.maximum - support.minimum) / (support.num_bins - 1));
  return middle + half_spacing * moment;
}

} // namespace gradscale
