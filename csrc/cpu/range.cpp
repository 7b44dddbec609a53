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

PowerSum range_power_sum(const Range& range, double p) {
  PowerSum result{};
  dispatch_element(range.element, [&](auto type) {
    const auto* data = static_cast<const decltype(type)*>(range.data);
    const auto magnitude = [=](int64_t i) { return std::fabs(static_cast<double>(to_accumulate(data[i]))); };
    const auto sum_of = [&](auto scaled) {
      return std::isinf(p) ? largest(range.size, scaled) : plain_power_sum(range.size, p, scaled);
    };
    result = {sum_of(magnitude), 1};
    if (is_safe(result.sum)) {
      return;
    }
    const double maximum = largest(range.size, magnitude);
    if (maximum == 0 || !std::isfinite(maximum)) {
      result = {maximum, 1};
      return;
    }
    const double root = root_for(maximum, p);
    const double reciprocal = 1 / root;
    result = {sum_of([=](int64_t i) { return magnitude(i) * reciprocal * reciprocal; }), root};
  });
  return result;
}

void scale_range(const Range& from, void* to, double root, double factor) {
  dispatch_element(from.element, [&](auto type) {
    using T = decltype(type);
    using A = typename AccumulateType<T>::type;
    const T* source = static_cast<const T*>(from.data);
    T* out = static_cast<T*>(to);
    const int64_t size = from.size;
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
