// Statistics of finite float, bfloat16 and half elements in one pass. Compilers do not make this of a plain loop: the
// counters of sixteen neighbouring bins stay in registers, 64 bytes each, so that memory is read while bins are
// counted. Compiled for AVX-512 only.
#include "calls.h"

#include <immintrin.h>
#include <algorithm>

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

constexpr int kCountedBins = 16;
// Distances at which memory is asked for, into the second-level cache and into the first: loads that wait for it would
// otherwise leave no room for more.
constexpr int kFarAhead = 1536; // elements
constexpr int kNearAhead = 256;

// Elements i .. i + 16, all as float, and in halves as double.
struct Sixteen {
  __m512 all;
  __m512d low;
  __m512d high;
};

inline Sixteen sixteen_of(__m512 all) {
  return {all, _mm512_cvtps_pd(_mm512_castps512_ps256(all)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(all, 1))};
}

inline Sixteen load_sixteen(const float* from) { // again from memory: that takes no shuffle
  return {_mm512_loadu_ps(from), _mm512_cvtps_pd(_mm256_loadu_ps(from)), _mm512_cvtps_pd(_mm256_loadu_ps(from + 8))};
}

inline Sixteen load_sixteen(const BFloat16Bits* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return sixteen_of(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
}

inline Sixteen load_sixteen(const HalfBits* from) {
  return sixteen_of(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

// The bins of 64 elements, from the bits of their magnitudes.
inline __m512i bins_of(const __m512i* bits) {
  const __m512i low = _mm512_packus_epi32(_mm512_srli_epi32(bits[0], 23), _mm512_srli_epi32(bits[1], 23));
  const __m512i high = _mm512_packus_epi32(_mm512_srli_epi32(bits[2], 23), _mm512_srli_epi32(bits[3], 23));
  const __m512i exponents = _mm512_packus_epi16(low, high);
  const __m512i bins = _mm512_subs_epu8(exponents, _mm512_set1_epi8(127 + kFirstEdge - 1));
  return _mm512_min_epu8(bins, _mm512_set1_epi8(kHistogramBins - 1));
}

inline int first_bin_below(int highest) { // one bin above it may come too
  return highest > kCountedBins - 2 ? highest - (kCountedBins - 2) : 0;
}

// The bin where counting should begin, from the first elements that are not zeros.
template <class T>
int probable_first_bin(const T* x, int64_t size) {
  int32_t largest = 0;
  for (int64_t begin = 0; begin < size && largest == 0; begin += 32) {
    const int64_t end = std::min<int64_t>(size, begin + 32);
    for (int64_t i = begin; i < end; ++i) {
      largest = std::max(largest, Magnitude<float>::of(to_accumulate(x[i])));
    }
  }
  return first_bin_below(Magnitude<float>::bin(largest));
}

// The number of zeros among `size` elements, a multiple of 16.
template <class T>
int32_t zeros_among(const T* x, int64_t size) {
  int32_t zeros = 0;
  for (int64_t i = 0; i < size; i += 16) {
    const __m512 elements = load_sixteen(x + i).all;
    zeros += __builtin_popcount(_mm512_cmp_ps_mask(elements, _mm512_setzero_ps(), _CMP_EQ_OQ));
  }
  return zeros;
}

// Adds the counters of the bins from first_bin on to the numbers of all bins.
inline void add_counters(const __m512i* counts, int first_bin, int32_t* histogram) {
  for (int k = 0; k < kCountedBins; ++k) {
    const __m512i totals = _mm512_sad_epu8(counts[k], _mm512_setzero_si512());
    histogram[(first_bin + k) % kHistogramBins] += static_cast<int32_t>(_mm512_reduce_add_epi64(totals));
  }
}

// Adds the statistics of `size` elements, a multiple of 64 and at most 255 * 64, for p = 2; or returns false, and adds
// nothing, where one of them is not finite, or where many are neither in the bins first_bin .. first_bin + 16 nor in
// the lowest one, which has the zeros. Leaves in `first_bin` a guess for the elements that follow.
template <class T>
bool add_lanes(const T* x, int64_t size, int& first_bin, ChunkStatistics& all) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i ones = _mm512_set1_epi8(1);
  const __m512i first = _mm512_set1_epi8(static_cast<char>(first_bin));
  __m512i counts[kCountedBins];
  for (__m512i& count : counts) {
    count = _mm512_setzero_si512();
  }
  __m512i largest = _mm512_setzero_si512();
  __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  __m512d squares[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  int32_t others[kHistogramBins] = {};
  int64_t others_left = size / 16 + 64;
  for (int64_t i = 0; i < size; i += 64) {
    __m512i bits[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      __builtin_prefetch(x + i + 16 * k + kFarAhead, 0, 1); // past the end it does nothing
      __builtin_prefetch(x + i + 16 * k + kNearAhead, 0, 3);
      const Sixteen elements = load_sixteen(x + i + 16 * k);
      bits[k] = _mm512_and_si512(_mm512_castps_si512(elements.all), magnitude);
      largest = _mm512_max_epu32(largest, bits[k]);
      sums[0] = _mm512_add_pd(sums[0], elements.low);
      sums[1] = _mm512_add_pd(sums[1], elements.high);
      squares[0] = _mm512_fmadd_pd(elements.low, elements.low, squares[0]);
      squares[1] = _mm512_fmadd_pd(elements.high, elements.high, squares[1]);
    }
    const __m512i bins = bins_of(bits);
    const __m512i counted = _mm512_sub_epi8(bins, first);
#pragma GCC unroll 16
    for (int k = 0; k < kCountedBins; ++k) {
      const __mmask64 here = _mm512_cmpeq_epi8_mask(counted, _mm512_set1_epi8(static_cast<char>(k)));
      counts[k] = _mm512_mask_add_epi8(counts[k], here, counts[k], ones);
    }
    __mmask64 outside = _mm512_cmpge_epu8_mask(counted, _mm512_set1_epi8(kCountedBins));
    if (outside != 0) {
      const __mmask64 lowest = outside & _mm512_cmpeq_epi8_mask(bins, _mm512_setzero_si512()); // zeros, most of all
      others[0] += __builtin_popcountll(lowest);
      outside ^= lowest;
      alignas(64) uint8_t bytes[64];
      _mm512_store_si512(bytes, bins);
      for (; outside != 0; outside &= outside - 1) {
        ++others[bytes[__builtin_ctzll(outside)]];
        --others_left;
      }
      if (others_left < 0) {
        first_bin = -1;
        return false;
      }
    }
  }
  const auto largest_bits = static_cast<int32_t>(_mm512_reduce_max_epu32(largest));
  if (largest_bits >= Magnitude<float>::kInfinity) {
    return false;
  }
  add_counters(counts, first_bin, others);
  if (others[0] > 0) { // zeros are among the smallest numbers
    const int32_t zeros = zeros_among(x, size);
    others[0] -= zeros;
    all.zeros += zeros;
  }
  for (int bin = 0; bin < kHistogramBins; ++bin) {
    all.histogram[bin] += others[bin];
  }
  first_bin = first_bin_below(Magnitude<float>::bin(largest_bits));
  const double powers = _mm512_reduce_add_pd(_mm512_add_pd(squares[0], squares[1]));
  const double sum = _mm512_reduce_add_pd(_mm512_add_pd(sums[0], sums[1]));
  const auto maximum = static_cast<double>(Magnitude<float>::number(largest_bits));
  all.sums = added(all.sums, ElementSums{powers, sum, maximum, 1}, 2);
  return true;
}

// Adds the first elements for p = 2, and returns how many; 0 where it cannot. `first_bin` is -1 at the beginning.
template <class T>
int64_t add_first(const T* x, int64_t size, int& first_bin, ChunkStatistics& all) {
  first_bin = first_bin < 0 ? probable_first_bin(x, size) : first_bin;
  if (size >= 64) {
    const int64_t whole = std::min<int64_t>(size, 255 * 64) / 64 * 64;
    return add_lanes(x, whole, first_bin, all) ? whole : 0;
  }
  T filled[64] = {}; // zeros fill them up, and are not counted
  std::copy(x, x + size, filled);
  if (!add_lanes(filled, 64, first_bin, all)) {
    return 0;
  }
  all.zeros -= static_cast<int32_t>(64 - size);
  return size;
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
