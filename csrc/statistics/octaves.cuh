// A histogram of octaves in shared memory: how many elements there are of each exponent of float.
#pragma once

#include "../cuda/windows.cuh"
#include "../formulas/statistics.h"

namespace gradscale {

// Each lane has counters of its own, in a bank of its own, so that the lanes of a warp never wait for each other,
// however alike their elements are; warps share them. Counters are whole numbers: the order of additions is nothing.
struct OctaveCounters {
  static constexpr int kExponents = 256; // the last one is the exponent of inf and NaN
  static constexpr int kCount = 32 * kExponents;
  static constexpr int32_t kBias = Magnitude<float>::kBias;

  struct alignas(16) Four {
    uint32_t counts[4];
  };

  unsigned* counters; // [kExponents, 32]
  int* ends;          // the first bin and the last one, which have many exponents
  SharedAddress own;  // the first counter of this lane

  // Clears the counters; the block must meet before it counts.
  GRADSCALE_DEVICE OctaveCounters(Four* shared, int* shared_ends)
      : counters(reinterpret_cast<unsigned*>(shared)),
        ends(shared_ends),
        own(shared_address(counters + threadIdx.x % 32)) {
    for (int i = threadIdx.x; i < kCount / 4; i += kThreads) {
      shared[i] = {};
    }
    if (threadIdx.x < 2) {
      ends[threadIdx.x] = 0;
    }
  }
  // Counts a number; zeros have the exponent 0 too.
  GRADSCALE_DEVICE void count(float number) const {
    const uint32_t exponent = bit_cast<uint32_t>(number) & 0x7f800000;
    count_one(own + (exponent >> 16)); // 32 counters of 4 bytes for each exponent
  }
  template <class T>
  GRADSCALE_DEVICE void count(const Window<T>& window) const {
#pragma unroll
    for (int k = 0; k < Window<T>::kSize; ++k) {
      count(window[k]);
    }
  }
  // Counts a number by its bin.
  GRADSCALE_DEVICE void count_bin(int32_t bin) const {
    count(bit_cast<float>((bin + kFirstEdge - 1 + kBias) << Magnitude<float>::kFractionBits));
  }
  // The number of elements of one exponent. Threads begin in different columns, and so in different banks.
  GRADSCALE_DEVICE int32_t total(int exponent) const {
    const Four* const row = reinterpret_cast<const Four*>(counters) + 8 * exponent;
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Four four = row[(threadIdx.x + i) % 8];
      sum += four.counts[0] + four.counts[1] + (four.counts[2] + four.counts[3]);
    }
    return static_cast<int32_t>(sum);
  }
  // Stores the bins, when all threads have counted and met. `zeros` of the numbers that have been counted were zeros,
  // which are in no bin; the first thread knows how many.
  GRADSCALE_DEVICE void store(int32_t* histogram, int32_t zeros) const {
    for (int exponent = threadIdx.x; exponent < kExponents - 1; exponent += kThreads) {
      const int32_t count = total(exponent);
      const int32_t bin = bin_of_exponent(exponent - kBias);
      if (bin > 0 && bin < kHistogramBins - 1) {
        histogram[bin] = count;
      } else if (count != 0) {
        atomicAdd(ends + (bin != 0), count);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      histogram[0] = ends[0] - zeros;
      histogram[kHistogramBins - 1] = ends[1];
    }
  }
};

} // namespace gradscale
