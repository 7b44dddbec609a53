// The CPU kernels over elements, declared in calls.h. The compiler vectorises the loops over dense elements. This file
// includes itself once for each instruction set.
#ifndef GRADSCALE_VARIANT
#include "calls.h"

#define GRADSCALE_KERNELS "../flow/element_loops.cpp"
#include "../cpu/each_instruction_set.h"

namespace gradscale {

const ElementLoop multiply_kernel = GRADSCALE_CPU_KERNEL(loop<Multiply>);
const ElementLoop multiply_negated_kernel = GRADSCALE_CPU_KERNEL(loop<MultiplyNegated>);
const ElementLoop clamp_kernel = GRADSCALE_CPU_KERNEL(loop<Clamp>);

} // namespace gradscale

#else

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// The arguments of call(). Constants are read once for all elements, and Dense arguments at the index of each element.
// For other strides, element_loop() makes Constants for each element.
template <class A, int count>
struct Constants {
  A values[count];

  explicit Constants(char* const* data) {
    for (int k = 0; k < count; ++k) {
      values[k] = *reinterpret_cast<const A*>(data[k]);
    }
  }

  A get(int k, int64_t /*i*/) const {
    return values[k];
  }
};

template <class A, int count>
struct Dense {
  const A* data[count];

  explicit Dense(char* const* pointers) {
    for (int k = 0; k < count; ++k) {
      data[k] = reinterpret_cast<const A*>(pointers[k]);
    }
  }

  A get(int k, int64_t i) const {
    return data[k][i];
  }
};

template <class A, class Function, class Operands>
A call(Function function, A gradient, const Operands& arguments, int64_t i) {
  if constexpr (Function::kArguments == 1) {
    return function(gradient, arguments.get(0, i));
  } else {
    return function(gradient, arguments.get(0, i), arguments.get(1, i));
  }
}

template <class T, class A, class Function, class Operands>
void dense_loop(char* const* data, int64_t size, Function function, const Operands arguments) {
  T* out = reinterpret_cast<T*>(data[0]);
  const T* gradient = reinterpret_cast<const T*>(data[1]);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    out[i] = from_accumulate<T, A>(call(function, static_cast<A>(to_accumulate(gradient[i])), arguments, i));
  }
}

template <class T, class A, class Function>
void element_loop(char* const* data, const int64_t* strides, int64_t size, Function function) {
  constexpr int count = Function::kArguments;
  bool dense = strides[0] == sizeof(T) && strides[1] == sizeof(T);
  bool constant = dense;
  for (int k = 2; k < 2 + count; ++k) {
    constant = constant && strides[k] == 0;
    dense = dense && strides[k] == sizeof(A);
  }
  if (constant) {
    dense_loop<T, A>(data, size, function, Constants<A, count>(data + 2));
  } else if (dense) {
    dense_loop<T, A>(data, size, function, Dense<A, count>(data + 2));
  } else {
    char* at[2 + count];
    for (int64_t i = 0; i < size; ++i) {
      for (int k = 0; k < 2 + count; ++k) {
        at[k] = data[k] + i * strides[k];
      }
      dense_loop<T, A>(at, 1, function, Constants<A, count>(at + 2));
    }
  }
}

template <template <class> class Function>
void loop(Element element, char* const* data, const int64_t* strides, int64_t size) {
  dispatch_element(element, [&](auto type) {
    using T = decltype(type);
    using A = typename AccumulateType<T>::type;
    element_loop<T, A>(data, strides, size, Function<A>());
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
