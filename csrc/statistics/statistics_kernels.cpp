// Statistics of a range of elements. It is taken in blocks: one loop reads the elements, takes the sums, and writes the
// bins, a byte each, which stay in the first-level cache; then each bin that occurs is counted, 64 elements an
// instruction. The loops are plain, and vectorised by the compiler. This file includes itself once for each instruction
// set.
#ifndef GRADSCALE_VARIANT
#include "calls.h"

#include <algorithm>

#define GRADSCALE_KERNELS "../statistics/statistics_kernels.cpp"
#include "../cpu/each_instruction_set.h"

namespace gradscale {

const CpuKernel<StatisticsOfRange> statistics_kernel = GRADSCALE_CPU_KERNEL(statistics_of_range);
const CpuKernel<UpdateOfRange> update_kernel = GRADSCALE_CPU_KERNEL(update_of_range);

} // namespace gradscale

#else
#include "../cpu/vectors.h"
#if GRADSCALE_VECTOR_BYTES == 64
#include "statistics_avx512.h"
#endif

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

constexpr int64_t kStatisticsBlock = 8192; // elements
constexpr int64_t kByteLanes = 64;

template <class W>
struct BlockSums {
  typename Magnitude<W>::Bits largest; // bits of the largest magnitude
  int32_t zeros;
  double sum;
  double squares;
};

// Finds the bins of the elements, the largest magnitude, and zeros.
template <class W>
void scan(const W* x, int64_t size, uint8_t* bins, BlockSums<W>& all) {
  using M = Magnitude<W>;
  typename M::Bits largest = all.largest;
  int32_t zeros = 0;
#pragma omp simd reduction(max : largest) reduction(+ : zeros)
  for (int64_t i = 0; i < size; ++i) {
    const typename M::Bits bits = M::of(x[i]);
    largest = bits > largest ? bits : largest;
    zeros += bits == 0;
    bins[i] = static_cast<uint8_t>(M::bin(bits));
  }
  all.largest = largest;
  all.zeros += zeros;
}

template <class W>
void sum(const W* x, int64_t size, BlockSums<W>& all) {
  LaneSum<double> sum, squares;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
#pragma omp simd
    for (int k = 0; k < kLanes; ++k) {
      const auto value = static_cast<double>(x[i + k]);
      sum.lanes[k] += value;
      squares.lanes[k] += value * value;
    }
  }
  for (int k = 0; i < size; ++i, ++k) {
    const auto value = static_cast<double>(x[i]);
    sum.lanes[k] += value;
    squares.lanes[k] += value * value;
  }
  all.sum += sum.total();
  all.squares += squares.total();
}

// Takes the sums of a block, and fills up its bins with a number that is none.
template <class W>
BlockSums<W> sum_block(const W* x, int64_t size, uint8_t* bins) {
  constexpr int64_t kPart =
      1024; // still in the cache for the second loop, which would not be vectorised with the first
  BlockSums<W> result{0, 0, 0, 0};
  for (int64_t begin = 0; begin < size; begin += kPart) {
    const int64_t part = size - begin < kPart ? size - begin : kPart;
    scan(x + begin, part, bins + begin, result);
    sum(x + begin, part, result);
  }
  for (int64_t i = size; i % kByteLanes != 0; ++i) {
    bins[i] = kHistogramBins;
  }
  return result;
}

// Memory that is wanted next.
struct LinesAhead {
  const char* next;
  const char* end;

  // Asks for a few lines of the cache: more at once would have to wait for each other.
  void fetch() {
    for (int k = 0; k < 8 && next < end; ++k, next += 64) {
#if defined(__GNUC__)
      __builtin_prefetch(next, /*rw=*/0);
#endif
    }
  }
};

void count_bins(const uint8_t* bins, int64_t size, int32_t* histogram, LinesAhead ahead) {
  uint8_t lowest = kHistogramBins;
  uint8_t highest = 0;
#pragma omp simd reduction(min : lowest) reduction(max : highest)
  for (int64_t i = 0; i < size; ++i) {
    lowest = bins[i] < lowest ? bins[i] : lowest;
    highest = bins[i] > highest ? bins[i] : highest;
  }
  for (int bin = lowest; bin <= highest; ++bin) {
    ahead.fetch(); // these loops ask memory for nothing else
    const auto wanted = static_cast<uint8_t>(bin);
    alignas(64) uint8_t lanes[kByteLanes] = {}; // kStatisticsBlock / kByteLanes of them at most: 128
    for (int64_t i = 0; i < size; i += kByteLanes) {
#pragma omp simd
      for (int k = 0; k < kByteLanes; ++k) {
        lanes[k] = static_cast<uint8_t>(lanes[k] + (bins[i + k] == wanted ? uint8_t(1) : uint8_t(0)));
      }
    }
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (int k = 0; k < kByteLanes; ++k) {
      total += lanes[k];
    }
    histogram[bin] += total;
  }
}

// Takes the sums where the plain ones of a block will not do: for another p, or for squares out of double's safe range.
// `maximum` is a number, and the largest magnitude.
template <class W>
ElementSums element_sums(const W* x, int64_t size, double p, double maximum, double sum) {
  const auto number = [=](int64_t i) { return static_cast<double>(x[i]); };
  const auto magnitude = [=](int64_t i) { return std::fabs(static_cast<double>(x[i])); };
  const double powers = std::isinf(p) ? maximum : plain_power_sum(size, p, magnitude);
  if (is_safe(powers)) {
    return {powers, sum, maximum, 1};
  }
  const double root = root_for(maximum);
  const double reciprocal = 1 / root;
  const auto scaled = [=](int64_t i) { return number(i) * reciprocal * reciprocal; };
  const double again = std::isinf(p) ? maximum * reciprocal * reciprocal
                                     : plain_power_sum(size, p, [=](int64_t i) { return std::fabs(scaled(i)); });
  return {again, lane_sum(size, scaled), maximum, root};
}

// Replaces NaN and inf by zeros, and counts them.
template <class W>
void leave_out_nonfinite(const W* from, int64_t size, W* to, ChunkStatistics& all) {
  using M = Magnitude<W>;
  int32_t nans = 0;
  int32_t infs = 0;
  for (int64_t i = 0; i < size; ++i) {
    const typename M::Bits bits = M::of(from[i]);
    nans += bits > M::kInfinity;
    infs += bits == M::kInfinity;
    to[i] = bits < M::kInfinity ? from[i] : W(0);
  }
  all.nans += nans;
  all.infs += infs;
}

// `spare` has room for the elements, and may be where they are.
template <class W>
void add_block(const W* x, int64_t size, double p, W* spare, LinesAhead ahead, ChunkStatistics& all) {
  using M = Magnitude<W>;
  alignas(64) uint8_t bins[kStatisticsBlock];
  BlockSums<W> block = sum_block(x, size, bins);
  const int32_t nonfinite_before = all.nans + all.infs;
  if (block.largest >= M::kInfinity) {
    leave_out_nonfinite(x, size, spare, all);
    x = spare;
    block = sum_block(x, size, bins);
  }
  count_bins(bins, size, all.histogram, ahead);
  all.histogram[0] -= block.zeros; // which are among the smallest numbers
  all.zeros += block.zeros - (all.nans + all.infs - nonfinite_before);
  if (block.largest > 0) {
    const auto maximum = static_cast<double>(M::number(block.largest));
    const bool plain = p == 2 && is_safe(block.squares);
    const ElementSums sums =
        plain ? ElementSums{block.squares, block.sum, maximum, 1} : element_sums(x, size, p, maximum, block.sum);
    all.sums = added(all.sums, sums, p);
  }
}

// Adds the elements of one block, which may be followed by others in the range.
template <class T>
void add_elements(const T* data, int64_t size, double p, LinesAhead ahead, ChunkStatistics& all) {
  using W = typename AccumulateType<T>::type;
  alignas(64) W spare[kStatisticsBlock];
  if constexpr (std::is_same_v<T, W>) {
    add_block<W>(data, size, p, spare, ahead, all);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      spare[i] = to_accumulate(data[i]);
    }
    add_block<W>(spare, size, p, spare, ahead, all);
  }
}

void statistics_of_range(const Range& range, double p, ChunkStatistics& all) {
  all = {no_elements(), 0, 0, 0, {}};
  dispatch_element(range.element, [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(range.data);
    [[maybe_unused]] int first_bin = -1;
    for (int64_t begin = 0; begin < range.size;) {
      const int64_t left = range.size - begin;
#if GRADSCALE_VECTOR_BYTES == 64
      if constexpr (!std::is_same_v<T, double>) {
        const int64_t added = p == 2 ? add_first(data + begin, left, first_bin, all) : 0;
        begin += added;
        if (added > 0) {
          continue;
        }
      }
#endif
      const int64_t size = left < kStatisticsBlock ? left : kStatisticsBlock;
      const T* end = data + begin + size;
      const int64_t next = left - size < kStatisticsBlock ? left - size : kStatisticsBlock;
      const LinesAhead ahead{reinterpret_cast<const char*>(end), reinterpret_cast<const char*>(end + next)};
      add_elements(data + begin, size, p, ahead, all);
      begin += size;
    }
  });
}

UpdateSquares update_of_range(const Range& before, const void* after) {
  UpdateSquares result{};
  dispatch_element(before.element, [&](auto type) {
    using T = decltype(type);
    const T* x = static_cast<const T*>(before.data);
    const T* y = static_cast<const T*>(after);
    const auto number = [](T element) { return static_cast<double>(to_accumulate(element)); };
    LaneSum<double> squares, updates;
    int64_t i = 0;
    for (; i + kLanes <= before.size; i += kLanes) {
#pragma omp simd
      for (int k = 0; k < kLanes; ++k) {
        const double old = number(x[i + k]);
        const double update = number(y[i + k]) - old;
        squares.lanes[k] += old * old;
        updates.lanes[k] += update * update;
      }
    }
    for (int k = 0; i < before.size; ++i, ++k) {
      const double old = number(x[i]);
      const double update = number(y[i]) - old;
      squares.lanes[k] += old * old;
      updates.lanes[k] += update * update;
    }
    result = {squares.total(), updates.total()};
  });
  return result;
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
