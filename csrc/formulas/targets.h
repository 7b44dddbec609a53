// Targets over the logits of a row: the bins of a scalar (TwoHot, HLGauss), a class, and label smoothing.
//
// A target over bins has mass in bins begin to end - 1. If its scalar is NaN, they are valid bins, whose mass is NaN.
#pragma once

#include "support.h"

namespace gradscale {

// The two bins around a position.
template <class A>
struct TwoBins {
  int32_t begin;
  int32_t end;
  A lower; // the mass of the lower bin
  A upper;

  GRADSCALE_HOST_DEVICE A mass(int32_t bin) const {
    return bin == begin ? lower : upper;
  }
  GRADSCALE_HOST_DEVICE bool is_nan() const {
    return upper != upper;
  }
  // Calls function(bin, mass) for bins begin to end - 1.
  template <class Function>
  GRADSCALE_HOST_DEVICE void for_each(Function function) const {
    function(begin, lower);
    function(begin + 1, upper);
  }
};

using TwoHotTarget = TwoBins<double>;

// The target of x, given its position among the bins and its lower bin.
GRADSCALE_HOST_DEVICE TwoHotTarget two_hot_from(double x, double position, int32_t bin, const Support& support) {
  double upper = position - bin;
  if (support.raw) {
    const double low = raw_center(support, bin);
    upper = clamp_between((x - low) / (raw_center(support, bin + 1) - low), 0, 1);
  }
  return {bin, bin + 2, 1 - upper, upper};
}

GRADSCALE_HOST_DEVICE TwoHotTarget two_hot(double x, const Support& support) {
  const double position = position_among_bins(transformed_target(x, support), support);
  return two_hot_from(x, position, bin_below(position, support), support);
}

constexpr double kRootOfHalf = 0.70710678118654752440; // 1 / sqrt(2)

// Twice the mass of a normal distribution between edges, which are relative to its mean and in units of sqrt(2)
// standard deviations: between(at(low), at(high)), or around(below, above) for edges on both sides of the mean.
struct ErrorFunction {
  using Number = double;
  static GRADSCALE_HOST_DEVICE double at(double edge) {
    return std::erf(edge);
  }
  static GRADSCALE_HOST_DEVICE double between(double low, double high) {
    return high - low;
  }
  static GRADSCALE_HOST_DEVICE double around(double below, double above) {
    return std::erf(below) + std::erf(above);
  }
};

// A normal distribution around the target with a standard deviation of sigma_ratio bins, truncated to the support.
// `Normal` computes its masses, as ErrorFunction does.
template <class Normal>
struct GaussTarget {
  using A = typename Normal::Number;
  int32_t begin;
  int32_t end;
  A width;         // of a bin, in units of sqrt(2) standard deviations
  A first_edge;    // the lower edge of bin `begin` minus the target, in bins
  A inverse_total; // of the masses

  GaussTarget() = default;
  GRADSCALE_HOST_DEVICE GaussTarget(double x, const Support& support, A width) : width(width) {
    const double position = position_among_bins(transformed_target(x, support), support);
    const int32_t center = position > 0 ? static_cast<int32_t>(position + 0.5) : 0; // in range for NaN too
    const A offset = static_cast<A>(position - center);
    const A reach = 6 / width + A(0.5), most = static_cast<A>(support.num_bins); // erf is 1 from 5.93 on, in double
    const auto bins_below = static_cast<int32_t>(std::fmin(reach - offset, most));
    const auto bins_above = static_cast<int32_t>(std::fmin(reach + offset, most));
    const int32_t last = support.num_bins - 1;
    begin = center > bins_below ? center - bins_below : 0;
    end = center + bins_above < last ? center + bins_above + 1 : last + 1;
    first_edge = static_cast<A>(begin - center) - A(0.5) - offset;
    const A below = (static_cast<A>(center) + offset + A(0.5)) * width;
    const A above = (static_cast<A>(last - center) - offset + A(0.5)) * width;
    inverse_total = 1 / Normal::around(below, above);
  }
  GRADSCALE_HOST_DEVICE bool is_nan() const {
    return inverse_total != inverse_total;
  }
  GRADSCALE_HOST_DEVICE A mass(int32_t bin) const {
    const A edge = first_edge + static_cast<A>(bin - begin);
    return Normal::between(Normal::at(edge * width), Normal::at((edge + 1) * width)) * inverse_total;
  }

  // Calls function(bin, mass) for bins first to behind - 1, and for all, with one value of Normal per bin.
  template <class Function>
  GRADSCALE_HOST_DEVICE void for_each(int32_t first, int32_t behind, Function function) const {
    A edge = first_edge + static_cast<A>(first - begin);
    A low = Normal::at(edge * width);
#pragma unroll 1
    for (int32_t bin = first; bin < behind; ++bin) {
      edge += 1;
      const A high = Normal::at(edge * width);
      function(bin, Normal::between(low, high) * inverse_total);
      low = high;
    }
  }
  template <class Function>
  GRADSCALE_HOST_DEVICE void for_each(Function function) const {
    for_each(begin, end, function);
  }
};

using HLGaussTarget = GaussTarget<ErrorFunction>;

GRADSCALE_HOST_DEVICE HLGaussTarget hl_gauss(double x, const Support& support, double sigma_ratio) {
  // Beyond these limits the distribution is a point or uniform, and its edges would not be finite.
  return {x, support, clamp_between(kRootOfHalf / sigma_ratio, 1e-100, 1e100)};
}

// A class as an index in 0..width - 1, or -1 if it is out of range, which gives NaN.
GRADSCALE_HOST_DEVICE int32_t class_of(int64_t index, int64_t width) {
  return index >= 0 && index < width ? static_cast<int32_t>(index) : -1;
}

GRADSCALE_HOST_DEVICE float class_mass(int32_t chosen, int32_t j) {
  return chosen == j ? 1.0f : (chosen < 0 ? NAN : 0.0f);
}

// The sum of a target's masses that add up to 1, given their sum with rounding errors, which grow with the width. NaN
// stays NaN.
template <class A>
GRADSCALE_HOST_DEVICE A one_or_nan(A sum) {
  return A(1) + A(0) * sum;
}

// Label smoothing a of a target over `width` logits: t becomes (1 - a) t + a / width. If few logits have a target, only
// they are multiplied by `share`, and `everywhere` is added to all.
template <class A>
struct Smoothing {
  A share, everywhere;

  GRADSCALE_HOST_DEVICE Smoothing(double label_smoothing, int64_t width)
      : share(static_cast<A>(1 - label_smoothing)),
        everywhere(static_cast<A>(label_smoothing / static_cast<double>(width))) {
  }
  GRADSCALE_HOST_DEVICE A smoothed(A t) const {
    return t * share + everywhere;
  }
};

} // namespace gradscale
