// KL(p || q) of groups of classes, each distribution mixed with the uniform one: (1 - unimix) softmax + unimix /
// classes (DreamerV3, Hafner et al. 2023), for CPU and GPU. The prediction is the logits of q, or of p if `predicts_p`.
// With L = log(p / q) and s = softmax(prediction), the gradient by the predicted logits is
//
//   of p   (1 - unimix) (h_c - s_c sum(h)),  h = s L
//   of q   (1 - unimix) (s_c sum(h) - h_c),  h = s p / q
//
// Without unimix, s p / q is p, and L is the difference of two log_softmax, which stays exact where p or q underflow.
#pragma once

#include "../formulas/losses.h"
#include "segment.h"

namespace gradscale {

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
  A share;      // 1 - unimix: the factor of the softmax
  A everywhere; // unimix / classes: added to each class
  bool predicts_p;
  double free_nats;

  GRADSCALE_HOST_DEVICE CategoricalKL(const Head& head, const Segment& s)
      : share(static_cast<A>(1 - head.unimix)),
        everywhere(static_cast<A>(head.unimix / static_cast<double>(s.last_size))),
        predicts_p(head.predicts_p),
        free_nats(head.free_nats) {
    constexpr A smallest = A(1e-30); // less is treated as 0: p / q might not be a normal number
    everywhere = everywhere < smallest ? A(0) : everywhere;
  }

  GRADSCALE_HOST_DEVICE bool mixes() const {
    return everywhere != A(0);
  }
  // The terms of one class, from the exponentials of prediction and target. Without unimix, the logarithm is computed
  // from the differences of the logits from their maxima, `prediction_below` and `target_below`.
  template <bool mixes, bool predicts_p>
  GRADSCALE_HOST_DEVICE DivergenceTerms<A> terms(
      A x_exponential,
      A t_exponential,
      A prediction_below,
      A target_below,
      const GroupSoftmax<A>& x,
      const GroupSoftmax<A>& t) const {
    const A softmax = x_exponential * x.inverse_sum, other_softmax = t_exponential * t.inverse_sum;
    const A predicted = mixes ? softmax * share + everywhere : softmax;
    const A wanted = mixes ? other_softmax * share + everywhere : other_softmax;
    const A p = predicts_p ? predicted : wanted, q = predicts_p ? wanted : predicted;
    A log_ratio, h;
    if constexpr (mixes) {
      const A ratio = p / q;
      log_ratio = log_normal(ratio);
      h = softmax * (predicts_p ? log_ratio : ratio);
    } else {
      const A log_predicted = prediction_below - x.log_sum, log_wanted = target_below - t.log_sum;
      log_ratio = predicts_p ? log_predicted - log_wanted : log_wanted - log_predicted;
      h = predicts_p ? product(softmax, log_ratio) : p;
    }
    return {product(p, log_ratio), softmax, h};
  }
  // The loss of a row, and the factor of h_c - s_c sum(h), which is 0 below the free nats.
  GRADSCALE_HOST_DEVICE double loss(double divergence) const {
    return divergence < free_nats ? free_nats : divergence; // NaN stays NaN
  }
  GRADSCALE_HOST_DEVICE A factor(double divergence, double coefficient) const {
    return divergence < free_nats ? A(0) : static_cast<A>(predicts_p ? coefficient : -coefficient) * share;
  }
};

} // namespace gradscale
