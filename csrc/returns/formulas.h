// The functions over trajectories, one transition at a time, for the CPU and for GPUs.
//
// Each, except for the two of n steps, is a recurrence that carries a number y from step t + 1 to step t. The
// coefficients `share`, `weight`, `carry` and `scale` define it:
//
//   x_t = weight_t (r_t + discount_t share_t B_t - V_t) + carry_t y_{t+1}        (lambda-returns: without V_t)
//   y_t = scale_t x_t
//
// What a function does not take is constant: B is 0, and lambda and the ratio are 1.
//
// The adjoint is the transposed recurrence, which carries a gradient from step t - 1 to step t. With g_t the gradient
// of the results that contain y_t:
//
//   h_t = scale_t (g_t + y_{t-1})
//   y_t = carry_t h_t
//
// The gradient of r_t is weight_t h_t, and the gradient of B_t is discount_t share_t times as much.
//
// A coefficient multiplies a whole sum, not each of its terms, because a large or infinite coefficient of two terms
// that cancel would give NaN. Maps y -> a + b y are faster to walk and can be composed; where such a map gives a number
// that is not finite, the step is computed again as the sum above.
//
// `L` is the type of lanes, one number or several:
//
//   L::V, L::M            numbers, and conditions
//   L::times(c, x)        c x, and 0 if c is 0
//   L::product(c, d)      c d for coefficients c and d, and 0 only if one of them is 0
//
// Vectors of lanes multiply without checking for 0: if a result is not finite, the tile (see recurrences.cpp) is
// computed again, one number at a time.
//
// Conditions select instead of multiplying, so that numbers that are not finite stay in their episode. Masked
// transitions give y = 0 and results of 0.
//
// The CPU's kernels include this once for each instruction set, into its namespace: lanes are vectors of that set.
#include "kernels.h"

namespace gradscale {
#ifdef GRADSCALE_VARIANT
namespace GRADSCALE_VARIANT {
#endif

template <class L>
struct Transition {
  using V = typename L::V;
  using M = typename L::M;
  V reward;      // in an adjoint: the gradient of the first result
  V value;       // in an adjoint: the gradient of the second result
  V later_value; // of step t + 1
  V next_value;
  V discount;
  V lambda;
  V ratio;
  V limits[kClips];
  M live; // not masked
  M terminated;
  M cut; // terminated, truncated, or followed by a masked step or the end: nothing passes between t and t + 1
};

// ---- Coefficients --------------------------------------------------------------------------------------------------

// A coefficient of 1, and a term of 0, in every transition.
struct One {};
struct Zero {};

template <class L, class V = typename L::V>
GRADSCALE_HOST_DEVICE V times(V c, V x) {
  return L::times(c, x);
}
template <class L>
GRADSCALE_HOST_DEVICE typename L::V times(One /*c*/, typename L::V x) {
  return x;
}
template <class L, class V = typename L::V>
GRADSCALE_HOST_DEVICE V product(V c, V d) {
  return L::product(c, d);
}
template <class L, class V = typename L::V>
GRADSCALE_HOST_DEVICE V product(One /*c*/, V d) {
  return d;
}
template <class L, class V = typename L::V>
GRADSCALE_HOST_DEVICE V product(V c, One /*d*/) {
  return c;
}
template <class V>
GRADSCALE_HOST_DEVICE V operator+(V x, Zero /*y*/) {
  return x;
}

// The smaller of both; NaN if x is NaN.
template <class V>
GRADSCALE_HOST_DEVICE V least(V x, V limit) {
  return limit < x ? limit : x;
}

template <class L>
GRADSCALE_HOST_DEVICE typename L::V if_live(const Transition<L>& s, typename L::V x) {
  return s.live ? x : typename L::V{};
}

template <class L>
GRADSCALE_HOST_DEVICE typename L::V unless_cut(const Transition<L>& s, typename L::V x) {
  return s.cut ? typename L::V{} : x;
}

// share B, where B is the value of the next state, and 0 after termination. At a cut, `share` counts as 1.
template <class L, class Share>
GRADSCALE_HOST_DEVICE typename L::V bootstrap(const Transition<L>& s, Share share) {
  const typename L::V b = s.terminated ? typename L::V{} : s.next_value;
  return s.cut ? b : times<L>(share, b);
}

// The gradient of next_value, given the gradient of the sum that contains weight discount share B.
template <class L, class Weight, class Share>
GRADSCALE_HOST_DEVICE typename L::V to_next_value(
    const Transition<L>& s, Weight weight, Share share, typename L::V gradient) {
  const typename L::V factor = s.cut ? s.discount : product<L>(share, s.discount);
  return s.terminated ? typename L::V{} : L::times(product<L>(weight, factor), gradient);
}

// The map y' -> a + b y'.
template <class L>
struct Affine {
  typename L::V a;
  typename L::V b;
};

template <class L>
GRADSCALE_HOST_DEVICE typename L::V applied(const Affine<L>& map, typename L::V y) {
  return map.a + L::times(map.b, y);
}

// A step of a walk: y = outer (a + inner y') + rest, where y' is the y of the previous step of the walk, t + 1 or, in
// an adjoint, t - 1. `Outer` and `Inner` may be One, and `Rest` may be Zero.
template <class L, class Outer, class Inner, class Rest>
struct Step {
  typename L::V a;
  Outer outer;
  Inner inner;
  Rest rest;

  GRADSCALE_HOST_DEVICE typename L::V walked(typename L::V before) const {
    return times<L>(outer, a + times<L>(inner, before)) + rest;
  }

  GRADSCALE_HOST_DEVICE Affine<L> map() const {
    return {times<L>(outer, a) + rest, product<L>(outer, inner)};
  }
};

template <class L, class Outer, class Inner, class Rest>
GRADSCALE_HOST_DEVICE Step<L, Outer, Inner, Rest> make_step(typename L::V a, Outer outer, Inner inner, Rest rest) {
  return {a, outer, inner, rest};
}

// ---- Recurrences ---------------------------------------------------------------------------------------------------

// What a result is. `target` and `advantage` are computed from y of step t + 1.
enum class Quantity {
  none,
  sum,        // y, of a recurrence without V
  difference, // y
  value,      // V + y
  target,     // V + x, rounded as r + discount share B + carry y'
  advantage,  // weight (r + discount ((1 - lambda) B + lambda (V + y of step t + 1)) - V), with another weight
};

// The default coefficients, which a formula F hides with its own, and the results that follow from them. The second
// result is optional.
template <class F, Quantity first, Quantity second = Quantity::none>
struct Recurrence {
  static constexpr bool kAdjoint = false;
  static constexpr bool kIsScaled = false; // `scale` is not One
  static constexpr int kResults = second == Quantity::none ? 1 : 2;
  static constexpr Quantity kFirst = first;
  static constexpr Quantity kSecond = second;
  static constexpr bool kReadsLaterValue = second == Quantity::advantage;              // V of step t + 1 is read
  static constexpr bool kReadsEarlier = first == Quantity::target || kReadsLaterValue; // results are computed from y'

  template <class L>
  static GRADSCALE_HOST_DEVICE One share(const Transition<L>& /*s*/) {
    return {};
  }
  template <class L>
  static GRADSCALE_HOST_DEVICE One weight(const Transition<L>& /*s*/) {
    return {};
  }
  template <class L>
  static GRADSCALE_HOST_DEVICE typename L::V carry(const Transition<L>& s) {
    return L::product(s.discount, s.lambda);
  }
  template <class L>
  static GRADSCALE_HOST_DEVICE One scale(const Transition<L>& /*s*/) {
    return {};
  }

  template <class L>
  static GRADSCALE_HOST_DEVICE auto step(const Transition<L>& s) {
    const typename L::V target = one_step(s), delta = first == Quantity::sum ? target : target - s.value;
    const typename L::V a = if_live(s, times<L>(F::weight(s), delta));
    return make_step<L>(a, F::scale(s), if_live(s, unless_cut(s, F::carry(s))), Zero());
  }

  // Computes the results from y of this step, and of step t + 1.
  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE void results(const Transition<L>& s, V y, V later, V* out) {
    out[0] = result<first>(s, y, later);
    if constexpr (second != Quantity::none) {
      out[1] = result<second>(s, y, later);
    }
  }

 private:
  template <class L>
  static GRADSCALE_HOST_DEVICE typename L::V one_step(const Transition<L>& s) {
    return s.reward + L::times(s.discount, bootstrap(s, F::share(s)));
  }

  template <Quantity quantity, class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE V result(const Transition<L>& s, V y, V later) {
    if constexpr (quantity == Quantity::value) {
      return if_live(s, s.value + y);
    } else if constexpr (quantity == Quantity::target) {
      return if_live(s, one_step(s) + unless_cut(s, L::times(F::carry(s), later)));
    } else if constexpr (quantity == Quantity::advantage) {
      const V b = bootstrap(s, One());
      const V u = s.cut ? b : L::times(1 - s.lambda, b) + L::times(s.lambda, s.later_value + later);
      return if_live(s, L::times(F::advantage_weight(s), s.reward + L::times(s.discount, u) - s.value));
    } else {
      return y;
    }
  }
};

// y = G. G_t = r_t + discount_t ((1 - lambda_t) B_t + lambda_t G_{t+1})
struct LambdaReturns : Recurrence<LambdaReturns, Quantity::sum> {
  template <class L>
  static GRADSCALE_HOST_DEVICE typename L::V share(const Transition<L>& s) {
    return 1 - s.lambda;
  }
};

// y = A. A_t = r_t + discount_t B_t - V_t + discount_t lambda_t A_{t+1}; returns are A + V.
struct GeneralizedAdvantages : Recurrence<GeneralizedAdvantages, Quantity::difference, Quantity::value> {};

// y = e. e_t = rho_t (r_t + discount_t B_t - V_t) + discount_t c_t e_{t+1}; targets are V + e.
struct VTrace : Recurrence<VTrace, Quantity::value, Quantity::advantage> {
  template <class L>
  static GRADSCALE_HOST_DEVICE typename L::V weight(const Transition<L>& s) {
    return least(s.ratio, s.limits[0]);
  }
  template <class L>
  static GRADSCALE_HOST_DEVICE typename L::V carry(const Transition<L>& s) {
    return L::product(s.discount, L::product(s.lambda, least(s.ratio, s.limits[1])));
  }
  template <class L>
  static GRADSCALE_HOST_DEVICE typename L::V advantage_weight(const Transition<L>& s) {
    return least(s.ratio, s.limits[2]);
  }
};

// y = c (G - Q). G_t = r_t + discount_t (B_t + c_{t+1} (G_{t+1} - Q_{t+1}))
struct Retrace : Recurrence<Retrace, Quantity::target> {
  static constexpr bool kIsScaled = true;

  template <class L>
  static GRADSCALE_HOST_DEVICE typename L::V carry(const Transition<L>& s) {
    return s.discount;
  }
  template <class L>
  static GRADSCALE_HOST_DEVICE typename L::V scale(const Transition<L>& s) {
    return if_live(s, L::product(s.lambda, least(s.ratio, s.limits[0])));
  }
};

// The adjoint of F. Its results are the gradients of rewards, values and next values, and the part of the gradient of
// the value of step t + 1 that comes from an advantage of step t.
template <class F>
struct Adjoint {
  static constexpr bool kAdjoint = true;
  static constexpr bool kIsScaled = false;
  static constexpr bool kHasTarget = F::kFirst == Quantity::target; // a result contains x, and not y
  static constexpr bool kHasAdvantage = F::kSecond == Quantity::advantage;
  static constexpr int kResults = kHasAdvantage ? 4 : 3;
  static constexpr bool kReadsEarlier = true;
  static constexpr bool kReadsLaterValue = false;

  template <class L>
  static GRADSCALE_HOST_DEVICE auto step(const Transition<L>& s) {
    const auto carry = if_live(s, unless_cut(s, F::carry(s))), own = to_sum(s);
    if constexpr (kHasTarget) {
      return make_step<L>(own, carry, F::scale(s), to_later_value(s));
    } else {
      return make_step<L>(own, product<L>(carry, F::scale(s)), One(), to_later_value(s));
    }
  }

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE void results(const Transition<L>& s, V /*y*/, V earlier, V* out) {
    const V own = to_sum(s);
    const V through_y = times<L>(F::scale(s), kHasTarget ? earlier : own + earlier);
    const V h = kHasTarget ? own + through_y : through_y;
    V to_reward = times<L>(F::weight(s), h), to_next = to_next_value(s, F::weight(s), F::share(s), h);
    if constexpr (kHasAdvantage) {
      to_reward += L::times(F::advantage_weight(s), s.value);
      to_next += to_next_value(s, F::advantage_weight(s), 1 - s.lambda, s.value);
      out[3] = to_later_value(s);
    }
    // V is added to the results that are a `value`, and subtracted in x.
    const V added = F::kFirst == Quantity::value ? s.reward : F::kSecond == Quantity::value ? s.value : V{};
    out[0] = if_live(s, to_reward);
    out[1] = if_live(s, F::kFirst == Quantity::sum ? V{} : added - (kHasTarget ? through_y : to_reward));
    out[2] = if_live(s, to_next);
  }

 private:
  // The gradient of y, or of x for a target, through the results that contain it.
  template <class L>
  static GRADSCALE_HOST_DEVICE typename L::V to_sum(const Transition<L>& s) {
    return F::kSecond == Quantity::value ? s.reward + s.value : s.reward;
  }

  // The gradient of V + y of step t + 1 through the advantage of step t.
  template <class L>
  static GRADSCALE_HOST_DEVICE auto to_later_value(const Transition<L>& s) {
    if constexpr (kHasAdvantage) {
      const auto factor = L::product(F::advantage_weight(s), L::product(s.discount, s.lambda));
      return if_live(s, unless_cut(s, L::times(factor, s.value)));
    } else {
      return Zero();
    }
  }
};

// ---- One lane ------------------------------------------------------------------------------------------------------

// One number per lane. A coefficient of 0 selects 0 instead of multiplying.
template <class A>
struct OneLane {
  using V = A;
  using M = bool;

  static GRADSCALE_HOST_DEVICE A load(const A* from) {
    return *from;
  }
  static GRADSCALE_HOST_DEVICE bool load(const uint8_t* from) {
    return *from != 0;
  }
  static GRADSCALE_HOST_DEVICE bool load_cut(
      const uint8_t* terminated, const uint8_t* truncated, const uint8_t* later_live) {
    return *terminated != 0 || *truncated != 0 || *later_live == 0;
  }
  static GRADSCALE_HOST_DEVICE A times(A c, A x) {
    return c == 0 ? A(0) : c * x;
  }
  // A product that underflows becomes the smallest number of its sign, so that it is not mistaken for a cut.
  static GRADSCALE_HOST_DEVICE A product(A c, A d) {
    const A p = c * d;
    return c == 0 || d == 0 ? A(0) : (p == 0 ? underflow(p) : p);
  }
  static GRADSCALE_HOST_DEVICE A underflow(A sign) {
    return std::copysign(std::is_same_v<A, double> ? A(4.9406564584124654e-324) : A(1.4e-45f), sign);
  }
};

#ifdef GRADSCALE_VARIANT
} // namespace GRADSCALE_VARIANT
#endif
} // namespace gradscale
