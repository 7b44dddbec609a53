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
const ScaleLoop scale_kernel = GRADSCALE_CPU_KERNEL(scale_loop);

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

void scale_range(const Range& from, void* to, const Scaling& by) {
  const int64_t bytes = from.size * element_size(from.element);
  if (by.root == 0) {
    std::memset(to, 0, bytes);
    return;
  }
  if (by.changes_nothing()) {
    if (to != from.data) {
      std::memcpy(to, from.data, bytes);
    }
    return;
  }
  dispatch_element(from.element, [&](auto type) {
    using T = decltype(type);
    using A = Accumulate<T>;
    const T* source = static_cast<const T*>(from.data);
    T* out = static_cast<T*>(to);
    const int64_t size = from.size;
    if (by.is_normal_in_float()) {
      const A narrow = static_cast<A>(by.factor);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        out[i] = from_accumulate<T, A>(static_cast<A>(to_accumulate(source[i])) * narrow);
      }
      return;
    }
    const double factor = by.factor;
    const double reciprocal = 1 / by.root;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const double value = static_cast<double>(to_accumulate(source[i])) * reciprocal * reciprocal * factor;
      out[i] = from_accumulate<T, A>(static_cast<A>(value));
    }
  });
}

// The scale of element i is scale(i).
template <class T, class A, class Scale>
void dense_loop(char* to, const char* from, int64_t size, Scale scale) {
  T* out = reinterpret_cast<T*>(to);
  const T* gradient = reinterpret_cast<const T*>(from);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    out[i] = from_accumulate<T, A>(scaled_element(static_cast<A>(to_accumulate(gradient[i])), scale(i)));
  }
}

void scale_loop(Element element, char* const* data, const int64_t* strides, int64_t size) {
  dispatch_element(element, [&](auto type) {
    using T = decltype(type);
    using A = Accumulate<T>;
    const bool dense = strides[0] == sizeof(T) && strides[1] == sizeof(T);
    const A* scales = reinterpret_cast<const A*>(data[2]);
    if (dense && strides[2] == 0) {
      dense_loop<T, A>(data[0], data[1], size, [scale = *scales](int64_t) { return scale; });
    } else if (dense && strides[2] == sizeof(A)) {
      dense_loop<T, A>(data[0], data[1], size, [=](int64_t i) { return scales[i]; });
    } else {
      for (int64_t i = 0; i < size; ++i) {
        const A scale = *reinterpret_cast<const A*>(data[2] + i * strides[2]);
        dense_loop<T, A>(data[0] + i * strides[0], data[1] + i * strides[1], 1, [=](int64_t) { return scale; });
      }
    }
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
