// The functions over trajectories, one transition at a time, for the CPU and for GPUs.
//
// Each, except for the two of n steps, is a linear recurrence y_t = a_t + b_t y', where y' is the y of the previous
// step in the order of the walk: step t + 1 for a function, t - 1 for its adjoint. A formula gives the map (a, b) of a
// step, and its results from y and y'. `L` is the type of lanes, one number or several:
//
//   L::V, L::M            numbers, and conditions
//   L::times(c, x)        c x, and 0 if c is 0
//   L::product(c, d)      c d for coefficients c and d, and 0 only if one of them is 0
//
// Vectors of lanes multiply without checking for 0: if a result is not finite, the tile (see recurrences.cpp) is
// computed again, one number at a time.
//
// Conditions select instead of multiplying, so that numbers that are not finite stay in their episode. Masked
// transitions give a = b = 0 and results of 0.
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

template <class L>
struct Affine {
  typename L::V a;
  typename L::V b;
};

// The map y -> c (a + b y).
template <class L>
struct Factors {
  typename L::V c;
  typename L::V a;
  typename L::V b;
};

// ---- What formulas share -------------------------------------------------------------------------------------------

// The smaller of both; NaN if x is NaN.
template <class V>
GRADSCALE_HOST_DEVICE V least(V x, V limit) {
  return limit < x ? limit : x;
}

// B_t: the value of the next state, and 0 after termination.
template <class L>
GRADSCALE_HOST_DEVICE typename L::V bootstrap(const Transition<L>& s) {
  return s.terminated ? typename L::V{} : s.next_value;
}

// (1 - lambda) B + lambda `later`; B at a cut, whatever lambda is.
template <class L>
GRADSCALE_HOST_DEVICE typename L::V mixed(const Transition<L>& s, typename L::V later) {
  const typename L::V b = bootstrap(s);
  return s.cut ? b : L::times(1 - s.lambda, b) + L::times(s.lambda, later);
}

template <class L>
GRADSCALE_HOST_DEVICE typename L::V unless_cut(const Transition<L>& s, typename L::V x) {
  return s.cut ? typename L::V{} : x;
}

template <class L>
GRADSCALE_HOST_DEVICE typename L::V if_live(const Transition<L>& s, typename L::V x) {
  return s.live ? x : typename L::V{};
}

template <class L>
GRADSCALE_HOST_DEVICE Affine<L> if_live(const Transition<L>& s, typename L::V a, typename L::V b) {
  return {if_live(s, a), if_live(s, b)};
}

// The gradient of next_value, given the coefficient of the bootstrap and the gradient of the term that contains it.
template <class L>
GRADSCALE_HOST_DEVICE typename L::V to_next_value(
    const Transition<L>& s, typename L::V coefficient, typename L::V gradient) {
  return s.terminated ? typename L::V{} : L::times(coefficient, gradient);
}

// The coefficient of the bootstrap in discount * mixed().
template <class L>
GRADSCALE_HOST_DEVICE typename L::V bootstrap_factor(const Transition<L>& s) {
  return s.cut ? s.discount : L::product(s.discount, 1 - s.lambda);
}

// What formulas differ in. A formula that differs from this hides the constant with its own.
struct Recurrence {
  static constexpr bool kAdjoint = false;
  static constexpr bool kReadsEarlier = false;    // results read y of the step before in the walk
  static constexpr bool kReadsLaterValue = false; // V of step t + 1 is read
  // y is computed as c (a + b y'), and not as a + b y': a large c must not overflow in a product with one of two terms
  // that cancel.
  static constexpr bool kHasFactors = false;
};

struct Adjoint : Recurrence {
  static constexpr bool kAdjoint = true;
  static constexpr bool kReadsEarlier = true;
};

// ---- Functions -----------------------------------------------------------------------------------------------------

// G_t = r_t + discount_t ((1 - lambda_t) B_t + lambda_t G_{t+1}); y = G.
struct LambdaReturns : Recurrence {
  static constexpr int kResults = 1;

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE Affine<L> map(const Transition<L>& s) {
    return if_live(s, s.reward + L::times(s.discount, mixed(s, V{})), unless_cut(s, L::product(s.discount, s.lambda)));
  }

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE void results(const Transition<L>& /*s*/, V y, V /*later*/, V* out) {
    out[0] = y;
  }
};

// A_t = r_t + discount_t B_t - V_t + discount_t lambda_t A_{t+1}; y = A, returns are A + V.
struct GeneralizedAdvantages : Recurrence {
  static constexpr int kResults = 2;

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE Affine<L> map(const Transition<L>& s) {
    return if_live(
        s, s.reward + L::times(s.discount, bootstrap(s)) - s.value, unless_cut(s, L::product(s.discount, s.lambda)));
  }

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE void results(const Transition<L>& s, V y, V /*later*/, V* out) {
    out[0] = y;
    out[1] = if_live(s, y + s.value);
  }
};

// e_t = rho_t (r_t + discount_t B_t - V_t) + discount_t c_t e_{t+1}; y = e, targets are V + e.
struct VTrace : Recurrence {
  static constexpr int kResults = 2;
  static constexpr bool kReadsEarlier = true;
  static constexpr bool kReadsLaterValue = true;

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE Affine<L> map(const Transition<L>& s) {
    const V delta = s.reward + L::times(s.discount, bootstrap(s)) - s.value;
    const V c = L::product(s.lambda, least(s.ratio, s.limits[1]));
    return if_live(s, L::times(least(s.ratio, s.limits[0]), delta), unless_cut(s, L::product(s.discount, c)));
  }

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE void results(const Transition<L>& s, V y, V later, V* out) {
    const V u = mixed(s, s.later_value + later);
    out[0] = if_live(s, s.value + y);
    out[1] = if_live(s, L::times(least(s.ratio, s.limits[2]), s.reward + L::times(s.discount, u) - s.value));
  }
};

// G_t = x_t + discount_t y_{t+1}, x_t = r_t + discount_t B_t; y_t = c_t (G_t - Q_t).
struct Retrace : Recurrence {
  static constexpr int kResults = 1;
  static constexpr bool kReadsEarlier = true;
  static constexpr bool kHasFactors = true;

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE V trace(const Transition<L>& s) {
    return L::product(s.lambda, least(s.ratio, s.limits[0]));
  }

  // c_t, x_t - Q_t, and the discount, or 0 at a cut.
  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE Factors<L> factors(const Transition<L>& s) {
    const V x = s.reward + L::times(s.discount, bootstrap(s));
    return {if_live(s, trace(s)), if_live(s, x - s.value), unless_cut(s, s.discount)};
  }

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE Affine<L> map(const Transition<L>& s) {
    const Factors<L> f = factors(s);
    return {L::times(f.c, f.a), L::product(f.c, f.b)};
  }

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE void results(const Transition<L>& s, V /*y*/, V later, V* out) {
    const V x = s.reward + L::times(s.discount, bootstrap(s));
    out[0] = if_live(s, x + unless_cut(s, L::times(s.discount, later)));
  }
};

// ---- Adjoints: y_t is the gradient that step t hands on to step t + 1 ----------------------------------------------

struct LambdaReturnsAdjoint : Adjoint {
  static constexpr int kResults = 3;

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE Affine<L> map(const Transition<L>& s) {
    const V b = unless_cut(s, L::product(s.discount, s.lambda));
    return if_live(s, L::times(b, s.reward), b);
  }

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE void results(const Transition<L>& s, V /*y*/, V earlier, V* out) {
    const V h = s.reward + earlier;
    out[0] = if_live(s, h);
    out[1] = V{};
    out[2] = if_live(s, to_next_value(s, bootstrap_factor(s), h));
  }
};

struct GeneralizedAdvantagesAdjoint : Adjoint {
  static constexpr int kResults = 3;

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE Affine<L> map(const Transition<L>& s) {
    const V b = unless_cut(s, L::product(s.discount, s.lambda));
    return if_live(s, L::times(b, s.reward + s.value), b);
  }

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE void results(const Transition<L>& s, V /*y*/, V earlier, V* out) {
    const V h = s.reward + s.value + earlier;
    out[0] = if_live(s, h);
    out[1] = if_live(s, s.value - h);
    out[2] = if_live(s, to_next_value(s, s.discount, h));
  }
};

struct VTraceAdjoint : Adjoint {
  static constexpr int kResults = 4;

  // The gradient of targets_{t+1} from the advantage of step t.
  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE V to_later_target(const Transition<L>& s) {
    const V coefficient = L::product(least(s.ratio, s.limits[2]), L::product(s.discount, s.lambda));
    return if_live(s, unless_cut(s, L::times(coefficient, s.value)));
  }

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE Affine<L> map(const Transition<L>& s) {
    const V c = L::product(s.lambda, least(s.ratio, s.limits[1]));
    const V b = unless_cut(s, L::product(s.discount, c));
    return if_live(s, L::times(b, s.reward) + to_later_target(s), b);
  }

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE void results(const Transition<L>& s, V /*y*/, V earlier, V* out) {
    const V rho = least(s.ratio, s.limits[0]), pg_rho = least(s.ratio, s.limits[2]);
    const V to_reward = L::times(rho, s.reward + earlier) + L::times(pg_rho, s.value);
    out[0] = if_live(s, to_reward);
    out[1] = if_live(s, s.reward - to_reward);
    out[2] = if_live(
        s,
        to_next_value(s, L::product(rho, s.discount), s.reward + earlier) +
            to_next_value(s, L::product(pg_rho, bootstrap_factor(s)), s.value));
    out[3] = to_later_target(s);
  }
};

struct RetraceAdjoint : Adjoint {
  static constexpr int kResults = 3;

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE Affine<L> map(const Transition<L>& s) {
    return if_live(
        s, unless_cut(s, L::times(s.discount, s.reward)), unless_cut(s, L::product(s.discount, Retrace::trace(s))));
  }

  template <class L, class V = typename L::V>
  static GRADSCALE_HOST_DEVICE void results(const Transition<L>& s, V /*y*/, V earlier, V* out) {
    const V correction = L::times(Retrace::trace(s), earlier);
    const V g = s.reward + correction;
    out[0] = if_live(s, g);
    out[1] = if_live(s, V{} - correction);
    out[2] = if_live(s, to_next_value(s, s.discount, g));
  }
};

// ---- Walking -------------------------------------------------------------------------------------------------------

// y of a step, given its map, and y of the step before in the walk.
template <class F, class L>
GRADSCALE_HOST_DEVICE typename L::V walked(const Transition<L>& s, const Affine<L>& map, typename L::V before) {
  if constexpr (F::kHasFactors) {
    const Factors<L> f = F::template factors<L>(s);
    return L::times(f.c, f.a + L::times(f.b, before));
  } else {
    return map.a + L::times(map.b, before);
  }
}

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
