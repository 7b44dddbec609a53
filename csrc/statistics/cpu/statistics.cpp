// Computes the statistics of a range of elements in one pass, with explicit vectors, because compilers do not vectorise
// a plain loop. BinCounter counts the elements of sixteen neighbouring bins, a vector at a time; elements in other bins
// are counted one by one. This file includes itself once for each instruction set.
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
#include "bin_counter.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

constexpr int64_t kStatisticsBlock = 255 * kElementsPerStep; // elements; a step adds at most 1 to each byte counter

// Statistics of the elements of a slice.
template <class A>
struct SliceStatistics {
  A largest = 0;     // the largest magnitude that is not NaN
  int32_t zeros = 0; // also counted in the first bin
  double sum = 0;
  double squares = 0; // NaN if an element is NaN
  int32_t histogram[kHistogramBins] = {};

  bool is_finite() const {
    return largest < std::numeric_limits<A>::infinity() && squares == squares;
  }
};

int first_bin_below(int highest) { // leaves room for one bin above `highest`
  return std::max(0, highest - (kCountedBins - 2));
}

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

// The bins of magnitudes, one byte each, in any order: the bytes of a word come from different vectors.
GRADSCALE_HOST_DEVICE ByteLanes bins_of(const Vectors<float>::Bits (&magnitudes)[4]) {
  constexpr int kBelow = Magnitude<float>::kBias + kFirstEdge - 1; // the largest biased exponent in the first bin
  const Vectors<float>::Bits words = (magnitudes[0] >> 23) | (magnitudes[1] >> 15 & 0xff00u) |
                                     (magnitudes[2] >> 7 & 0xff0000u) | (magnitudes[3] << 1 & 0xff000000u);
  const auto exponents = reinterpreted<ByteLanes>(words);
  const ByteLanes below = splat(static_cast<uint8_t>(kBelow)), last = splat(static_cast<uint8_t>(kHistogramBins - 1));
  const ByteLanes bins = larger_of(exponents, below) - below;
  return bins < last ? bins : last;
}

GRADSCALE_HOST_DEVICE ByteLanes bins_of(const Vectors<double>::Bits (&magnitudes)[8]) {
  using Integers = Vectors<float>::Integers;
  constexpr int32_t kBelow = Magnitude<double>::kBias + kFirstEdge - 1;
  const Integers zero{}, last = zero + (kHistogramBins - 1);
  Integers words{};
  for (int k = 0; k < 4; ++k) { // two exponents per word
    const auto exponents = reinterpreted<Integers>((magnitudes[2 * k] >> 52) | (magnitudes[2 * k + 1] >> 52 << 32));
    const Integers bins = larger_of(exponents - kBelow, zero);
    words |= (bins < last ? bins : last) << (8 * k);
  }
  return reinterpreted<ByteLanes>(words);
}

// ---- Statistics of a slice ------------------------------------------------------------------------------------------

template <class T>
int32_t count_zeros(const T* x, int64_t size) {
  using A = Accumulate<T>;
  typename Vectors<A>::Integers zeros{};
#pragma GCC unroll 4
  for (int64_t i = 0; i < size; i += Vectors<A>::kCount) {
    zeros -= load_part(x + i) == typename Vectors<A>::V{};
  }
  int32_t total = 0;
  for (int k = 0; k < Vectors<A>::kCount; ++k) {
    total += static_cast<int32_t>(zeros[k]);
  }
  return total;
}

// Adds `size` elements, a multiple of kElementsPerStep. This is fast if most elements are in the 16 bins that begin at
// first_bin, or in bin 0, which counts the zeros.
template <class T, class A = Accumulate<T> >
void add_lanes(const T* x, int64_t size, int first_bin, const T* next, SliceStatistics<A>& all) {
  using V = typename Vectors<A>::V;
  using Integers = typename Vectors<A>::Integers;
  using Bits = typename Vectors<A>::Bits;
  constexpr int count = Vectors<A>::kCount;
  // Four histograms in turn, so that additions to the same bin do not wait for each other. The last bin is ignored.
  int32_t others[4][kHistogramBins + 1] = {};
  const ByteLanes first = splat(static_cast<uint8_t>(first_bin));
  ByteLanes lowest{};
  bool has_others = false;
  V largest{};
  DoubleLanes sums[2] = {}, squares[2] = {};
  BinCounter counter;
  for (int64_t i = 0; i < size; i += kElementsPerStep) {
    Bits magnitudes[sizeof(A)];
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
      magnitudes[k] = reinterpreted<Bits>(reinterpreted<Integers>(elements) & Magnitude<A>::kMagnitudeMask);
      largest = larger_of(reinterpreted<V>(magnitudes[k]), largest);
      int lane = k % 2;
      each_double(elements, from, [&](DoubleLanes wide) {
        sums[lane] += wide;
        squares[lane] += wide * wide;
        lane = 1 - lane;
      });
    }
    const ByteLanes bins = bins_of(magnitudes);
    const ByteLanes other = counter.add(bins - first);
    if (highest_bits(other) != 0) {
      const ByteLanes outside = reinterpreted<ByteLanes>(other >= 128), low = reinterpreted<ByteLanes>(bins == 0);
      lowest -= outside & low;
      const ByteLanes rest = outside & ~low; // 255 or 0 in each byte
      if (highest_bits(rest) != 0) {
        has_others = true;
        uint8_t bytes[kElementsPerStep];
        store_vector(bytes, (bins & rest) | (static_cast<uint8_t>(kHistogramBins) & ~rest));
#pragma GCC unroll 8
        for (int k = 0; k < kElementsPerStep; ++k) {
          ++others[k % 4][bytes[k]];
        }
      }
    }
  }
  for (int k = 0; k < count; ++k) {
    all.largest = larger_of<A>(largest[k], all.largest);
  }
  if (has_others) {
    for (int bin = 0; bin < kHistogramBins; ++bin) {
      all.histogram[bin] += others[0][bin] + others[1][bin] + (others[2][bin] + others[3][bin]);
    }
  }
  int32_t counted[kHistogramBins + kCountedBins] = {}; // the last ones are ignored
  counter.add_to(counted + first_bin);
  for (int bin = 0; bin < kHistogramBins; ++bin) {
    all.histogram[bin] += counted[bin];
  }
  all.histogram[0] += total_of(lowest);
  all.zeros += all.histogram[0] > 0 ? count_zeros(x, size) : 0;
  all.sum += total_of(sums[0] + sums[1]);
  all.squares += total_of(squares[0] + squares[1]);
}

// Guesses the first bin for BinCounter from the first elements that are not zeros.
template <class T>
int probable_first_bin(const T* x, int64_t size) {
  using M = Magnitude<Accumulate<T> >;
  typename M::Bits largest = 0;
  for (int64_t begin = 0; begin < size && largest == 0; begin += 32) {
    for (int64_t i = begin; i < std::min<int64_t>(size, begin + 32); ++i) {
      largest = std::max(largest, M::bits(to_accumulate(x[i])));
    }
  }
  return first_bin_below(M::bin(largest));
}

// `first_bin` is the first bin for BinCounter, or -1 to guess it; it is updated for the next slice. `next` is memory to
// prefetch.
template <class T, class A = Accumulate<T> >
SliceStatistics<A> slice_statistics(const T* x, int64_t size, int& first_bin, const T* next) {
  SliceStatistics<A> result;
  first_bin = first_bin < 0 ? probable_first_bin(x, size) : first_bin;
  const int64_t whole = size / kElementsPerStep * kElementsPerStep;
  add_lanes(x, whole, first_bin, next, result);
  if (whole < size) {
    T filled[kElementsPerStep] = {}; // padded with zeros, which are subtracted below
    std::copy(x + whole, x + size, filled);
    add_lanes(filled, kElementsPerStep, first_bin, next + whole, result);
    result.zeros -= static_cast<int32_t>(whole + kElementsPerStep - size);
    result.histogram[0] -= static_cast<int32_t>(whole + kElementsPerStep - size);
  }
  first_bin = result.largest > 0 && result.is_finite()
                  ? first_bin_below(Magnitude<A>::bin(Magnitude<A>::bits(result.largest)))
                  : -1;
  return result;
}

// Computes the sums of a slice if SliceStatistics does not have them: p is not 2, or the squares are outside the safe
// range of double. `maximum` is the largest magnitude, which is finite.
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
  all.nans += nans;
  all.infs += infs;
}

template <class A>
void add_statistics(const SliceStatistics<A>& slice, ElementSums sums, double p, ChunkStatistics& all) {
  all.zeros += slice.zeros;
  for (int bin = 0; bin < kHistogramBins; ++bin) {
    all.histogram[bin] += slice.histogram[bin];
  }
  all.histogram[0] -= slice.zeros; // slice_statistics() counts zeros as the smallest numbers
  if (slice.largest > 0) {
    all.sums = added(all.sums, sums, p);
  }
}

template <class A>
void add_slice(const A* x, int64_t size, double p, int& first_bin, const A* next, A* spare, ChunkStatistics& all) {
  SliceStatistics<A> slice = slice_statistics(x, size, first_bin, next);
  if (!slice.is_finite()) {
    const int32_t before = all.nans + all.infs;
    leave_out_nonfinite(x, size, spare, all);
    x = spare;
    slice = slice_statistics(x, size, first_bin, next);
    all.zeros -= all.nans + all.infs - before;
  }
  const auto maximum = static_cast<double>(slice.largest);
  const bool plain = (p == 2 && is_safe(slice.squares)) || maximum == 0;
  add_statistics(
      slice,
      plain ? ElementSums{slice.squares, slice.sum, maximum, 1} : element_sums(x, size, p, maximum, slice.sum),
      p,
      all);
}

// Adds the statistics of at most kStatisticsBlock elements.
template <class T>
void add_elements(const T* x, int64_t size, double p, int& first_bin, const T* next, ChunkStatistics& all) {
  using A = Accumulate<T>;
  alignas(64) A numbers[kStatisticsBlock];
  if constexpr (std::is_same_v<T, A>) {
    return add_slice(x, size, p, first_bin, next, numbers, all);
  } else if (GRADSCALE_VECTOR_BYTES > 16 && p == 2) { // 16-bit elements are converted by vector instructions
    const SliceStatistics<A> slice = slice_statistics(x, size, first_bin, next);
    if (slice.is_finite() && (is_safe(slice.squares) || slice.largest == 0)) {
      const ElementSums sums{slice.squares, slice.sum, static_cast<double>(slice.largest), 1};
      return add_statistics(slice, sums, p, all);
    }
  }
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    numbers[i] = to_accumulate(x[i]);
  }
  add_slice<A>(numbers, size, p, first_bin, numbers, numbers, all);
}

void range_statistics(const Range& range, double p, const void* next, ChunkStatistics& all) {
  all = {no_elements(), 0, 0, 0, {}};
  dispatch_element(range.element, [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(range.data);
    const T* next_data = static_cast<const T*>(next);
    int first_bin = -1;
    for (int64_t begin = 0; begin < range.size; begin += kStatisticsBlock) {
      const int64_t size = std::min(kStatisticsBlock, range.size - begin);
      add_elements(data + begin, size, p, first_bin, next_data + begin, all);
    }
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
