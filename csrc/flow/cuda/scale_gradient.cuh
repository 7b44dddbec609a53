// out = gradient * scale for every element.
//
// scale_dense       contiguous gradients, and a scale that is contiguous or one number. A thread computes vectors of 16
//                   bytes: the gradient is read once and the result is written once.
// scale_broadcast   all others. A thread computes one element, and finds its scale by the strides.
#pragma once

#include "../../cuda/thread_group.cuh"
#include "../kernels.h"

namespace gradscale {

template <class A>
GRADSCALE_DEVICE A read_scale(const ScaleCall& call, const void* data) {
  return call.is_double ? static_cast<A>(*static_cast<const double*>(data)) : *static_cast<const A*>(data);
}

template <class T>
GRADSCALE_KERNEL(kThreads, 2)
scale_dense(GRADSCALE_ARGUMENT(ScaleCall) call) {
  using A = Accumulate<T>;
  constexpr int size = kVector<T>;
  const int64_t begin = blockIdx.x * kElementsOfBlock;
  const int32_t count =
      static_cast<int32_t>(call.count - begin < kElementsOfBlock ? call.count - begin : kElementsOfBlock);
  const T* gradient = static_cast<const T*>(call.data[1]) + begin;
  const bool one_scale = call.strides[2][0] == 0 || call.count == 1;
  const A scale = one_scale ? read_scale<A>(call, call.data[2]) : A(0);
  const AlignedVectors<T> vectors(gradient, count);
  for (int32_t vector = threadIdx.x; vector < vectors.count; vector += kThreads) {
    const int32_t first = vectors.first(vector);
    A values[size], scales[size];
    read_elements<size>(gradient, count, first, A(0), values);
    if (one_scale) {
#pragma unroll
      for (A& each : scales) {
        each = scale;
      }
    } else {
      read_elements<size>(static_cast<const A*>(call.data[2]) + begin, count, first, A(0), scales);
    }
#pragma unroll
    for (int k = 0; k < size; ++k) {
      values[k] = scaled_element(values[k], scales[k]);
    }
    write_elements<size>(static_cast<T*>(call.data[0]) + begin, count, first, values);
  }
}

template <class T>
GRADSCALE_KERNEL(kThreads, 2)
scale_broadcast(GRADSCALE_ARGUMENT(ScaleCall) call) {
  using A = Accumulate<T>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= call.count) {
    return;
  }
  int64_t offsets[3] = {};
  int64_t rest = index;
#pragma unroll
  for (int d = 0; d < ScaleCall::kMaxDims; ++d) {
    if (d < call.dims) {
      const int64_t at = rest % call.sizes[d];
      rest /= call.sizes[d];
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        offsets[k] += at * call.strides[k][d];
      }
    }
  }
  const T gradient = *reinterpret_cast<const T*>(static_cast<const char*>(call.data[1]) + offsets[1]);
  const A scale = read_scale<A>(call, static_cast<const char*>(call.data[2]) + offsets[2]);
  const A product = scaled_element(static_cast<A>(to_accumulate(gradient)), scale);
  *reinterpret_cast<T*>(static_cast<char*>(call.data[0]) + offsets[0]) = from_accumulate<T, A>(product);
}

} // namespace gradscale
