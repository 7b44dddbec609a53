// Sums and maxima over the lanes of a warp that own a row together: 1, 2, 4, 8, 16 or 32 neighbours. All lanes of the
// warp take part, and all lanes of a row get the result.
#pragma once

#include "rows.cuh"
#include "words.cuh"

namespace gradscale {

// Orders integers as the floats of these bits, so that one instruction reduces them. NaN of either sign comes last or
// first.
GRADSCALE_DEVICE int32_t ordered(int32_t bits) {
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// A number that all lanes hold. The compiler learns that they do, and that branches on it do not diverge.
GRADSCALE_DEVICE int32_t uniform(int32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kWholeWarp, value);
#else
  return value;
#endif
}

// Ignores NaN as far as the maximum of the other lanes does.
template <int lanes>
GRADSCALE_DEVICE float maximum_of_lanes(float value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (lanes == 32) {
    return bit_cast<float>(ordered(__reduce_max_sync(kWholeWarp, ordered(bit_cast<int32_t>(value)))));
  }
#endif
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    value = larger(value, __shfl_xor_sync(kWholeWarp, value, distance));
  }
  return value;
}

template <int lanes>
GRADSCALE_DEVICE float sum_of_lanes(float value) {
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, distance);
  }
  return value;
}

// Two sums at once: one half of the lanes adds up a, the other half b.
template <int lanes>
GRADSCALE_DEVICE void sums_of_lanes(float& a, float& b, int lane) {
  if constexpr (lanes > 1) {
    const bool upper = (lane & (lanes / 2)) != 0;
    const float own = (upper ? b : a) + __shfl_xor_sync(kWholeWarp, upper ? a : b, lanes / 2);
    const float sum = sum_of_lanes<lanes / 2>(own);
    const int first = lane & -lanes;
    a = __shfl_sync(kWholeWarp, sum, first);
    b = __shfl_sync(kWholeWarp, sum, first + lanes / 2);
  }
}

template <int lanes, int count>
GRADSCALE_DEVICE void sums_of_lanes(float (&sums)[count], int lane) {
#pragma unroll
  for (int i = 0; i + 1 < count; i += 2) {
    sums_of_lanes<lanes>(sums[i], sums[i + 1], lane);
  }
  if constexpr (count % 2 != 0) {
    sums[count - 1] = sum_of_lanes<lanes>(sums[count - 1]);
  }
}

} // namespace gradscale
