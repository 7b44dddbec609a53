// The CPU kernel of scale_gradient with a tensor, declared in calls.h. The compiler vectorises the loops over dense
// elements. This file includes itself once for each instruction set.
#ifndef GRADSCALE_VARIANT
#include "calls.h"

#define GRADSCALE_KERNELS "../flow/scale_loop.cpp"
#include "../cpu/each_instruction_set.h"

namespace gradscale {

const ScaleLoop scale_kernel = GRADSCALE_CPU_KERNEL(scale_loop);

} // namespace gradscale

#else

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

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
    using A = typename AccumulateType<T>::type;
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
