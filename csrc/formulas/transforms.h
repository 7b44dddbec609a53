// Value transforms of one scalar, in the forms that lose no digits near zero.
//
//   signed_hyperbolic  h(x) = sign(x)(sqrt(|x|+1) - 1) + eps x     (Pohlen et al. 2018, appendix of MuZero)
//   signed_parabolic   its inverse
//   symlog, symexp     sign(x) log(1+|x|) and its inverse           (DreamerV3)
#pragma once

#include "port.h"

namespace gradscale {

enum class Transform : int32_t { identity = 0, signed_hyperbolic = 1, symlog = 2 };

// sqrt(a+1) - 1 = a / (sqrt(a+1) + 1) has no cancellation, and the sign is carried by x itself.
template <class T>
GRADSCALE_HOST_DEVICE T signed_hyperbolic(T x, T eps) {
  return x * (T(1) / (std::sqrt(std::abs(x) + T(1)) + T(1)) + eps);
}

// v = y / (sqrt(1/4 + eps (|y|+1+eps)) + 1/2 + eps), for which (|v| + 1)^2 = |x| + 1 if h(x) = y. For eps > 1, the root
// is computed as 2 sqrt(eps) sqrt((|y|+1+eps + 1/(4 eps)) / 4), because the product and the sum may overflow.
template <class T>
GRADSCALE_HOST_DEVICE T hyperbolic_root(T y, T eps) {
  const T size = std::abs(y), rest = T(1) + eps;
  const T root = eps <= T(1) ? std::sqrt(T(0.25) + eps * (size + rest))
                             : T(2) * std::sqrt(eps) * std::sqrt(T(0.25) * size + T(0.25) * (rest + T(0.25) / eps));
  return y / (root + T(0.5) + eps);
}

// The inverse of h is v(|v| + 2): again a form without cancellation.
template <class T>
GRADSCALE_HOST_DEVICE T signed_parabolic(T y, T eps) {
  const T v = hyperbolic_root(y, eps);
  return v * (std::abs(v) + T(2));
}

template <class T>
GRADSCALE_HOST_DEVICE T symlog(T x) {
  return std::copysign(std::log1p(std::abs(x)), x);
}

template <class T>
GRADSCALE_HOST_DEVICE T symexp(T y) {
  return std::copysign(std::expm1(std::abs(y)), y);
}

template <class T>
GRADSCALE_HOST_DEVICE T transform_value(Transform transform, T x, T eps) {
  switch (transform) {
    case Transform::signed_hyperbolic:
      return signed_hyperbolic(x, eps);
    case Transform::symlog:
      return symlog(x);
    case Transform::identity:
      break;
  }
  return x;
}

template <class T>
GRADSCALE_HOST_DEVICE T inverse_transform_value(Transform transform, T y, T eps) {
  switch (transform) {
    case Transform::signed_hyperbolic:
      return signed_parabolic(y, eps);
    case Transform::symlog:
      return symexp(y);
    case Transform::identity:
      break;
  }
  return y;
}

// The derivative of inverse_transform_value by y.
template <class T>
GRADSCALE_HOST_DEVICE T inverse_transform_slope(Transform transform, T y, T eps) {
  switch (transform) {
    case Transform::signed_hyperbolic: {
      const T root = std::abs(hyperbolic_root(y, eps)) + T(1);
      return T(2) * root / (T(1) + T(2) * eps * root);
    }
    case Transform::symlog:
      return std::exp(std::abs(y));
    case Transform::identity:
      break;
  }
  return T(1);
}

} // namespace gradscale
