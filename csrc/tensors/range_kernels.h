// The kernels of range.h. Sums are taken in double, where squares of float neither overflow nor vanish; a sum out of
// double's safe range (float64 gradients, or a large p) is taken again, of elements scaled by a power of two. Included
// once for each instruction set; the loops are plain, and vectorised by the compiler.
#include "../math/element.h"
#include "range.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

template <class Power>
double lane_sum(int64_t size, Power power) {
  LaneSum<double> sum;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
#pragma omp simd
    for (int k = 0; k < kLanes; ++k) {
      sum.lanes[k] += power(i + k);
    }
  }
  for (int k = 0; i < size; ++i, ++k) {
    sum.lanes[k] += power(i);
  }
  return sum.total();
}

// NaN where there is one.
template <class Magnitude>
double largest(int64_t size, Magnitude magnitude) {
  double maximum = 0;
  int unordered = 0;
#pragma omp simd reduction(max : maximum) reduction(| : unordered)
  for (int64_t i = 0; i < size; ++i) {
    const double value = magnitude(i);
    maximum = value > maximum ? value : maximum;
    unordered |= value != value;
  }
  return unordered ? static_cast<double>(NAN) : maximum;
}

template <class Magnitude>
double plain_power_sum(int64_t size, double p, Magnitude magnitude) {
  if (p == 1) {
    return lane_sum(size, magnitude);
  }
  if (p == 2) {
    return lane_sum(size, [=](int64_t i) { return magnitude(i) * magnitude(i); });
  }
  return lane_sum(size, [=](int64_t i) { return std::pow(magnitude(i), p); });
}

// magnitude(i, scaled) is that of element i when its numbers, one or two of `numbers` in all, have gone through
// `scaled`.
template <class Magnitude, class Number>
PowerSum power_sum(int64_t size, double p, Magnitude magnitude, int64_t numbers, Number number) {
  const auto sum_of = [=](auto scaled) {
    const auto scaled_magnitude = [=](int64_t i) { return magnitude(i, scaled); };
    return std::isinf(p) ? largest(size, scaled_magnitude) : plain_power_sum(size, p, scaled_magnitude);
  };
  const double sum = sum_of([](double x) { return x; });
  if (is_safe(sum)) {
    return {sum, 1};
  }
  const double maximum = largest(numbers, [=](int64_t i) { return std::fabs(number(i)); });
  if (maximum == 0 || !std::isfinite(maximum)) {
    return {maximum, 1};
  }
  const double root = root_for(maximum);
  const double reciprocal = 1 / root;
  return {sum_of([=](double x) { return x * reciprocal * reciprocal; }), root};
}

PowerSum power_sum_of_range(const Range& range, double p) {
  PowerSum result{};
  dispatch_element(range.element, [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(range.data);
    const int64_t numbers = range.is_complex ? 2 * range.size : range.size;
    const auto number = [=](int64_t i) { return static_cast<double>(to_accumulate(data[i])); };
    if (range.is_complex && p != 2) {
      const auto modulus = [=](int64_t i, auto scaled) {
        return std::hypot(scaled(number(2 * i)), scaled(number(2 * i + 1)));
      };
      result = power_sum(range.size, p, modulus, numbers, number);
    } else { // the squared modulus of a complex number is a sum of squares
      const auto magnitude = [=](int64_t i, auto scaled) { return std::fabs(scaled(number(i))); };
      result = power_sum(numbers, p, magnitude, numbers, number);
    }
  });
  return result;
}

UpdateSquares update_of_range(const Range& before, const void* after) {
  UpdateSquares result{};
  dispatch_element(before.element, [&](auto type) {
    using T = decltype(type);
    const T* x = static_cast<const T*>(before.data);
    const T* y = static_cast<const T*>(after);
    const auto number = [](T element) { return static_cast<double>(to_accumulate(element)); };
    LaneSum<double> squares, updates;
    int64_t i = 0;
    for (; i + kLanes <= before.size; i += kLanes) {
#pragma omp simd
      for (int k = 0; k < kLanes; ++k) {
        const double old = number(x[i + k]);
        const double update = number(y[i + k]) - old;
        squares.lanes[k] += old * old;
        updates.lanes[k] += update * update;
      }
    }
    for (int k = 0; i < before.size; ++i, ++k) {
      const double old = number(x[i]);
      const double update = number(y[i]) - old;
      squares.lanes[k] += old * old;
      updates.lanes[k] += update * update;
    }
    result = {squares.total(), updates.total()};
  });
  return result;
}

void scale_range(const Range& from, void* to, double root, double factor) {
  const int64_t size = from.is_complex ? 2 * from.size : from.size;
  dispatch_element(from.element, [&](auto type) {
    using T = decltype(type);
    using A = typename AccumulateType<T>::type;
    const T* source = static_cast<const T*>(from.data);
    T* out = static_cast<T*>(to);
    if (Scaling{root, factor, false}.is_normal_in_float()) {
      const A narrow = static_cast<A>(factor);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        out[i] = from_accumulate<T, A>(static_cast<A>(to_accumulate(source[i])) * narrow);
      }
      return;
    }
    const double reciprocal = 1 / root;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const double value = static_cast<double>(to_accumulate(source[i])) * reciprocal * reciprocal * factor;
      out[i] = from_accumulate<T, A>(static_cast<A>(value));
    }
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
