// Statistics of many tensors.
//
// chunk_statistics    one block for each chunk of each tensor. Elements are read once, 128 bytes per thread at a time.
//                     They are counted by their exponents in 32 KB of shared memory, with atomic additions of integers
//                     in which no two lanes of a warp use the same address. Three blocks share a multiprocessor, so
//                     that 96 KB of loads are in flight.
// tensor_statistics   one block for each tensor adds the statistics of its chunks, in their order. It reads 300 bytes
//                     for each 256 KiB of the tensor.
#pragma once

#include "../cuda/norms.cuh"
#include "calls.h"
#include "window_sums.cuh"

namespace gradscale {

// Calls function(value) for the finite elements of this thread.
template <class T, class Function>
GRADSCALE_DEVICE void each_finite(const T* data, int32_t size, const Group& block, Function function) {
  using A = typename AccumulateType<T>::type;
  each_window(data, size, block, A(0), [&](const A* values, int32_t first) {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      const bool inside = first + k >= 0 && first + k < size;
      if (inside && Magnitude<A>::bits(values[k]) < Magnitude<A>::kInfinity) {
        function(values[k]);
      }
    }
  });
}

// Adds up (|g| reciprocal^2)^p, and g reciprocal^2, over the block.
template <class T>
GRADSCALE_DEVICE void add_finite(
    const T* data, int32_t size, double p, double reciprocal, const Group& block, double& powers, double& sum) {
  double own_powers = 0;
  double own_sum = 0;
  each_finite(data, size, block, [&](auto value) {
    const double scaled = static_cast<double>(value) * reciprocal * reciprocal;
    own_sum += scaled;
    own_powers += power_in_norm(std::abs(scaled), p);
  });
  powers = block.sum(own_powers);
  sum = block.sum(own_sum);
}

// Adds up this thread's elements one by one, and counts them by octaves (exponents). Zeros are counted too.
template <class T>
GRADSCALE_DEVICE ChunkSums
element_sums(const T* data, int32_t size, double p, const OctaveCounters& octaves, const Group& block) {
  using A = typename AccumulateType<T>::type;
  using M = Magnitude<A>;
  ChunkSums own{0, 0, 0, 0, 0, 0};
  each_window(data, size, block, A(0), [&](const A* values, int32_t first) {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      const typename M::Bits bits = M::bits(values[k]);
      if (first + k < 0 || first + k >= size) {
        continue;
      }
      if (bits == 0) {
        ++own.zeros;
        octaves.count(0.0f);
      } else if (bits < M::kInfinity) {
        const auto value = static_cast<double>(values[k]);
        const double magnitude = std::abs(value);
        octaves.count_bin(M::bin(bits));
        own.largest = magnitude > own.largest ? magnitude : own.largest;
        own.sum += value;
        own.powers += power_in_norm(magnitude, p);
      } else {
        ++(bits > M::kInfinity ? own.nans : own.infs);
      }
    }
  });
  return own;
}

// Computes the statistics of chunks for a norm of order p. If `windows` is true, p is 2 or inf, and elements narrower
// than double are summed in windows of 16 bytes (window_sums.cuh), whose sums of squares need no root.
template <bool windows>
GRADSCALE_KERNEL(kThreads, windows ? 3 : 2)
chunk_statistics(GRADSCALE_ARGUMENT(StatisticsArguments) arguments) {
  GRADSCALE_SHARED(OctaveCounters::Four, counters, OctaveCounters::kCount / 4);
  GRADSCALE_SHARED(double, shared, kWarps);
  GRADSCALE_SHARED(int, ends, 2);
  const OctaveCounters octaves(counters, ends);
  __syncthreads();
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  const double p = arguments.p;
  const bool is_maximum = std::isinf(p);
  ChunkSums own{};
  int32_t counted = 0; // zeros beyond the chunk that the block has counted too
  // Finds the chunk in each call, which saves registers.
  const auto each_type = [&](auto function) {
    const ChunkOfTensor chunk = chunk_of_block(arguments.table, blockIdx.x, kChunkOfStatistics);
    dispatch_element(chunk.entry.range.element, [&](auto type) {
      using T = decltype(type);
      function(static_cast<const T*>(chunk.entry.range.data) + chunk.begin, chunk.size);
    });
  };
  each_type([&](const auto* data, int32_t size) {
    if constexpr (windows && sizeof(*data) < sizeof(double)) {
      own = window_sums(data, size, octaves);
      counted = zeros_beside(data, size);
    } else {
      own = element_sums(data, size, windows ? 2 : p, octaves, block);
    }
  });
  const ChunkSums all{
      block.sum(own.powers),
      block.sum(own.sum),
      block.maximum(own.largest),
      block.sum(own.zeros),
      block.sum(own.nans),
      block.sum(own.infs)};
  ElementSums sums{is_maximum ? all.largest : all.powers, all.sum, all.largest, 1};
  if (!is_safe(sums.powers) && all.largest > 0) { // the same for all threads; the sums overflow or underflow
    sums.root = root_for(all.largest, p);
    each_type([&](const auto* data, int32_t size) {
      if constexpr (!windows || sizeof(*data) == sizeof(double)) {
        add_finite(data, size, windows ? 2 : p, 1 / sums.root, block, sums.powers, sums.sum);
      }
    });
    if (is_maximum) {
      sums.powers = all.largest / sums.root / sums.root;
    }
  }
  ChunkStatistics& result = arguments.chunks[blockIdx.x];
  if (threadIdx.x == 0) {
    result.sums = sums;
    result.zeros = all.zeros - counted;
    result.nans = all.nans;
    result.infs = all.infs;
  }
  octaves.store(result.histogram, all.zeros);
}

// Adds up the histograms of the chunks of a tensor. The threads of a bin take turns with the chunks; then one thread of
// the bin adds up their counts.
GRADSCALE_DEVICE void add_histograms(const ChunkStatistics* chunks, int64_t num_chunks, int64_t* counts, int64_t* out) {
  const int bin = threadIdx.x % kHistogramBins;
  int64_t own = 0;
  for (int64_t i = threadIdx.x / kHistogramBins; i < num_chunks; i += kThreads / kHistogramBins) {
    own += chunks[i].histogram[bin];
  }
  counts[threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.x < kHistogramBins) {
    int64_t sum = 0;
    for (int i = bin; i < kThreads; i += kHistogramBins) {
      sum += counts[i];
    }
    out[bin] = sum;
  }
}

GRADSCALE_KERNEL(kThreads, 2)
tensor_statistics(GRADSCALE_ARGUMENT(StatisticsArguments) arguments) {
  const double p = arguments.p;
  const StatisticsOut& out = arguments.out;
  GRADSCALE_SHARED(double, shared, kWarps);
  GRADSCALE_SHARED(int64_t, counts, kThreads);
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  const RangeTable::Entry& entry = arguments.table[blockIdx.x];
  const int64_t count = range_blocks(entry.range, kChunkOfStatistics);
  const ChunkStatistics* chunks = arguments.chunks + entry.first_block;
  ElementSums own = no_elements();
  int64_t zeros = 0;
  int64_t nans = 0;
  int64_t infs = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    own = added(own, chunks[i].sums, p);
    zeros += chunks[i].zeros;
    nans += chunks[i].nans;
    infs += chunks[i].infs;
  }
  const double largest = block.maximum(own.maximum);
  const double root = block.maximum(own.maximum > 0 ? own.root : 0.0);
  ElementSums all = no_elements();
  if (largest > 0) {
    own = own.maximum > 0 ? from_root_to_root(own, root, p) : own;
    const double powers = std::isinf(p) ? block.maximum(own.powers) : block.sum(own.powers);
    all = {powers, block.sum(own.sum), largest, root};
  }
  zeros = block.sum(zeros);
  nans = block.sum(nans);
  infs = block.sum(infs);
  if (threadIdx.x == 0) {
    out.store(blockIdx.x, all, entry.range.size, entry.range.implicit_zeros, zeros, nans, infs, p);
  }
  add_histograms(chunks, count, counts, out.histogram + blockIdx.x * static_cast<int64_t>(kHistogramBins));
}

} // namespace gradscale
