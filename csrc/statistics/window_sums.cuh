// The sums of gradient statistics for elements narrower than double and norms of order 2 or inf. A window of 16 bytes
// is summed in float, and the sums of windows are added in double. Where float would lose precision, or an element is
// not finite, the warp computes the sums of its windows again, element by element in double, where no sum of squares of
// such elements overflows or underflows.
#pragma once

#include "../cuda/norms.cuh"
#include "../formulas/statistics.h"

namespace gradscale {

// ---- Octaves --------------------------------------------------------------------------------------------------------

// A histogram of octaves in shared memory: how many elements there are of each exponent of float.

// Each lane has counters of its own, in a bank of its own, so that the lanes of a warp never wait for each other,
// however alike their elements are. The warps share the counters. Counters are integers, so that the order of additions
// does not matter.
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

  // Clears the counters. Call __syncthreads() before counting.
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
  // Counts a number. Zeros and subnormal numbers have the exponent 0.
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
  // Stores the bins. Call __syncthreads() after counting. `zeros` is the number of zeros that were counted, which are
  // in no bin; only the first thread's value is used.
  GRADSCALE_DEVICE void store(int32_t* histogram, int32_t zeros) const {
    for (int exponent = threadIdx.x; exponent < kExponents - 1; exponent += kThreads) {
      const int32_t count = total(exponent);
      const int32_t bin = exponent_bin(exponent - kBias);
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

// ---- Sums -----------------------------------------------------------------------------------------------------------

// Sums over elements: powers, sum and largest magnitude of the finite ones.
struct ChunkSums {
  double powers;
  double sum;
  double largest;
  int32_t zeros;
  int32_t nans;
  int32_t infs;
};

// The smallest and the largest magnitude of windows. NaN is passed over, or is treated as some number.
template <class T>
struct Extremes {
  uint32_t least = 0xffffffffu; // two numbers
  uint32_t most = 0;

  GRADSCALE_DEVICE void add(const Window<T>& window) {
#pragma unroll
    for (const uint32_t word : window.words) {
      const uint32_t magnitudes = word & 0x7fff7fffu;
      least = smaller_pair(T(), least, magnitudes);
      most = larger_pair(T(), most, magnitudes);
    }
  }
  GRADSCALE_DEVICE bool has_zero() const {
    return (least & 0xffff) == 0 || least >> 16 == 0;
  }
  GRADSCALE_DEVICE float largest() const {
    const Window<T> window{most};
    return larger(window[0], window[1]);
  }
};

template <>
struct Extremes<float> {
  float least = INFINITY;
  float most = 0;

  GRADSCALE_DEVICE void add(const Window<float>& window) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      least = std::fmin(least, std::abs(window[k]));
      most = larger(most, std::abs(window[k]));
    }
  }
  GRADSCALE_DEVICE bool has_zero() const {
    return least == 0;
  }
  GRADSCALE_DEVICE float largest() const {
    return most;
  }
};

constexpr int kWindowsAtOnce = 8; // of a thread: 128 bytes of loads are issued before the first is used

// The sums of a thread of a warp.
template <class T>
struct WindowSums {
  double squares = 0;
  double sum = 0;
  float largest = 0;
  int32_t zeros = 0;
  int32_t nans = 0;
  int32_t infs = 0;

  // All threads of the warp add their windows and count their octaves. Returns false if the windows were not added,
  // because float would lose precision or an element is not finite; their octaves are counted then too.
  GRADSCALE_DEVICE bool add(const Window<T> (&windows)[kWindowsAtOnce], const OctaveCounters& octaves) {
    WindowSums next = *this;
    Extremes<T> extremes;
    float all_squares = 0;
#pragma unroll
    for (const Window<T>& window : windows) {
      const float squares = window.squares();
      all_squares += squares;
      next.squares += static_cast<double>(squares);
      next.sum += static_cast<double>(window.sum());
      extremes.add(window);
      octaves.count(window);
    }
    const float most = extremes.largest();
    next.largest = larger(next.largest, most);
    const bool safe = is_safe_in_float(all_squares);
    if (!__all_sync(kWholeWarp, safe && !extremes.has_zero())) {
      if (!__all_sync(kWholeWarp, safe || (all_squares == 0 && most == 0))) {
        return false;
      }
#pragma unroll
      for (const Window<T>& window : windows) {
        next.zeros += window.zeros();
      }
    }
    *this = next;
    return true;
  }
  // Adds a window element by element in double.
  GRADSCALE_DEVICE void add_each(const Window<T>& window) {
    using M = Magnitude<float>;
#pragma unroll
    for (int k = 0; k < Window<T>::kSize; ++k) {
      const M::Bits bits = M::bits(window[k]);
      zeros += bits == 0;
      nans += bits > M::kInfinity;
      infs += bits == M::kInfinity;
      const float finite = bits < M::kInfinity ? window[k] : 0;
      const auto number = static_cast<double>(finite);
      squares += number * number;
      sum += number;
      largest = larger(largest, std::abs(finite));
    }
  }
};

// Sums this thread's windows of a chunk, and counts their octaves. The windows are distributed over the warps of the
// block. Each lane has the same number of windows. Those beyond the chunk are zeros, which octaves.count() counts too.
template <class T>
GRADSCALE_DEVICE ChunkSums window_sums(const T* data, int32_t size, const OctaveCounters& octaves) {
  constexpr int32_t kOfWarp = 32 * kWindowsAtOnce;
  const Windows<T> windows(data, size);
  const int32_t lane = threadIdx.x % 32;
  WindowSums<T> own;
  for (int32_t begin = threadIdx.x / 32 * kOfWarp; begin < windows.count; begin += kWarps * kOfWarp) {
    const int32_t first = windows.first(begin);
    const bool whole = first >= 0 && first + kOfWarp * Window<T>::kSize <= size; // the same for all of the warp
    bool added = false;
    if (whole) {
      const T* const own_data = data + first + lane * Window<T>::kSize;
      Window<T> now[kWindowsAtOnce];
#pragma unroll
      for (int c = 0; c < kWindowsAtOnce; ++c) {
        now[c] = read16<Window<T>>(own_data + 32 * c * Window<T>::kSize);
      }
      added = own.add(now, octaves);
    }
#pragma unroll 1
    for (int c = added ? kWindowsAtOnce : 0; c < kWindowsAtOnce; ++c) { // read again, because registers are few
      const Window<T> window = read_window(data, size, windows.first(begin + 32 * c + lane));
      if (!whole) {
        octaves.count(window);
      }
      own.add_each(window);
    }
  }
  return {own.squares, own.sum, static_cast<double>(own.largest), own.zeros, own.nans, own.infs};
}

// The number of zeros beyond a chunk that window_sums() counts.
template <class T>
GRADSCALE_DEVICE int32_t zeros_beside(const T* data, int32_t size) {
  constexpr int32_t kOfWarp = 32 * kWindowsAtOnce;
  const int32_t count = (Windows<T>(data, size).count + kOfWarp - 1) / kOfWarp * kOfWarp;
  return count * Window<T>::kSize - size;
}

} // namespace gradscale
