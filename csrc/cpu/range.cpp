// The kernels of range.h. Sums are computed in double, where squares of float neither overflow nor underflow. A sum
// outside the safe range of double (float64 gradients, or a large p) is computed again from scaled elements. The
// compiler vectorises the loops. This file includes itself once for each instruction set.
#ifndef GRADSCALE_VARIANT
#include "range.h"

#define GRADSCALE_KERNELS "range.cpp"
#include "each_instruction_set.h"

namespace gradscale {

const PowerSumOfRange power_sum_kernel = GRADSCALE_CPU_KERNEL(range_power_sum);
const ScaleRange scale_range_kernel = GRADSCALE_CPU_KERNEL(scale_range);

} // namespace gradscale

#else
#include "vectors.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// The sum of powers of the magnitudes of `size` elements. magnitude(i, scaled) is the magnitude of element i after
// `scaled` is applied to its one (real) or two (complex) numbers; number(j) is one of the `numbers` numbers of all
// elements.
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
  // Of the numbers: the modulus of a complex number may be beyond double.
  const double maximum = largest(numbers, [=](int64_t i) { return std::fabs(number(i)); });
  if (maximum == 0 || !std::isfinite(maximum)) {
    return {maximum, 1};
  }
  const auto divided_by = [](double root) {
    return [reciprocal = 1 / root](double x) { return x * reciprocal * reciprocal; };
  };
  double root = root_for(maximum, INFINITY);
  if (p > kLargestPower && !std::isinf(p)) {
    root *= root_for(largest(size, [=](int64_t i) { return magnitude(i, divided_by(root)); }), p);
  }
  return {sum_of(divided_by(root)), root};
}

PowerSum range_power_sum(const Range& range, double p) {
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

#endif
