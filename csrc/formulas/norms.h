// Norms that neither overflow nor underflow, and the factors by which elements are scaled.
#pragma once

#include "port.h"

namespace gradscale {

// gradient * scale, with exact zeros where the scale is 0, also where the gradient is inf or NaN.
template <class A>
GRADSCALE_HOST_DEVICE A scaled_element(A gradient, A scale) {
  return scale == 0 ? A(0) : gradient * scale;
}

// The sum of (|g| / root^2)^p, or the largest |g| / root^2 where p is inf. The root is 1 unless the plain sum or
// the norm would overflow or underflow; it is a power of two, except for a finite p > kLargestPower. NaN and inf
// propagate.
struct PowerSum {
  double sum;
  double root;
};

enum class Rule : int32_t {
  clip,     // g * min(1, limit / |g|)
  normalize // g * limit / |g|, and zeros stay zeros
};

// Maps each element of a group to element / root^2 * factor. A root of 0 sets all elements to zero.
struct Scaling {
  double root;
  double factor;
  bool within; // the norm is within the limit

  GRADSCALE_HOST_DEVICE bool changes_nothing() const {
    return root == 1 && factor == 1;
  }
  // True if the scaling can be computed in float.
  GRADSCALE_HOST_DEVICE bool is_normal_in_float() const {
    return root == 1 && std::abs(factor) > 1e-37 && std::abs(factor) < 1e38;
  }
};

// Multiplies elements by a factor. If `zeros` is true, a factor of 0 sets all elements to 0, even NaN and inf.
GRADSCALE_HOST_DEVICE Scaling multiplied_by(double factor, bool zeros) {
  return {zeros && factor == 0 ? 0.0 : 1.0, factor, false};
}

// x^p for x >= 0. On a GPU pow is a function call, which would spill registers; exp(p log(x)) has an error of about
// p log(x) roundings.
GRADSCALE_HOST_DEVICE double positive_power(double x, double p) {
#if defined(__CUDA_ARCH__)
  return exp(p * log(x));
#else
  return std::pow(x, p);
#endif
}

// The same, in few instructions for p = 1 and p = 2.
GRADSCALE_HOST_DEVICE double power_in_norm(double x, double p) {
  return p == 2 ? x * x : (p == 1 ? x : positive_power(x, p));
}

GRADSCALE_HOST_DEVICE double norm_of(double sum, double p) {
  if (p == 2) {
    return std::sqrt(sum);
  }
  return p == 1 || std::isinf(p) ? sum : positive_power(sum, 1 / p);
}

// For p < 1, the norm may be out of the range of double although its sum of powers is not. Then a power of two moves
// from the norm to `root`.
GRADSCALE_HOST_DEVICE PowerSum within_double(PowerSum sum, double p) {
  const double exponent = p < 1 && sum.sum > 0 && !std::isinf(sum.sum) ? std::log2(sum.sum) / p : 0;
  if (std::abs(exponent) < 900) {
    return sum;
  }
  const double half = std::floor(exponent / 2);
  return {positive_power(2, p * (exponent - 2 * half)), sum.root * std::ldexp(1.0, static_cast<int>(half))};
}

GRADSCALE_HOST_DEVICE Scaling scaling(Rule rule, PowerSum sum, double p, double limit) {
  sum = within_double(sum, p);
  const double norm = norm_of(sum.sum, p); // divided by root^2
  const bool within = norm <= (sum.root == 1 ? limit : limit / sum.root / sum.root);
  if (!(limit >= 0)) {
    return {1, static_cast<double>(NAN), within};
  }
  if (limit == 0) {
    return {0, 0, within};
  }
  const bool unchanged = rule == Rule::clip ? within : norm == 0;
  return unchanged ? Scaling{1, 1, within} : Scaling{sum.root, limit / norm, within};
}

// True if a plain sum of powers is accurate: no power overflowed, and those that underflowed are negligible.
GRADSCALE_HOST_DEVICE bool is_safe(double sum) {
  return sum > 1e-280 && sum < 1e300;
}

// For larger p, powers of numbers up to 4 may overflow.
constexpr double kLargestPower = 256;

// The root for elements whose largest magnitude is `maximum` > 0. Divide by the root twice: 1 / root^2 may not be
// finite. The largest quotient is between 1/2 and 4, or 1 for a large p.
GRADSCALE_HOST_DEVICE double root_for(double maximum, double p) {
  return p > kLargestPower && !std::isinf(p) ? std::sqrt(maximum) : std::ldexp(1.0, std::ilogb(maximum) / 2);
}

// The factor that converts a sum of powers with root `from` to root `to`.
GRADSCALE_HOST_DEVICE double from_root_to_root(double from, double to, double p) {
  const double ratio = (from / to) * (from / to);
  return ratio == 1 || std::isinf(p) ? ratio : positive_power(ratio, p);
}

// Adds the sums of two parts of a group.
GRADSCALE_HOST_DEVICE PowerSum added(PowerSum a, PowerSum b, double p) {
  if (a.sum == 0 || b.sum == 0) {
    return a.sum == 0 ? b : a;
  }
  if (!std::isfinite(a.sum) || !std::isfinite(b.sum)) { // a factor of 0 would turn inf into NaN
    return {a.sum + b.sum, 1};
  }
  const double root = a.root > b.root ? a.root : b.root;
  a.sum *= from_root_to_root(a.root, root, p);
  b.sum *= from_root_to_root(b.root, root, p);
  return {std::isinf(p) ? (a.sum > b.sum ? a.sum : b.sum) : a.sum + b.sum, root};
}

} // namespace gradscale
