// Rows that are compared with their target as numbers or vectors: MeanSquaredError, BinaryCrossEntropy, NegativeCosine;
// and PerStepLoss, which is compared with nothing.
#pragma once

#include "../math/losses.h"
#include "row_tools.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// mean_j (x_j - transform(t_j))^2; gradient c 2 (x_j - transform(t_j)) / width.
template <class T, class G, class A>
void mean_squared_error_row(const Segment& s, int64_t row, double coefficient, A* scratch) {
  const int64_t width = s.width;
  const Support& transform = s.head->support;
  A* difference = second_row(scratch, width);
  widen_row(s.target, row, width, difference);
  if (transform.transform != Transform::identity) {
    for (int64_t j = 0; j < width; ++j) {
      difference[j] = transform_value(transform.transform, difference[j], static_cast<A>(transform.eps));
    }
  }
  const T* prediction = row_of<T>(s.prediction, row);
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < width; ++j) {
    difference[j] = static_cast<A>(to_accumulate(prediction[j])) - difference[j];
    sum += difference[j] * difference[j];
  }
  s.loss.store(row, sum / static_cast<A>(width));
  if (s.gradient.data == nullptr) {
    return;
  }
  const A factor = static_cast<A>(2 * coefficient / static_cast<double>(width));
  write_gradient<G, A>(s.gradient, row, width, [=](auto load) { return load(difference) * factor; });
}

template <class G, class A>
void write_scalar(const Rows& gradient, int64_t row, A value) {
  static_cast<G*>(gradient.data)[row * gradient.stride] = from_accumulate<G, A>(value);
}

template <class T, class G, class A>
void binary_cross_entropy_row(const Segment& s, int64_t row, double coefficient, A*) {
  const A logit = static_cast<A>(to_accumulate(*row_of<T>(s.prediction, row)));
  const LossAndDerivative<A> result = binary_cross_entropy(logit, static_cast<A>(load_scalar(s.target, row)));
  s.loss.store(row, result.loss);
  if (s.gradient.data != nullptr) {
    write_scalar<G>(s.gradient, row, result.derivative * static_cast<A>(coefficient));
  }
}

// The largest of |x_j|, so that squares of doubles neither overflow nor underflow; those of floats do not in double.
inline double unit_of(const double* x, int64_t width) {
  double largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < width; ++j) {
    largest = std::abs(x[j]) > largest ? std::abs(x[j]) : largest;
  }
  return largest > 0 ? largest : 1;
}

inline double unit_of(const float*, int64_t) {
  return 1;
}

template <class T, class G, class A>
void negative_cosine_row(const Segment& s, int64_t row, double coefficient, A* scratch) {
  const int64_t width = s.width;
  A* target = second_row(scratch, width);
  widen(row_of<T>(s.prediction, row), width, scratch);
  widen_row(s.target, row, width, target);
  const double x_unit = unit_of(scratch, width);
  const double t_unit = unit_of(target, width);
  const double of_x_unit = 1 / x_unit;
  const double of_t_unit = 1 / t_unit;
  double xx = 0, tt = 0, xt = 0;
#pragma omp simd reduction(+ : xx, tt, xt)
  for (int64_t j = 0; j < width; ++j) {
    const double x = scratch[j] * of_x_unit;
    const double t = target[j] * of_t_unit;
    xx += x * x;
    tt += t * t;
    xt += x * t;
  }
  const Cosine cosine = negative_cosine(xx, tt, xt, x_unit, t_unit, s.head->support.eps);
  s.loss.store(row, cosine.loss);
  if (s.gradient.data == nullptr) {
    return;
  }
  const double of_x = cosine.of_x * coefficient;
  const double of_t = cosine.of_t * coefficient;
  for (int64_t j = 0; j < width; ++j) {
    target[j] = static_cast<A>(of_x * scratch[j] + of_t * target[j]);
  }
  write_gradient<G, A>(s.gradient, row, width, [=](auto load) { return load(target); });
}

template <class T, class G, class A>
void per_step_loss_row(const Segment& s, int64_t row, double coefficient, A*) {
  s.loss.store(row, static_cast<double>(to_accumulate(*row_of<T>(s.prediction, row))));
  if (s.gradient.data != nullptr) {
    write_scalar<G>(s.gradient, row, static_cast<A>(coefficient));
  }
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
