// The losses of policies, for CPU and GPU: surrogates of an action's log-probability (PPO, REINFORCE, CISPO), and the
// sums of a softmax and of a normal distribution that they need.
//
// A surrogate follows from log pi(a) and a few numbers of the row. Its derivative by log pi(a), the slope, is the one
// number by which the gradients of a row's elements are multiplied, also if several choices make up the action.
#pragma once

#include "elementary.h"

namespace gradscale {

enum class Surrogate : int32_t { ppo, log, cispo };

// exp(x) for any x; results below the smallest normal number are 0. Relative error 4e-7 in float, 1e-15 in double.
template <class A>
GRADSCALE_HOST_DEVICE A exponential(A x) {
#if defined(__CUDA_ARCH__)
  return std::exp(x);
#else
  const A half = exp_nonpositive(x > A(0) ? A(-0.5) * x : x); // NaN stays NaN
  const A inverse = A(1) / half;
  return x > A(0) ? inverse * inverse : half;
#endif
}

// exp(x) - 1 - x, and its derivative exp(x) - 1. Near 0 both are sums of series, which lose no digits.
template <class A>
struct ExponentialBeyond {
  A value;
  A derivative;
};

template <class A>
GRADSCALE_HOST_DEVICE ExponentialBeyond<A> exponential_beyond(A x) {
  constexpr int terms = sizeof(A) == 8 ? 18 : 10;
  A series = A(1); // x^2/2 (1 + x/3 (1 + x/4 (1 + ...)))
  for (int n = terms; n > 2; --n) {
    series = A(1) + series * x * (A(1) / static_cast<A>(n));
  }
  series = series * (A(0.5) * x * x);
  const A e = exponential(x);
  const bool is_small = std::abs(x) < A(1);
  const A value = e == static_cast<A>(INFINITY) ? e : e - A(1) - x;
  return {is_small ? series : value, is_small ? series + x : e - A(1)};
}

// A loss as a function of log pi(a), and its derivative.
template <class A>
struct Score {
  A loss;
  A slope;
};

// What a policy's row is compared with. Fields that are not given are 0.
template <class A>
struct PolicyFields {
  A advantage;
  A log_prob;           // of the action, under the policy that chose it
  A reference_log_prob; // of the action, under a policy to stay near to
};

template <class A>
struct PolicyScore {
  A lower, upper; // bounds of the ratio
  A dual_clip;
  A kl_weight;

  template <class Head>
  GRADSCALE_HOST_DEVICE explicit PolicyScore(const Head& head)
      : lower(static_cast<A>(1 - head.clip_low)),
        upper(static_cast<A>(1 + head.clip_high)),
        dual_clip(static_cast<A>(head.dual_clip)),
        kl_weight(static_cast<A>(head.kl_weight)) {
  }

  GRADSCALE_HOST_DEVICE static A nan_if(bool condition) {
    return condition ? static_cast<A>(NAN) : A(0);
  }

  // pi(a) divided by the probability under the policy that chose it. An illegal action has the ratio 0.
  GRADSCALE_HOST_DEVICE static A ratio(A log_prob, A old_log_prob) {
    return log_prob == -static_cast<A>(INFINITY) ? A(0) : exponential(log_prob - old_log_prob);
  }
  GRADSCALE_HOST_DEVICE A clamped(A r) const { // NaN stays NaN
    return r < lower ? lower : (upper < r ? upper : r);
  }

  // NaN where log_prob, or a field that is read, is NaN, also where the advantage is 0.
  template <Surrogate surrogate>
  GRADSCALE_HOST_DEVICE Score<A> surrogate_of(A log_prob, const PolicyFields<A>& fields) const {
    const A advantage = fields.advantage;
    A nan = nan_if(log_prob != log_prob);
    if constexpr (surrogate == Surrogate::log) {
      return {product(advantage, -log_prob) + nan, -advantage + nan};
    }
    const A r = ratio(log_prob, fields.log_prob);
    nan += nan_if(fields.log_prob != fields.log_prob);
    if constexpr (surrogate == Surrogate::cispo) {
      const A weighted = product(advantage, clamped(r));
      return {product(weighted, -log_prob) + nan, -weighted + nan};
    }
    const A plain = product(advantage, r), limited = product(advantage, clamped(r));
    const bool is_limited = limited < plain;
    const A loss = -(is_limited ? limited : plain), slope = is_limited ? A(0) : -plain;
    const A most = -dual_clip * advantage;
    const bool exceeds = advantage < A(0) && loss > most;
    return {(exceeds ? most : loss) + nan, (exceeds ? A(0) : slope) + nan};
  }

  // The divergence from a reference policy, estimated from this action (Schulman's k3).
  GRADSCALE_HOST_DEVICE void add_divergence(A log_prob, const PolicyFields<A>& fields, Score<A>& score) const {
    const A none = -static_cast<A>(INFINITY);
    const bool both_illegal = log_prob == none && fields.reference_log_prob == none;
    const auto k3 = exponential_beyond(both_illegal ? A(0) : fields.reference_log_prob - log_prob);
    score.loss += kl_weight * k3.value;
    score.slope -= kl_weight * k3.derivative;
  }

  GRADSCALE_HOST_DEVICE Score<A> score(Surrogate surrogate, A log_prob, const PolicyFields<A>& fields) const {
    Score<A> result = surrogate == Surrogate::ppo   ? surrogate_of<Surrogate::ppo>(log_prob, fields)
                      : surrogate == Surrogate::log ? surrogate_of<Surrogate::log>(log_prob, fields)
                                                    : surrogate_of<Surrogate::cispo>(log_prob, fields);
    if (kl_weight != A(0)) {
      add_divergence(log_prob, fields, result);
    }
    return result;
  }

  // What a row adds to the means approx_kl and clip_fraction.
  struct Difference {
    A divergence;
    A clipped; // 1 if the ratio is outside of its bounds, else 0
  };
  GRADSCALE_HOST_DEVICE Difference difference(A log_prob, A old_log_prob) const {
    const A infinity = static_cast<A>(INFINITY);
    const bool is_illegal = log_prob == -infinity;
    const auto beyond = exponential_beyond(log_prob - old_log_prob);
    const A r = is_illegal && old_log_prob == old_log_prob ? A(0) : beyond.derivative + A(1); // NaN is not clipped
    return {
        is_illegal ? infinity + nan_if(old_log_prob != old_log_prob) : beyond.value,
        r < lower || upper < r ? A(1) : A(0)};
  }
};

// A loss with an entropy bonus. An infinite entropy counts only if it has a weight.
template <class A>
GRADSCALE_HOST_DEVICE A with_bonus(A loss, A entropy_weight, A entropy) {
  return loss - product(entropy_weight, entropy);
}

// The larger of the squared errors of a value and of the same value kept within `clip` of an old one, with its
// derivative. An infinite clip reads no old value.
template <class A>
struct ClippedError {
  A clip;

  GRADSCALE_HOST_DEVICE Score<A> score(A value, A target, A old_value) const {
    const A error = value - target;
    if (clip == static_cast<A>(INFINITY)) {
      return {error * error, A(2) * error};
    }
    const A change = value - old_value;
    const A kept = change < -clip ? -clip : (clip < change ? clip : change); // NaN stays NaN
    const A kept_error = old_value + kept - target;
    const bool is_first = error * error >= kept_error * kept_error;
    const A both = error * error + kept_error * kept_error; // NaN if either is, as inf - inf makes them
    const A nan = PolicyScore<A>::nan_if(both != both);
    return {
        (is_first ? error * error : kept_error * kept_error) + nan,
        A(2) * (is_first ? error : (kept == change ? kept_error : A(0))) + nan};
  }
};

} // namespace gradscale
