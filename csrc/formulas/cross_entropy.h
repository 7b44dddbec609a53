// The loss of a head with logits x and a target t over the logits, and its gradient. With d_j = x_j - max x,
// e_j = exp(d_j), s = sum e, p_j = e_j / s, entropy H(p) = -sum p_j log p_j and its weight w:
//
//   loss      sum(t) log s - sum_j t_j d_j - w H(p) + sum_j t_j log t_j (the last two are optional)
//   gradient  sum(t) p_j - t_j + w p_j (log p_j + H(p))
//
// H(p) = log s - sum(e d) / s, so that log p_j + H(p) = d_j - sum(e d) / s.
//
// CPU kernels include this once for each instruction set, in its namespace, so that A can be Lanes of its vectors.
#if defined(GRADSCALE_VARIANT) || !defined(GRADSCALE_CROSS_ENTROPY)
#define GRADSCALE_CROSS_ENTROPY

#include "losses.h"

namespace gradscale {
#ifdef GRADSCALE_VARIANT
namespace GRADSCALE_VARIANT {
#endif

constexpr float kLowest = -3e38f; // replaces -inf, because 0 * -inf is NaN

// The factors that the elements of a row share.
template <class A>
struct CrossEntropyFactors {
  A coefficient;
  A per_exponential; // coefficient sum(t) / s
  A inverse_sum;
  A expected; // sum(e d) / s
};

// A is the type of sums, or Lanes of that type; `options` are bits of RowOptions.
template <class A, int options>
struct CrossEntropy {
  static constexpr bool kHasEntropy = (options & kEntropy) != 0;
  static constexpr bool kSubtracts = (options & kSubtractsEntropy) != 0;
  enum Sum { kSum, kMass, kWeighted, kCorrect, kNegativeEntropy };
  static constexpr int kSums = kSubtracts ? 5 : 4;
  A entropy_weight;

  // Adds an element to the sums. `correct` is product(t, d), which is 0 for an illegal action (d = -inf) with t = 0.
  // `weight` is d, or the position among the bins of a support.
  GRADSCALE_HOST_DEVICE static void add(A (&sums)[kSums], A e, A t, A correct, A weight) {
    sums[kSum] += e;
    sums[kWeighted] += e * weight;
    sums[kMass] += t;
    sums[kCorrect] += correct;
    if constexpr (kSubtracts) {
      sums[kNegativeEntropy] += t == A(0) ? A(0) : t * std::log(t);
    }
  }
  GRADSCALE_HOST_DEVICE static A finite(A d) {
    return larger(d, A(kLowest));
  }
  GRADSCALE_HOST_DEVICE static A entropy(const A (&sums)[kSums]) {
    return std::log(sums[kSum]) - sums[kWeighted] / sums[kSum];
  }
  GRADSCALE_HOST_DEVICE A loss(const A (&sums)[kSums]) const {
    A loss = sums[kMass] * std::log(sums[kSum]) - sums[kCorrect];
    if constexpr (kSubtracts) {
      loss += sums[kNegativeEntropy];
    }
    if constexpr (kHasEntropy) {
      loss -= entropy_weight * entropy(sums);
    }
    return loss;
  }
  using Factors = CrossEntropyFactors<A>;
  GRADSCALE_HOST_DEVICE static Factors factors(const A (&sums)[kSums], A inverse_sum, A coefficient) {
    return {coefficient, coefficient * inverse_sum * sums[kMass], inverse_sum, sums[kWeighted] * inverse_sum};
  }
  GRADSCALE_HOST_DEVICE A gradient(const Factors& row, A e, A d, A t) const {
    if constexpr (kHasEntropy) { // the gradient of the entropy is subtracted from the target
      t = t - entropy_weight * (e * row.inverse_sum * (finite(d) - row.expected));
    }
    return e * row.per_exponential - row.coefficient * t;
  }
};

#ifdef GRADSCALE_VARIANT
} // namespace GRADSCALE_VARIANT
#endif
} // namespace gradscale

#endif
