// The loss of quantiles x_i at the fractions tau_i = (2 i + 1) / (2 N) against samples t_j of a target (Dabney et al.
// 2018), for CPU and GPU. With u = t_j - x_i and s = clamp(u / kappa, -1, 1) a pair adds
//
//   |tau_i - 1[u < 0]| huber(u) / kappa = |tau_i - 1[u < 0]| |s| (|u| - min(|u|, kappa) / 2),
//
// and its derivative by x_i is -|tau_i - 1[u < 0]| s. If kappa is 0 or less than the smallest normal number, |u|
// replaces huber(u) / kappa.
#pragma once

#include "segment.h"

namespace gradscale {

// The slopes of one quantile for targets above and below it: tau and tau - 1. Subtracting 1 from tau would lose digits.
template <class A>
struct QuantileWeights {
  A above, below;
};

template <class A>
struct QuantileHuber {
  static constexpr int64_t kPartialSum = 32; // pairs per partial sum of a quantile
  double count;                              // of quantiles
  double pair_factor;                        // the factor of a pair's loss
  A kappa, inverse_kappa;
  A lift; // 1; for kappa = 0 the largest number, so that |u| inverse_kappa lift > 1 also for subnormal u

  GRADSCALE_HOST_DEVICE QuantileHuber(const Head& head, const Segment& s)
      : count(static_cast<double>(s.width)),
        pair_factor(1 / static_cast<double>(s.target_width) / (head.sum_over_quantiles ? 1 : count)),
        kappa(head.kappa < std::numeric_limits<A>::min() ? A(0) : finite(head.kappa)),
        inverse_kappa(finite(1 / head.kappa)),
        lift(kappa == A(0) ? std::numeric_limits<A>::max() : A(1)) {
  }

  GRADSCALE_HOST_DEVICE QuantileWeights<A> weights(int64_t i) const {
    const double twice = 2 * static_cast<double>(i) + 1;
    return {static_cast<A>(twice / (2 * count)), static_cast<A>((twice - 2 * count) / (2 * count))};
  }
  // Adds a pair to the loss of a quantile and to the negative derivative.
  GRADSCALE_HOST_DEVICE void add(A u, A above, A below, A& loss, A& slope) const {
    const A size = std::abs(u), limited = size < kappa ? size : kappa;
    const A quotient = size * inverse_kappa * lift;
    const A weighted = (u < A(0) ? below : above) * (A(1) < quotient ? A(1) : quotient); // NaN stays NaN
    slope += weighted;
    loss += std::abs(weighted) * (size - A(0.5) * limited);
  }
  GRADSCALE_HOST_DEVICE double finish(double sum) const {
    return sum * pair_factor;
  }
  GRADSCALE_HOST_DEVICE A factor(double coefficient) const { // the gradient divided by the slope
    return static_cast<A>(-coefficient * pair_factor);
  }

 private:
  // At most the largest number of A, because 0 times infinity would be NaN.
  GRADSCALE_HOST_DEVICE static A finite(double x) {
    constexpr double largest = std::numeric_limits<A>::max();
    return static_cast<A>(x < largest ? x : largest);
  }
};

} // namespace gradscale
