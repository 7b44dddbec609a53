// The log-probability of an action, its entropy and their gradients: choices among logits, and normal distributions.
//
// CPU kernels include this once for each instruction set, in its namespace, so that A can be Lanes of its vectors.
#if defined(GRADSCALE_VARIANT) || !defined(GRADSCALE_DISTRIBUTIONS)
#define GRADSCALE_DISTRIBUTIONS

#include "elementary.h"

namespace gradscale {
#ifdef GRADSCALE_VARIANT
namespace GRADSCALE_VARIANT {
#endif

// The sums of a choice: a softmax of which one element was chosen. With d = x - max x and e = exp(d), the exponentials
// of the others are added up without the chosen one, so that nothing cancels where its probability is near 1.
template <class A>
struct ChoiceSums {
  A others;            // sum of e without the chosen one
  A weighted;          // sum of e d
  A chosen_e;          // 0 if no element was chosen
  A chosen_difference; // d of the chosen one; NaN if there is none

  GRADSCALE_HOST_DEVICE A sum() const {
    return others + chosen_e;
  }
  GRADSCALE_HOST_DEVICE A log_sum() const {
    return log_sum(others, chosen_e);
  }
  GRADSCALE_HOST_DEVICE static A log_sum(A others, A chosen_e) {
    const A all = others + chosen_e;
#if defined(__CUDA_ARCH__)
    const A log_all = std::log(all);
#else
    const A log_all = log_normal(all);
#endif
    const A lost = others - (all - chosen_e); // to rounding, where the chosen one is larger
    return chosen_e > others ? log_all + lost / all : log_all;
  }
  GRADSCALE_HOST_DEVICE A log_prob() const {
    return chosen_difference - log_sum();
  }
  GRADSCALE_HOST_DEVICE A entropy() const {
    return log_sum() - weighted / sum();
  }
};

// The gradient of -slope log pi(a) - w H by the logits of a choice.
template <class A>
struct ChoiceGradient {
  A slope_of_p; // -slope / sum of e
  A inverse_sum;
  A expected; // sum(e d) / sum of e
  A entropy_weight;
  A others;

  GRADSCALE_HOST_DEVICE ChoiceGradient(const ChoiceSums<A>& sums, A slope, A entropy_weight)
      : inverse_sum(A(1) / sums.sum()),
        expected(sums.weighted * inverse_sum),
        entropy_weight(entropy_weight),
        others(sums.others) {
    slope_of_p = -slope * inverse_sum;
  }
  GRADSCALE_HOST_DEVICE A at(A e, A d, bool is_chosen) const {
    const A of_entropy = entropy_weight * (e * inverse_sum * ((d < A(-3e38f) ? A(-3e38f) : d) - expected));
    return slope_of_p * (is_chosen ? -others : e) + of_entropy;
  }
};

// One dimension of a normal distribution with an action.
template <class A>
struct NormalTerm {
  A inverse_scale;
  A z; // (action - mean) / scale
  A log_scale;

  GRADSCALE_HOST_DEVICE static NormalTerm of(A mean, A log_scale, A action, A inverse_scale) {
    return {inverse_scale, (action - mean) * inverse_scale, log_scale};
  }
  GRADSCALE_HOST_DEVICE static NormalTerm of(A mean, A log_scale, A action) {
    return of(mean, log_scale, action, exponential(-log_scale));
  }
  GRADSCALE_HOST_DEVICE static A log_prob(A z, A log_scale) {
    return A(-0.5) * z * z - log_scale - static_cast<A>(0.91893853320467274178); // log(2 pi) / 2
  }
  GRADSCALE_HOST_DEVICE static A entropy(A log_scale) {
    return log_scale + static_cast<A>(1.41893853320467274178);
  }
  GRADSCALE_HOST_DEVICE A mean_gradient(A slope) const {
    return product(slope, z * inverse_scale);
  }
  GRADSCALE_HOST_DEVICE A log_scale_gradient(A slope, A entropy_weight) const {
    return product(slope, z * z - A(1)) - entropy_weight;
  }
};

#ifdef GRADSCALE_VARIANT
} // namespace GRADSCALE_VARIANT
#endif
} // namespace gradscale

#endif
