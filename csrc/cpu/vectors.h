// Vectors of the instruction set, with the operators of C++. Included once for each instruction set.
#include "scratch.h"

#include <utility>

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// A vector of A, and vectors of integers of the same size. Comparisons give Integers, 0 or -1.
template <class A>
struct Vectors {
  static constexpr int kBytes = GRADSCALE_VECTOR_BYTES;
  static constexpr int kCount = kBytes / static_cast<int>(sizeof(A));
  using Integer = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
  typedef A V __attribute__((vector_size(kBytes)));
  typedef Integer Integers __attribute__((vector_size(kBytes)));
  typedef std::make_unsigned_t<Integer> Bits __attribute__((vector_size(kBytes)));
  typedef uint8_t Bytes __attribute__((vector_size(kCount)));
  typedef A InMemory __attribute__((vector_size(kBytes), aligned(sizeof(A)), may_alias));
};

template <class To, class From>
GRADSCALE_HOST_DEVICE To converted(From x) {
  return __builtin_convertvector(x, To);
}

// Reinterprets the bits of a vector as another type.
template <class To, class From>
GRADSCALE_HOST_DEVICE To reinterpreted(From x) {
  return (To)x;
}

template <class A>
GRADSCALE_HOST_DEVICE typename Vectors<A>::V load_vector(const A* from) {
  return *reinterpret_cast<const typename Vectors<A>::InMemory*>(from);
}

template <class A>
GRADSCALE_HOST_DEVICE void store_vector(A* to, typename Vectors<A>::V x) {
  *reinterpret_cast<typename Vectors<A>::InMemory*>(to) = x;
}

// x in all lanes.
template <class A>
GRADSCALE_HOST_DEVICE typename Vectors<A>::V splat(A x) {
  return x - typename Vectors<A>::V{};
}

// Lane i of the result is lane index[i] of x followed by y.
template <class V, size_t... index>
GRADSCALE_HOST_DEVICE V shuffled(V x, V y, std::index_sequence<index...> /*indices*/) {
#if defined(__clang__)
  return __builtin_shufflevector(x, y, static_cast<int>(index)...);
#else
  using Integer = std::conditional_t<sizeof(x[0]) == 8, int64_t, int32_t>;
  typedef Integer Indices __attribute__((vector_size(sizeof(V))));
  return __builtin_shuffle(x, y, Indices{static_cast<Integer>(index)...});
#endif
}

// Loads one byte per lane and extends it with zeros: one instruction, which compilers do not generate themselves.
template <class A, class M = typename Vectors<A>::Integers>
GRADSCALE_HOST_DEVICE M widened(const uint8_t* from) {
  constexpr int lanes = Vectors<A>::kCount;
#if GRADSCALE_VECTOR_BYTES == 64
  if constexpr (lanes == 16) {
    return (M)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  } else {
    return (M)_mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
#elif GRADSCALE_VECTOR_BYTES == 32
  if constexpr (lanes == 8) {
    return (M)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  } else {
    int32_t bytes;
    memcpy(&bytes, from, sizeof(bytes));
    return (M)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
  }
#else
  typename Vectors<A>::Bytes bytes;
  memcpy(&bytes, from, lanes);
  return converted<M>(bytes);
#endif
}

// ---- Sums -----------------------------------------------------------------------------------------------------------

// One partial sum per lane. Loops over lanes vectorise for every instruction set, and the order of additions is the
// same for all of them.
template <class A>
struct LaneSum {
  alignas(64) A lanes[kLanes] = {};

  // Adds pairwise: for a short row, a chain of 16 dependent additions would take longer than all other work.
  A total() const {
    A sums[8];
    for (int k = 0; k < 8; ++k) {
      sums[k] = lanes[k] + lanes[k + 8];
    }
    for (int k = 0; k < 4; ++k) {
      sums[k] += sums[k + 4];
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
  }
};

template <class Power>
double lane_sum(int64_t size, Power power) {
  constexpr int kSums = 4; // independent, because an addition takes several cycles
  LaneSum<double> sums[kSums];
  int64_t i = 0;
  for (; i + kSums * kLanes <= size; i += kSums * kLanes) {
    for (int s = 0; s < kSums; ++s) {
#pragma omp simd
      for (int k = 0; k < kLanes; ++k) {
        sums[s].lanes[k] += power(i + s * kLanes + k);
      }
    }
  }
  for (; i + kLanes <= size; i += kLanes) {
#pragma omp simd
    for (int k = 0; k < kLanes; ++k) {
      sums[0].lanes[k] += power(i + k);
    }
  }
  for (int k = 0; i < size; ++i, ++k) {
    sums[1].lanes[k] += power(i);
  }
  return (sums[0].total() + sums[1].total()) + (sums[2].total() + sums[3].total());
}

// The largest magnitude, or NaN if a magnitude is NaN.
template <class Magnitude>
double largest(int64_t size, Magnitude magnitude) {
  double maximum = 0;
  int unordered = 0;
#pragma omp simd reduction(max : maximum) reduction(| : unordered)
  for (int64_t i = 0; i < size; ++i) {
    const double value = magnitude(i);
    maximum = value > maximum ? value : maximum;
    unordered |= value != value;
  }
  return unordered ? static_cast<double>(NAN) : maximum;
}

template <class Magnitude>
double plain_power_sum(int64_t size, double p, Magnitude magnitude) {
  if (p == 1) {
    return lane_sum(size, magnitude);
  }
  if (p == 2) {
    return lane_sum(size, [=](int64_t i) { return magnitude(i) * magnitude(i); });
  }
  return lane_sum(size, [=](int64_t i) { return std::pow(magnitude(i), p); });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
