// Statistics of a range of elements. It is taken in blocks that stay in the first-level cache: one loop finds the bins
// and the largest magnitude, one takes the sums, and then each bin that occurs is counted, 64 elements an instruction.
// Included once for each instruction set; the loops are plain, and vectorised by the compiler.
#include "../math/statistics.h"
#include "range.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

constexpr int64_t kStatisticsBlock = 2048; // elements
constexpr int64_t kByteLanes = 64;

// The bins of `size` elements, filled up with what is no bin; returns the bits of the largest magnitude.
template <class W>
typename Magnitude<W>::Bits find_bins(const W* x, int64_t size, uint8_t* bins, int32_t& zeros) {
  using M = Magnitude<W>;
  typename M::Bits largest = 0;
  int32_t count = 0;
#pragma omp simd reduction(max : largest) reduction(+ : count)
  for (int64_t i = 0; i < size; ++i) {
    const typename M::Bits bits = M::of(x[i]);
    largest = bits > largest ? bits : largest;
    count += bits == 0;
    bins[i] = static_cast<uint8_t>(M::bin(bits));
  }
  for (int64_t i = size; i % kByteLanes != 0; ++i) {
    bins[i] = kHistogramBins;
  }
  zeros = count;
  return largest;
}

// Memory that is wanted next.
struct LinesAhead {
  const char* next;
  const char* end;

  // A few lines of the cache: more at once would have to wait for each other.
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
    alignas(64) uint8_t lanes[kByteLanes] = {}; // 32 of them at most
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

// `maximum` is a number, and the largest magnitude.
template <class W>
ElementSums element_sums(const W* x, int64_t size, double p, double maximum) {
  const auto number = [=](int64_t i) { return static_cast<double>(x[i]); };
  const auto magnitude = [=](int64_t i) { return std::fabs(static_cast<double>(x[i])); };
  const auto powers = [&](auto of) { return std::isinf(p) ? maximum : plain_power_sum(size, p, of); };
  const double sum = powers(magnitude);
  if (is_safe(sum)) {
    return {sum, lane_sum(size, number), maximum, 1};
  }
  const double root = root_for(maximum);
  const double reciprocal = 1 / root;
  const auto scaled = [=](int64_t i) { return number(i) * reciprocal * reciprocal; };
  const double again =
      std::isinf(p) ? maximum * reciprocal * reciprocal : powers([=](int64_t i) { return std::fabs(scaled(i)); });
  return {again, lane_sum(size, scaled), maximum, root};
}

// NaN and inf replaced by zeros, and counted.
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
  int32_t zeros = 0;
  typename M::Bits largest = find_bins(x, size, bins, zeros);
  const int32_t nonfinite_before = all.nans + all.infs;
  if (largest >= M::kInfinity) {
    leave_out_nonfinite(x, size, spare, all);
    x = spare;
    largest = find_bins(x, size, bins, zeros);
  }
  count_bins(bins, size, all.histogram, ahead);
  all.histogram[0] -= zeros; // which are among the smallest numbers
  all.zeros += zeros - (all.nans + all.infs - nonfinite_before);
  if (largest > 0) {
    all.sums = added(all.sums, element_sums(x, size, p, static_cast<double>(M::number(largest))), p);
  }
}

void statistics_of_range(const Range& range, double p, ChunkStatistics& all) {
  all = {no_elements(), 0, 0, 0, {}};
  dispatch_element(range.element, [&](auto type) {
    using T = decltype(type);
    using W = typename AccumulateType<T>::type;
    alignas(64) W spare[kStatisticsBlock];
    for (int64_t begin = 0; begin < range.size; begin += kStatisticsBlock) {
      const int64_t size = range.size - begin < kStatisticsBlock ? range.size - begin : kStatisticsBlock;
      const T* data = static_cast<const T*>(range.data) + begin;
      const int64_t left = range.size - begin - size;
      const int64_t next = left < kStatisticsBlock ? left : kStatisticsBlock;
      const LinesAhead ahead{
          reinterpret_cast<const char*>(data + size), reinterpret_cast<const char*>(data + size + next)};
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
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
