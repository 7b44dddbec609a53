// out = function(gradient, arguments ...) for every element.
//
// elementwise_dense       contiguous gradients, and arguments that are contiguous or one number. A thread computes
//                         windows of 16 bytes: the gradient is read once and the result is written once.
// elementwise_broadcast   all others. A thread computes one element, and finds its arguments by their strides.
#pragma once

#include "../cuda/rows.cuh"
#include "calls.h"

namespace gradscale {

template <class A, class Function>
GRADSCALE_DEVICE A call_function(Function function, A gradient, A first, A second) {
  if constexpr (Function::kArguments == 1) {
    return function(gradient, first);
  } else {
    return function(gradient, first, second);
  }
}

// Argument k: the constant of the call if `data` is null, and otherwise the number at `data`.
template <class A>
GRADSCALE_DEVICE A constant_argument(const ElementwiseCall& call, int k, const void* data) {
  if (data == nullptr) {
    return static_cast<A>(call.constants[k]);
  }
  return call.is_double[k] ? static_cast<A>(*static_cast<const double*>(data)) : *static_cast<const A*>(data);
}

// Reads `size` elements of argument k from element `first` on. The argument is contiguous or constant.
template <int size, class A>
GRADSCALE_DEVICE void read_argument(
    const ElementwiseCall& call, int k, int64_t begin, int32_t count, int32_t first, A* out) {
  const A* data = static_cast<const A*>(call.data[k]);
  if (data != nullptr && call.strides[k][0] != 0) {
    read_elements<size>(data + begin, count, first, A(0), out);
    return;
  }
  const A constant = constant_argument<A>(call, k, data);
#pragma unroll
  for (int i = 0; i < size; ++i) {
    out[i] = constant;
  }
}

template <class T, class Function>
GRADSCALE_KERNEL(kThreads, 2)
elementwise_dense(GRADSCALE_ARGUMENT(ElementwiseCall) call) {
  const Function function;
  using A = typename AccumulateType<T>::type;
  constexpr int size = kVector<T>;
  const int64_t begin = blockIdx.x * kElementsOfBlock;
  const int32_t count =
      static_cast<int32_t>(call.count - begin < kElementsOfBlock ? call.count - begin : kElementsOfBlock);
  const T* gradient = static_cast<const T*>(call.data[1]) + begin;
  const Windows<T> windows(gradient, count);
  for (int32_t window = threadIdx.x; window < windows.count; window += kThreads) {
    const int32_t first = windows.first(window);
    A values[size], one[size], two[size];
    read_elements<size>(gradient, count, first, A(0), values);
    read_argument<size>(call, 2, begin, count, first, one);
    if (Function::kArguments == 2) {
      read_argument<size>(call, 3, begin, count, first, two);
    }
#pragma unroll
    for (int k = 0; k < size; ++k) {
      values[k] = call_function(function, values[k], one[k], Function::kArguments == 2 ? two[k] : A(0));
    }
    write_elements<size>(static_cast<T*>(call.data[0]) + begin, count, first, values);
  }
}

template <class T, class Function>
GRADSCALE_KERNEL(kThreads, 2)
elementwise_broadcast(GRADSCALE_ARGUMENT(ElementwiseCall) call) {
  const Function function;
  using A = typename AccumulateType<T>::type;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= call.count) {
    return;
  }
  int64_t offsets[ElementwiseCall::kMaxOperands] = {};
  int64_t rest = index;
#pragma unroll
  for (int d = 0; d < ElementwiseCall::kMaxDims; ++d) {
    if (d < call.dims) {
      const int64_t at = rest % call.sizes[d];
      rest /= call.sizes[d];
#pragma unroll
      for (int k = 0; k < ElementwiseCall::kMaxOperands; ++k) {
        offsets[k] += at * call.strides[k][d];
      }
    }
  }
  const auto argument = [&](int k) {
    const char* data = static_cast<const char*>(call.data[k]);
    return constant_argument<A>(call, k, data == nullptr ? nullptr : data + offsets[k]);
  };
  const T gradient = *reinterpret_cast<const T*>(static_cast<const char*>(call.data[1]) + offsets[1]);
  const A value = call_function(
      function, static_cast<A>(to_accumulate(gradient)), argument(2), Function::kArguments == 2 ? argument(3) : A(0));
  *reinterpret_cast<T*>(static_cast<char*>(call.data[0]) + offsets[0]) = from_accumulate<T, A>(value);
}

} // namespace gradscale
