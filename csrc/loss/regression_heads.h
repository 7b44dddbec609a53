// The heads that compare a row, a number or a vector, with its target, and PerStepLoss, which has no target. They are
// written once for CPU and GPU. The drivers, cpu/regression_rows.h and cuda/thread_group_rows.cuh, read and write
// elements and are the same for all heads. A head has
//
// - terms(x, t): the numbers that an element adds to the sums of its row; 0 for x = t = 0, because a GPU also adds
//   elements beyond the end of a row;
// - finish(sums): the loss of the row;
// - gradient(x, t): an element of the gradient, without factor(coefficient), which all elements share.
#pragma once

#include "../formulas/elementary.h"
#include "kernels.h"

namespace gradscale {

template <class T>
struct Sums {
  T values[3];
};

// The base of these heads: a loss that is the mean over the elements of a row, unless a head says otherwise.
template <class A>
struct MeanOverElements {
  using Sum = A;
  static constexpr int kSums = 1;
  static constexpr bool kTransformsTarget = false; // a target may have a transform; a CPU always applies it
  static constexpr bool kScales = false;           // scale(largest |x|, largest |t|) is called first
  static constexpr bool kGradientWaits = false;    // gradient() and factor() use members that finish() sets
  double width;
  const Head* head;

  // Of an element in the mean. The terms have it already: their sum may overflow where the mean does not.
  GRADSCALE_HOST_DEVICE A share() const {
    return static_cast<A>(1 / width);
  }
  GRADSCALE_HOST_DEVICE A finish(const Sums<A>& sums) const {
    return sums.values[0];
  }
  GRADSCALE_HOST_DEVICE A factor(double coefficient) const {
    return static_cast<A>(coefficient / width);
  }
};

// mean_j (x_j - transform(t_j))^2; gradient c 2 (x_j - transform(t_j)) / width.
template <class A>
struct MeanSquaredError : MeanOverElements<A> {
  static constexpr bool kTransformsTarget = true;
  GRADSCALE_HOST_DEVICE Sums<A> terms(A x, A t) const {
    return {{(x - t) * ((x - t) * this->share())}};
  }
  GRADSCALE_HOST_DEVICE A gradient(A x, A t) const {
    return x - t;
  }
  GRADSCALE_HOST_DEVICE A factor(double coefficient) const {
    return static_cast<A>(2 * coefficient / this->width);
  }
};

// mean_j huber(d), d = x_j - transform(t_j): d^2 / 2 for |d| <= delta, else delta (|d| - delta / 2). With m = min(|d|,
// delta) both are m (|d| - m / 2). Gradient c clamp(d, -delta, delta) / width.
template <class A>
struct Huber : MeanOverElements<A> {
  static constexpr bool kTransformsTarget = true;

  // Finite in float too: an infinite delta would make the loss of an infinite d NaN.
  GRADSCALE_HOST_DEVICE A delta() const {
    constexpr double largest = std::numeric_limits<A>::max();
    return static_cast<A>(this->head->delta < largest ? this->head->delta : largest);
  }
  GRADSCALE_HOST_DEVICE Sums<A> terms(A x, A t) const {
    const A size = std::abs(x - t), most = delta();
    const A limited = size < most ? size : most;
    return {{limited * ((size - A(0.5) * limited) * this->share())}};
  }
  GRADSCALE_HOST_DEVICE A gradient(A x, A t) const {
    const A difference = x - t, most = delta();
    const A below = most < difference ? most : difference; // NaN stays NaN
    return below < -most ? -most : below;
  }
};

// t softplus(-x) + (1 - t) softplus(x); gradient c (sigmoid(x) - t). Nothing cancels for t in 0..1.
template <class A>
struct BinaryCrossEntropy : MeanOverElements<A> {
  GRADSCALE_HOST_DEVICE Sums<A> terms(A x, A t) const {
    const A tail = log1p_unit(exp_nonpositive(-std::abs(x))); // softplus(x) = max(x, 0) + tail
    const A positive = (x > A(0) ? x : A(0)) + tail;
    const A negative = (x < A(0) ? -x : A(0)) + tail;
    return {{product(t, negative) + product(A(1) - t, positive)}};
  }
  GRADSCALE_HOST_DEVICE A gradient(A x, A t) const {
    const A small = exp_nonpositive(-std::abs(x)); // the compiler shares it with terms()
    return (x < A(0) ? small : A(1)) / (A(1) + small) - t;
  }
};

// The prediction itself.
template <class A>
struct PerStepLoss : MeanOverElements<A> {
  GRADSCALE_HOST_DEVICE Sums<A> terms(A x, A) const {
    return {{x}};
  }
  GRADSCALE_HOST_DEVICE A gradient(A, A) const {
    return A(1);
  }
};

// -x.t / (max(|x|, eps) max(|t|, eps)); gradient magnitude (x_factor x_j + t_factor t_j), where the vectors x_factor x
// and t_factor t have length 1 or less. The sums are x.x, t.t and x.t. Doubles are first divided by their units, the
// largest magnitudes or eps, because their squares and the product of their lengths may overflow or underflow. For
// floats, these are in the range of double.
template <class A>
struct NegativeCosine : MeanOverElements<A> {
  using Sum = double;
  static constexpr int kSums = 3;
  static constexpr bool kScales = sizeof(A) == 8;
  static constexpr bool kGradientWaits = true;
  double x_unit = 1, t_unit = 1, inverse_x_unit = 1, inverse_t_unit = 1;
  double x_factor = 0, t_factor = 0, magnitude = 0;

  GRADSCALE_HOST_DEVICE double eps() const {
    return larger(this->head->support.eps, std::numeric_limits<double>::min()); // 1 / eps is finite
  }
  GRADSCALE_HOST_DEVICE void scale(double largest_x, double largest_t) {
    x_unit = larger(largest_x, eps());
    t_unit = larger(largest_t, eps());
    inverse_x_unit = 1 / x_unit;
    inverse_t_unit = 1 / t_unit;
  }
  GRADSCALE_HOST_DEVICE Sums<double> terms(A x_j, A t_j) const {
    const double x = x_j * inverse_x_unit, t = t_j * inverse_t_unit;
    return {{x * x, t * t, x * t}};
  }
  GRADSCALE_HOST_DEVICE double finish(const Sums<double>& sums) {
    const double x_length = std::sqrt(sums.values[0]), t_length = std::sqrt(sums.values[1]);
    const double x_floor = eps() / x_unit, t_floor = eps() / t_unit;
    const double x_divisor = x_length < x_floor ? x_floor : x_length; // NaN stays NaN
    const double t_divisor = t_length < t_floor ? t_floor : t_length;
    const double t_scale = kScales ? t_divisor : (t_length > 0 ? t_length : 1);
    const double cosine = sums.values[2] / x_divisor / t_scale;
    x_factor = x_length >= x_floor ? cosine / x_length * inverse_x_unit : 0.0;
    t_factor = -inverse_t_unit / t_scale;
    magnitude = t_scale / t_divisor / (x_divisor * x_unit);
    if (!kScales && magnitude > 1e30) { // the factor may overflow in float, and 0 * inf is NaN
      const double limited = std::fmin(magnitude, 1e200);
      x_factor *= limited;
      t_factor *= limited;
      magnitude = 1;
    }
    return -cosine * (t_scale / t_divisor);
  }
  GRADSCALE_HOST_DEVICE A gradient(A x, A t) const {
    return static_cast<A>(x_factor * x + t_factor * t);
  }
  GRADSCALE_HOST_DEVICE A factor(double coefficient) const {
    return static_cast<A>(coefficient * magnitude);
  }
};

} // namespace gradscale
