// What rows of logits over the bins of a support decode to. Included once for each instruction set.
#include "../cpu/rows.h"
#include "../formulas/support.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

inline const float* raw_centers(const Support& support, float) {
  return support.raw_centers_float;
}

inline const double* raw_centers(const Support& support, double) {
  return support.raw_centers;
}

// sum_j e_j c_j over the centres transformed back. Bins at equal distance from the middle are taken together: over a
// symmetric support each pair is exactly antisymmetric, so that equal e_j give exactly 0.
template <class A>
A raw_moment(const A* values, const Support& support) {
  const A* centers = raw_centers(support, A());
  const int64_t last = support.num_bins - 1;
  const int64_t pairs = support.num_bins / 2;
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < pairs; ++j) {
    sum += pair_moment(centers[j], centers[last - j], values[j], values[last - j]);
  }
  return last % 2 == 0 ? sum + values[pairs] * centers[pairs] : sum;
}

// The expectation in transformed coordinates, or of the raw centres.
template <class A>
A expectation(const Softmax<A>& softmax, const Support& support) {
  return support.raw ? raw_moment(softmax.values, support) / softmax.sum
                     : expectation_from_moment(softmax.moment / softmax.sum, support);
}

template <class A>
A decoded_value(A expected, const Support& support) {
  return support.raw ? expected : inverse_transform_value(support.transform, expected, static_cast<A>(support.eps));
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
