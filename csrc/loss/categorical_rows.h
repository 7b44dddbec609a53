// Rows of logits over the bins of a support: their decoded values, and cross-entropy with the target that a scalar
// becomes over the bins (TwoHot, HLGauss).
#pragma once

#include "row_tools.h"

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
A raw_moment(const A* exponentials, const Support& support) {
  const A* centers = raw_centers(support, A());
  const int64_t last = support.num_bins - 1;
  const int64_t pairs = support.num_bins / 2;
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < pairs; ++j) {
    const A low = centers[j], high = centers[last - j];
    const A difference = exponentials[last - j] - exponentials[j];
    const A total = exponentials[last - j] + exponentials[j];
    sum += A(0.5) * (difference * (high - low) + total * (high + low));
  }
  return last % 2 == 0 ? sum + exponentials[pairs] * centers[pairs] : sum;
}

// The expectation: in transformed coordinates, or of the raw centres.
template <class A>
A expectation(const Softmax<A>& softmax, const A* exponentials, const Support& support) {
  return support.raw ? raw_moment(exponentials, support) / softmax.sum
                     : expectation_from_moment(softmax.moment / softmax.sum, support);
}

template <class A>
A decoded_value(A expected, const Support& support) {
  return support.raw ? expected : inverse_transform_value(support.transform, expected, static_cast<A>(support.eps));
}

// log(sum) - sum_j t_j (x_j - maximum); gradient c (p_j - t_j). Only the bins begin..end of the target have mass, but
// for what label smoothing gives to all of them.
template <class T, class G, class A, class Target>
void categorical_row(const Segment& s, int64_t row, double coefficient, const Target& target, A* scratch) {
  const T* logits = row_of<T>(s.prediction, row);
  const Support& support = s.head->support;
  const Softmax<A> softmax = exponentials<true>(logits, s.width, scratch);
  A* mass = scratch + padded_width(s.width);
  const double kept = 1 - s.head->label_smoothing;
  const A everywhere = static_cast<A>(s.head->label_smoothing / static_cast<double>(s.width));
  A loss = std::log(softmax.sum);
  A nan = 0; // a NaN target makes the whole row NaN
  for (int32_t j = target.begin; j < target.end; ++j) {
    mass[j] = static_cast<A>(kept * target.mass(j));
    nan += A(0) * mass[j];
    if (mass[j] != 0) { // an illegal bin (-inf) without mass costs nothing
      loss -= mass[j] * (static_cast<A>(to_accumulate(logits[j])) - softmax.maximum);
    }
  }
  if (everywhere != 0) {
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < s.width; ++j) {
      sum += static_cast<A>(to_accumulate(logits[j])) - softmax.maximum;
    }
    loss -= everywhere * sum;
  }
  s.loss.store(row, loss + nan);
  if (s.expected.data != nullptr) {
    s.expected.store(row, decoded_value(expectation(softmax, scratch, support), support));
  }
  if (s.gradient.data == nullptr) {
    return;
  }
  const A c = static_cast<A>(coefficient);
  const A factor = c / softmax.sum + nan;
  const A offset = c * everywhere;
  write_gradient<G, A>(s.gradient, row, s.width, [=](int64_t j) { return scratch[j] * factor - offset; });
  G* gradient = static_cast<G*>(s.gradient.data) + row * s.gradient.stride;
  for (int32_t j = target.begin; j < target.end; ++j) {
    const A p = scratch[j] / softmax.sum;
    gradient[j] = from_accumulate<G, A>((p - (mass[j] + everywhere)) * c);
  }
}

// The value of a row of logits; or, where a gradient is wanted, the derivative g'(E) p_j (c_j - E) times grad_output,
// with E the expectation, c_j the centres and g the inverse transform.
template <class T, class A>
void decode_row(const Decoding& d, int64_t row, A* scratch) {
  const Support& support = *d.support;
  const Softmax<A> softmax = exponentials<true>(row_of<T>(d.logits, row), d.width, scratch);
  const A expected = expectation(softmax, scratch, support);
  if (d.gradient.data == nullptr) {
    d.out.store(row, decoded_value(expected, support));
    return;
  }
  const A slope =
      support.raw ? A(1) : inverse_transform_slope(support.transform, expected, static_cast<A>(support.eps));
  const A factor = static_cast<A>(d.grad_output.load(row)) * slope / softmax.sum;
  if (support.raw) {
    const A* centers = raw_centers(support, A());
    write_gradient<T, A>(
        d.gradient, row, d.width, [=](int64_t j) { return scratch[j] * factor * (centers[j] - expected); });
  } else {
    const A first = static_cast<A>(support.minimum) - expected;
    const A spacing = static_cast<A>(bin_width(support));
    write_gradient<T, A>(d.gradient, row, d.width, [=](int64_t j) {
      return scratch[j] * factor * (first + spacing * static_cast<A>(static_cast<int32_t>(j)));
    });
  }
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
