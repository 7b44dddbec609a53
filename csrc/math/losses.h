// Losses of single numbers with their derivatives.
#pragma once

#include "exponential.h"

namespace gradscale {

template <class T>
struct LossAndDerivative {
  T loss;
  T derivative;
};

// Products in which 0 times anything is 0: an element without weight costs nothing, be it infinite.
template <class T>
GRADSCALE_HOST_DEVICE T product(T weight, T x) {
  return weight == T(0) ? T(0) : weight * x;
}

// log(1 + e) for e in 0..1 without branches or library calls: 2 atanh(e / (2 + e)), whose argument is at most 1/3, by
// its series. Relative error 1e-7 in float, 4e-16 in double.
template <class T>
GRADSCALE_HOST_DEVICE T log1p_unit(T e) {
  constexpr int terms = sizeof(T) == 8 ? 17 : 8;
  const T s = e / (T(2) + e);
  const T square = s * s;
  T sum = T(1) / T(2 * terms - 1);
  for (int n = terms - 2; n >= 0; --n) {
    sum = sum * square + T(1) / T(2 * n + 1);
  }
  return T(2) * s * sum;
}

// t softplus(-x) + (1 - t) softplus(x), and sigmoid(x) - t. Nothing cancels for t in 0..1.
template <class T>
GRADSCALE_HOST_DEVICE LossAndDerivative<T> binary_cross_entropy(T x, T target) {
  const T small = exp_nonpositive(-std::abs(x));
  const T tail = log1p_unit(small); // of the softplus on the far side of 0
  const T positive = (x > T(0) ? x : T(0)) + tail;
  const T negative = (x < T(0) ? -x : T(0)) + tail;
  const T sigmoid = (x < T(0) ? small : T(1)) / (T(1) + small);
  return {product(target, negative) + product(T(1) - target, positive), sigmoid - target};
}

// The loss -x.t / (max(|x|, eps) max(|t|, eps)), and the factors of its derivative by x_j, which is `of_x x_j + of_t
// t_j`.
struct Cosine {
  double loss;
  double of_x;
  double of_t;
};

// Takes x.x, t.t and x.t, each with x and t divided by the `unit` of its row.
GRADSCALE_HOST_DEVICE Cosine
negative_cosine(double xx, double tt, double xt, double x_unit, double t_unit, double eps) {
  const double x_length = std::sqrt(xx);
  const double t_length = std::sqrt(tt);
  const double x_floor = eps / x_unit;
  const double t_floor = eps / t_unit;
  const double x_divisor = x_length < x_floor ? x_floor : x_length; // NaN stays NaN
  const double t_divisor = t_length < t_floor ? t_floor : t_length;
  const double loss = -xt / (x_divisor * t_divisor);
  return {
      loss, x_length >= x_floor ? -loss / xx / (x_unit * x_unit) : 0.0, -1 / (x_divisor * x_unit * t_divisor * t_unit)};
}

} // namespace gradscale
