// The loss of a head with logits x and a target t over the logits, and its gradient. With d_j = x_j - max x,
// e_j = exp(d_j), s = sum e, p_j = e_j / s, entropy H(p) = -sum p_j log p_j and its weight w:
//
//   loss      sum(t) log s - sum_j t_j d_j - w H(p) + sum_j t_j log t_j (the last two are optional)
//   gradient  sum(t) p_j - t_j + w p_j (log p_j + H(p))
//
// H(p) = log s - sum(e d) / s, so that log p_j + H(p) = d_j - sum(e d) / s.
//
// All engines use it: rows and short rows of the CPU (loss/cpu), and lanes, blocks and thread groups of a GPU
// (loss/cuda). They differ in who owns which elements, and in how sums are reduced. For a sparse target (targets.h)
// they add and subtract the bins with mass alone.
//
// CPU kernels include this once for each instruction set, in its namespace, so that A can be Lanes of its vectors.
#if defined(GRADSCALE_VARIANT) || !defined(GRADSCALE_CROSS_ENTROPY)
#define GRADSCALE_CROSS_ENTROPY

#include "elementary.h"

namespace gradscale {
#ifdef GRADSCALE_VARIANT
namespace GRADSCALE_VARIANT {
#endif

// Options that kernels for rows of logits are compiled for, as bits.
enum RowOptions : int32_t {
  kSmoothing = 1,        // label_smoothing
  kEntropy = 2,          // entropy_weight
  kSubtractsEntropy = 4, // subtract_target_entropy
  kRawCenters = 8,       // the support is raw; set for LossRows only
  kPredictsP = 16,       // predicts_p, and the Mixture if there is one; set for DivergenceRows only
  kMixesProbabilities = 32,
  kMixesLogarithms = 64,
};

// The options of a head of logits. launch_loss.cpp adds those that only some kinds of rows have.
template <class Head>
int32_t row_options(const Head& head) {
  return (head.label_smoothing != 0 ? kSmoothing : 0) | (head.entropy_weight != 0 ? kEntropy : 0) |
         (head.subtract_target_entropy ? kSubtractsEntropy : 0);
}

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
  // sum e, sum t, sum of weighted(e, d), sum of correct(t, d), sum t log t. For the bins of a support, whose
  // expectation is wanted instead of the entropy, the exponentials are weighted by the bins' positions.
  // A sum has the same index whatever the options are.
  enum Sum { kSum, kMass, kWeighted, kCorrect, kNegativeEntropy, kMostSums };
  static constexpr int kSums = kSubtracts ? 5 : 4;
  static constexpr int kRowSums = kHasEntropy ? 3 : 2; // the first sums, which the gradient needs
  using Factors = CrossEntropyFactors<A>;
  A entropy_weight;

  template <class Head>
  GRADSCALE_HOST_DEVICE static CrossEntropy of(const Head& head) {
    return {A(head.entropy_weight)};
  }
  // The same with differences d, and the sums of weighted(), in another unit.
  GRADSCALE_HOST_DEVICE CrossEntropy in_unit(A unit) const {
    return {entropy_weight * unit};
  }

  GRADSCALE_HOST_DEVICE static A finite(A d) {
    return larger(d, A(kLowest));
  }
  // t d; 0 for an illegal action (d = -inf) with t = 0.
  GRADSCALE_HOST_DEVICE static A correct(A t, A d) {
    return product(t, d);
  }
  // The same without the test for t = 0, if add_illegal() is called for each illegal action.
  GRADSCALE_HOST_DEVICE static A correct_finite(A t, A d) {
    return t * finite(d);
  }
  // t log t
  GRADSCALE_HOST_DEVICE static A negative_entropy(A t) {
    return t == A(0) ? A(0) : t * std::log(t);
  }
  // e d
  GRADSCALE_HOST_DEVICE static A weighted(A e, A d) {
    return e * finite(d);
  }
  GRADSCALE_HOST_DEVICE static void add_exponential(A (&sums)[kSums], A e, A weighted) {
    sums[kSum] += e;
    sums[kWeighted] += weighted;
  }
  GRADSCALE_HOST_DEVICE static void add(A (&sums)[kSums], A e, A t, A correct, A weighted) {
    add_exponential(sums, e, weighted);
    sums[kMass] += t;
    sums[kCorrect] += correct;
    if constexpr (kSubtracts) {
      sums[kNegativeEntropy] += negative_entropy(t);
    }
  }
  // Adds what correct_finite() lacks for the target of an illegal action.
  GRADSCALE_HOST_DEVICE static void add_illegal(A (&sums)[kSums], A x, A t) {
    sums[kCorrect] += x == -static_cast<A>(INFINITY) ? correct(t, x) : A(0);
  }

  GRADSCALE_HOST_DEVICE static A log_sum(const A (&sums)[kSums]) {
#if defined(__CUDA_ARCH__)
    return std::log(sums[kSum]);
#else
    return log_normal(sums[kSum]); // loops over rows are vectorised
#endif
  }
  GRADSCALE_HOST_DEVICE static A entropy(const A (&sums)[kSums]) {
    return log_sum(sums) - sums[kWeighted] / sums[kSum];
  }
  GRADSCALE_HOST_DEVICE A loss(const A (&sums)[kSums]) const {
    A subtracted = sums[kCorrect];
    if constexpr (kSubtracts) {
      subtracted = subtracted - sums[kNegativeEntropy];
    }
    if constexpr (kHasEntropy) {
      subtracted = subtracted + entropy_weight * entropy(sums);
    }
    return sums[kMass] * log_sum(sums) - subtracted;
  }

  GRADSCALE_HOST_DEVICE static Factors factors(const A (&sums)[kSums], A inverse_sum, A coefficient) {
    return {coefficient, coefficient * inverse_sum * sums[kMass], inverse_sum, sums[kWeighted] * inverse_sum};
  }
  // The gradient without entropy bonus, of an element without target and of one with target t.
  GRADSCALE_HOST_DEVICE static A gradient(const Factors& row, A e) {
    return row.per_exponential * e;
  }
  GRADSCALE_HOST_DEVICE static A gradient(const Factors& row, A e, A t) {
    return e * row.per_exponential - row.coefficient * t;
  }
  GRADSCALE_HOST_DEVICE A gradient(const Factors& row, A e, A d, A t) const {
    if constexpr (kHasEntropy) { // as a target that is lower by the gradient of -w H
      t = t - entropy_weight * (e * row.inverse_sum * (finite(d) - row.expected));
    }
    return gradient(row, e, t);
  }
};

#ifdef GRADSCALE_VARIANT
} // namespace GRADSCALE_VARIANT
#endif
} // namespace gradscale

#endif
