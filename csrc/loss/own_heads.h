// The heads whose rows are like no other's, for CPU and GPU: CategoricalKL and QuantileHuber.
#pragma once

#include "../formulas/elementary.h"
#include "kernels.h"

namespace gradscale {

// KL(p || q) of groups of classes, each distribution mixed with the uniform one: (1 - unimix) softmax + unimix /
// classes (DreamerV3, Hafner et al. 2023). The prediction is the logits of q, or of p if `predicts_p`.
// With L = log(p / q) and s = softmax(prediction), the gradient by the predicted logits is
//
//   of p   (1 - unimix) (h_c - s_c sum(h)),  h = s L
//   of q   (1 - unimix) (s_c sum(h) - h_c),  h = s p / q
//
// Without unimix, s p / q is p, and L is the difference of two log_softmax, which stays exact where p or q underflow.

enum class Mixture {
  none,          // no unimix
  probabilities, // the sum of the softmax and the uniform share
  logarithms     // the same from logarithms, for a share so small that the sum or p / q might not be a normal number
};

// The values that the elements of a group share.
template <class A>
struct GroupSoftmax {
  A maximum;
  A inverse_sum;
  A log_sum;
};

template <class A>
struct DivergenceTerms {
  A divergence; // p L
  A softmax;    // of the prediction
  A h;
};

template <class A>
struct CategoricalKL {
  A share;              // 1 - unimix: the factor of the softmax
  A everywhere;         // unimix / classes: added to each class
  A log_everywhere = 0; // its logarithm, for Mixture::logarithms
  Mixture mixture;
  bool predicts_p;
  double free_nats;

  // `mixture` is mixture_of(head, classes), which kernels are compiled for.
  GRADSCALE_HOST_DEVICE CategoricalKL(const Head& head, int64_t classes, Mixture mixture)
      : share(static_cast<A>(1 - head.unimix)),
        everywhere(share_of_class(head, classes)),
        mixture(mixture),
        predicts_p(head.predicts_p),
        free_nats(head.free_nats) {
    if (mixture == Mixture::logarithms) {
      log_everywhere = static_cast<A>(std::log(head.unimix) - std::log(static_cast<double>(classes)));
    }
  }
  GRADSCALE_HOST_DEVICE CategoricalKL(const Head& head, const Segment& s)
      : CategoricalKL(head, s.last_size, mixture_of(head, s.last_size)) {
  }

  GRADSCALE_HOST_DEVICE static A share_of_class(const Head& head, int64_t classes) {
    return static_cast<A>(head.unimix / static_cast<double>(classes));
  }
  GRADSCALE_HOST_DEVICE static Mixture mixture_of(const Head& head, int64_t classes) {
    // Next to a smaller share, an exponential that was rounded to 0 would be missed.
    constexpr A smallest = std::numeric_limits<A>::min() * static_cast<A>(int64_t(1) << std::numeric_limits<A>::digits);
    if (head.unimix == 0) {
      return Mixture::none;
    }
    return share_of_class(head, classes) < smallest ? Mixture::logarithms : Mixture::probabilities;
  }

  // The terms of one class, from the exponentials of prediction and target. Unless probabilities are mixed, the
  // logarithm is computed from the differences of the logits from their maxima, `prediction_below` and `target_below`.
  template <Mixture kind, bool predicts_p>
  GRADSCALE_HOST_DEVICE DivergenceTerms<A> terms(
      A x_exponential,
      A t_exponential,
      A prediction_below,
      A target_below,
      const GroupSoftmax<A>& x,
      const GroupSoftmax<A>& t) const {
    const A softmax = x_exponential * x.inverse_sum, other_softmax = t_exponential * t.inverse_sum;
    if constexpr (kind == Mixture::probabilities) {
      const A predicted = x_exponential * (share * x.inverse_sum) + everywhere;
      const A wanted = t_exponential * (share * t.inverse_sum) + everywhere;
      const A p = predicts_p ? predicted : wanted, q = predicts_p ? wanted : predicted;
      const A ratio = quotient(p, q), log_ratio = log_normal(ratio);
      return {p * log_ratio, softmax, softmax * (predicts_p ? log_ratio : ratio)};
    } else {
      A log_predicted = prediction_below - x.log_sum, log_wanted = target_below - t.log_sum;
      A part = 1; // of the prediction: the softmax divided by its sum with the uniform share
      if constexpr (kind == Mixture::logarithms) {
        log_predicted = log_mixed(log_predicted, part);
        A part_of_target;
        log_wanted = log_mixed(log_wanted, part_of_target);
      }
      const A log_ratio = predicts_p ? log_predicted - log_wanted : log_wanted - log_predicted;
      const A p = predicts_p ? softmax : other_softmax, divergence = product(p, log_ratio);
      return {divergence, softmax, predicts_p ? divergence : p * part};
    }
  }
  // The logarithm of the sum of a softmax and the uniform share, and the softmax's part of the sum.
  GRADSCALE_HOST_DEVICE A log_mixed(A log_softmax, A& part) const {
    const A difference = log_softmax - log_everywhere, smaller = exp_nonpositive(-std::abs(difference));
    const bool is_larger = difference > A(0);
    part = (is_larger ? A(1) : smaller) / (A(1) + smaller);
    return (is_larger ? log_softmax : log_everywhere) + log1p_unit(smaller);
  }
  // The loss of a row, and the factor of h_c - s_c sum(h), which is 0 below the free nats.
  GRADSCALE_HOST_DEVICE double loss(double divergence) const {
    return divergence < free_nats ? free_nats : divergence; // NaN stays NaN
  }
  GRADSCALE_HOST_DEVICE A factor(double divergence, double coefficient) const {
    return divergence < free_nats ? A(0) : static_cast<A>(predicts_p ? coefficient : -coefficient) * share;
  }
};

// The loss of quantiles x_i at the fractions tau_i = (2 i + 1) / (2 N), or at given ones, against samples t_j of a
// target (Dabney et al. 2018). With u = t_j - x_i and s = clamp(u / kappa, -1, 1) a pair adds
//
//   |tau_i - 1[u < 0]| huber(u) / kappa = |tau_i - 1[u < 0]| |s| (|u| - min(|u|, kappa) / 2),
//
// and its derivative by x_i is -|tau_i - 1[u < 0]| s. If kappa is 0 or less than the smallest normal number, |u|
// replaces huber(u) / kappa.

// The slopes of one quantile for targets above and below it: tau and tau - 1, times the share of a pair, so that no sum
// is larger than the loss. Subtracting 1 from tau would lose digits.
template <class A>
struct QuantileWeights {
  A above, below;
};

template <class A>
struct QuantileHuber {
  static constexpr int64_t kPartialSum = 32; // pairs per partial sum of a quantile
  double count;                              // of quantiles
  double share;                              // of a pair in the loss
  A kappa, inverse_kappa;
  A lift; // 1; for kappa = 0 the largest number, so that |u| inverse_kappa lift > 1 also for subnormal u

  GRADSCALE_HOST_DEVICE QuantileHuber(const Head& head, const Segment& s)
      : count(static_cast<double>(s.width)),
        share(1 / static_cast<double>(s.target_width) / (head.sum_over_quantiles ? 1 : count)),
        kappa(head.kappa < std::numeric_limits<A>::min() ? A(0) : finite(head.kappa)),
        inverse_kappa(finite(1 / head.kappa)),
        lift(kappa == A(0) ? std::numeric_limits<A>::max() : A(1)) {
  }

  GRADSCALE_HOST_DEVICE QuantileWeights<A> weights(int64_t i) const {
    const double twice = 2 * static_cast<double>(i) + 1;
    const double unit = share / (2 * count);
    return {static_cast<A>(twice * unit), static_cast<A>((twice - 2 * count) * unit)};
  }
  // The same for fractions that were sampled, if they are given (IQN, Dabney et al. 2018b).
  GRADSCALE_HOST_DEVICE QuantileWeights<A> weights(const Rows& fractions, int64_t row, int64_t i) const {
    if (fractions.data == nullptr) {
      return weights(i);
    }
    const double tau = fractions.load(row, i);
    return {static_cast<A>(tau * share), static_cast<A>((tau - 1) * share)};
  }
  // Adds a pair to the loss of a quantile and to the negative derivative.
  GRADSCALE_HOST_DEVICE void add(A u, A above, A below, A& loss, A& slope) const {
    const A size = std::abs(u), limited = size < kappa ? size : kappa;
    const A quotient = size * inverse_kappa * lift;
    const A weighted = (u < A(0) ? below : above) * (A(1) < quotient ? A(1) : quotient); // NaN stays NaN
    slope += weighted;
    loss += std::abs(weighted) * (size - A(0.5) * limited);
  }
  GRADSCALE_HOST_DEVICE static A factor(double coefficient) { // the gradient divided by the slope
    return static_cast<A>(-coefficient);
  }

 private:
  // At most the largest number of A, because 0 times infinity would be NaN.
  GRADSCALE_HOST_DEVICE static A finite(double x) {
    constexpr double largest = std::numeric_limits<A>::max();
    return static_cast<A>(x < largest ? x : largest);
  }
};

} // namespace gradscale
