// Computes the statistics of a range of elements in one pass, with explicit vectors, because compilers do not vectorise
// a plain loop. This file includes itself once for each instruction set.
#ifndef GRADSCALE_VARIANT
#include "../kernels.h"

#include <algorithm>

#define GRADSCALE_KERNELS "../statistics/cpu/statistics.cpp"
#include "../../cpu/each_instruction_set.h"

namespace gradscale {

const StatisticsOfRange statistics_kernel = GRADSCALE_CPU_KERNEL(range_statistics);

} // namespace gradscale

#else
#include "../../cpu/lanes.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

using DoubleLanes = Vectors<double>::V;

template <class V>
GRADSCALE_HOST_DEVICE V larger_of(V a, V b) {
  return a > b ? a : b;
}

GRADSCALE_HOST_DEVICE double total_of(DoubleLanes x) {
  double total = 0;
  for (int k = 0; k < Vectors<double>::kCount; ++k) {
    total += x[k];
  }
  return total;
}

GRADSCALE_HOST_DEVICE DoubleLanes as_double(const float* from) {
#if GRADSCALE_VECTOR_BYTES == 64 // compilers convert in two steps
  return _mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif GRADSCALE_VECTOR_BYTES == 32
  return _mm256_cvtps_pd(_mm_loadu_ps(from));
#else
  typedef float Half __attribute__((vector_size(sizeof(DoubleLanes) / 2), aligned(sizeof(float)), may_alias));
  return converted<DoubleLanes>(*reinterpret_cast<const Half*>(from));
#endif
}

// Converts a vector to double, and calls function for each resulting vector. `from` is where the elements are stored.
template <class T, class Function>
GRADSCALE_HOST_DEVICE void each_double(Vectors<double>::V x, const T* /*from*/, Function function) {
  function(x);
}

template <class T, class Function>
GRADSCALE_HOST_DEVICE void each_double(Vectors<float>::V x, const T* from, Function function) {
  constexpr int half = Vectors<double>::kCount;
  if constexpr (std::is_same_v<T, float>) { // loads again from memory, which needs no shuffle
    function(as_double(from));
    function(as_double(from + half));
  } else {
    float numbers[2 * half];
    store_vector(numbers, x);
    function(as_double(numbers));
    function(as_double(numbers + half));
  }
}

// Sums over elements, some of which may be NaN or inf.
template <class A>
struct PlainSums {
  A largest = 0; // the largest magnitude that is not NaN
  int32_t zeros = 0;
  double sum = 0;
  double squares = 0; // NaN if an element is NaN

  bool are_finite() const {
    return largest < std::numeric_limits<A>::infinity() && squares == squares;
  }
  // True if these sums are the results for a norm of order p: no square overflowed or underflowed.
  bool suffice(double p) const {
    return largest == 0 || (p == 2 && is_safe(squares));
  }
};

constexpr int64_t kStep = GRADSCALE_VECTOR_BYTES; // elements: four vectors of float, or eight of double

// Adds `size` elements, a multiple of kStep. Prefetches as many elements from `next`.
template <class T, class A = Accumulate<T> >
void add_steps(const T* x, int64_t size, const T* next, PlainSums<A>& all) {
  using V = typename Vectors<A>::V;
  using Integers = typename Vectors<A>::Integers;
  constexpr int count = Vectors<A>::kCount;
  V largest{};
  Integers zeros{};
  DoubleLanes sums[2] = {}, squares[2] = {}; // two each, because an addition takes several cycles
  for (int64_t i = 0; i < size; i += kStep) {
#pragma GCC unroll 8
    for (int k = 0; k < static_cast<int>(sizeof(A)); ++k) {
      const T* from = x + i + k * count;
      // Prefetch into the second-level cache, and later into the first: loads that wait for memory would block others.
      // Prefetching past the end is harmless.
      const auto address = reinterpret_cast<uintptr_t>(from);
      __builtin_prefetch(reinterpret_cast<const void*>(address + 1536 * sizeof(T)), 0, 1);
      __builtin_prefetch(reinterpret_cast<const void*>(address + 256 * sizeof(T)), 0, 3);
      __builtin_prefetch(next + (from - x), 0, 2);
      const V elements = load_part(from);
      const V magnitudes = reinterpreted<V>(reinterpreted<Integers>(elements) & Magnitude<A>::kMagnitudeMask);
      largest = larger_of(magnitudes, largest);
      zeros -= elements == V{};
      int lane = k % 2;
      each_double(elements, from, [&](DoubleLanes wide) {
        sums[lane] += wide;
        squares[lane] += wide * wide;
        lane = 1 - lane;
      });
    }
  }
  for (int k = 0; k < count; ++k) {
    all.largest = larger_of<A>(largest[k], all.largest);
    all.zeros += static_cast<int32_t>(zeros[k]);
  }
  all.sum += total_of(sums[0] + sums[1]);
  all.squares += total_of(squares[0] + squares[1]);
}

template <class T, class A = Accumulate<T> >
PlainSums<A> plain_sums(const T* x, int64_t size, const T* next) {
  PlainSums<A> result;
  const int64_t whole = size / kStep * kStep;
  add_steps(x, whole, next, result);
  if (whole < size) {
    T filled[kStep] = {};
    std::copy(x + whole, x + size, filled);
    add_steps(filled, kStep, filled, result);
    result.zeros -= static_cast<int32_t>(whole + kStep - size);
  }
  return result;
}

// The sums if PlainSums do not suffice. `maximum` is the largest magnitude, which is finite and not 0.
template <class W>
ElementSums element_sums(const W* x, int64_t size, double p, double maximum, double sum) {
  const auto number = [=](int64_t i) { return static_cast<double>(x[i]); };
  const auto magnitude = [=](int64_t i) { return std::fabs(static_cast<double>(x[i])); };
  const double powers = std::isinf(p) ? maximum : plain_power_sum(size, p, magnitude);
  if (is_safe(powers)) {
    return {powers, sum, maximum, 1};
  }
  const double root = root_for(maximum, p);
  const double reciprocal = 1 / root;
  const auto scaled = [=](int64_t i) { return number(i) * reciprocal * reciprocal; };
  const double again = std::isinf(p) ? maximum * reciprocal * reciprocal
                                     : plain_power_sum(size, p, [=](int64_t i) { return std::fabs(scaled(i)); });
  return {again, lane_sum(size, scaled), maximum, root};
}

// Replaces NaN and inf with zeros, and counts them.
template <class W>
void leave_out_nonfinite(const W* from, int64_t size, W* to, ChunkStatistics& all) {
  using M = Magnitude<W>;
  int32_t nans = 0;
  int32_t infs = 0;
  for (int64_t i = 0; i < size; ++i) {
    const typename M::Bits bits = M::bits(from[i]);
    nans += bits > M::kInfinity;
    infs += bits == M::kInfinity;
    to[i] = bits < M::kInfinity ? from[i] : W(0);
  }
  all.nans = nans;
  all.infs = infs;
}

template <class A>
ElementSums sums_of(const PlainSums<A>& plain) {
  return {plain.squares, plain.sum, static_cast<double>(plain.largest), 1};
}

// Statistics of numbers in the type of sums. `spare` is memory for as many.
template <class A>
ChunkStatistics statistics_of(const A* x, int64_t size, double p, const A* next, A* spare) {
  ChunkStatistics all{no_elements(), 0, 0, 0};
  PlainSums<A> plain = plain_sums(x, size, next);
  if (!plain.are_finite()) {
    leave_out_nonfinite(x, size, spare, all);
    x = spare;
    plain = plain_sums(x, size, next);
  }
  all.zeros = plain.zeros - all.nans - all.infs;
  all.sums =
      plain.suffice(p) ? sums_of(plain) : element_sums(x, size, p, static_cast<double>(plain.largest), plain.sum);
  return all;
}

void range_statistics(const Range& range, double p, const void* next, ChunkStatistics& all) {
  dispatch_element(range.element, [&](auto type) {
    using T = decltype(type);
    using A = Accumulate<T>;
    const T* data = static_cast<const T*>(range.data);
    alignas(64) A numbers[kChunk];
    if constexpr (std::is_same_v<T, A>) {
      all = statistics_of(data, range.size, p, static_cast<const T*>(next), numbers);
      return;
    } else if (GRADSCALE_VECTOR_BYTES > 16 && p == 2) { // 16-bit elements are converted by vector instructions
      const PlainSums<A> plain = plain_sums(data, range.size, static_cast<const T*>(next));
      if (plain.are_finite() && plain.suffice(p)) {
        all = {sums_of(plain), plain.zeros, 0, 0};
        return;
      }
    }
#pragma omp simd
    for (int64_t i = 0; i < range.size; ++i) {
      numbers[i] = to_accumulate(data[i]);
    }
    all = statistics_of<A>(numbers, range.size, p, numbers, numbers);
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
