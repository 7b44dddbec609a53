// Targets with mass in a few elements of a row: what a scalar becomes over the bins of a support, and a class. Elements
// begin..end have mass, the others none. A NaN target has NaN mass, in range.
//
// - for_each(function): calls function(element, mass) for all elements with mass;
// - mass(element), is_nan(), for targets over bins.
#pragma once

#include "../math/support.h"

namespace gradscale {

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

  // Calls function(bin, mass) for begin..end.
  template <class Function>
  GRADSCALE_HOST_DEVICE void for_each(Function function) const {
    function(begin, 1 - upper);
    function(begin + 1, upper);
  }
};

// The target of x, whose lower bin is known.
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

// A normal around the target with a standard deviation of sigma_ratio bins, cut at the ends and normalised.
struct HLGaussTarget {
  int32_t begin;
  int32_t end;
  double first; // the lowest edge, from the target in units of sqrt(2) standard deviations
  double width; // of a bin, in these units
  double total;

  GRADSCALE_HOST_DEVICE double mass(int32_t bin) const {
    return (std::erf(first + width * (bin + 1)) - std::erf(first + width * bin)) / total;
  }
  GRADSCALE_HOST_DEVICE bool is_nan() const {
    return total != total;
  }

  // Calls function(bin, mass) for begin..end, with one erf a bin.
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
  // Beyond these limits a normal is a point, or the same everywhere, and its edges would not be numbers.
  const double width = clamp_between(0.70710678118654752440 / sigma_ratio, 1e-100, 1e100);
  const double first = (support.minimum - y) / bin_width(support) * width - 0.5 * width;
  const double total = std::erf(first + width * support.num_bins) - std::erf(first);
  const double low = (-reach - first) / width;
  const double high = (reach - first) / width + 1;
  const int32_t begin = low > 0 ? static_cast<int32_t>(low < support.num_bins ? low : support.num_bins) : 0;
  const int32_t end = high < support.num_bins ? static_cast<int32_t>(high) : support.num_bins;
  return {begin, end, first, width, total};
}

// One of `count` classes. An index that names none has NaN mass.
struct ClassTarget {
  int32_t begin;
  int32_t end;
  bool valid;

  ClassTarget() = default;
  GRADSCALE_HOST_DEVICE ClassTarget(int64_t chosen, int64_t count)
      : begin(chosen >= 0 && chosen < count ? static_cast<int32_t>(chosen) : 0),
        end(begin + 1),
        valid(chosen >= 0 && chosen < count) {
  }
  template <class Function>
  GRADSCALE_HOST_DEVICE void for_each(Function function) const {
    function(begin, valid ? 1.0 : static_cast<double>(NAN));
  }
};

} // namespace gradscale
