// Statistics of many tensors.
//
// chunk_statistics    one block for each chunk of a tensor, of as many tensors as there are: read once. A thread counts
//                     bins in 16-bit counters of its own in shared memory, so that there are no atomics, and neighbours
//                     meet in no bank; the block adds them up.
// tensor_statistics   one block for each tensor adds the statistics of its chunks, in their order: 300 bytes for each
//                     256 KiB of float32.
#pragma once

#include "../math/norms.cuh"
#include "range_table.cuh"

namespace gradscale {

constexpr int64_t kChunkOfStatistics = 256 * kThreads; // elements

// Counters of 16 bits, one for each bin and thread.
struct BinCounters {
  uint16_t* counters;

  GRADSCALE_DEVICE void clear() const {
    for (int i = threadIdx.x; i < kHistogramBins * kThreads / 2; i += kThreads) {
      reinterpret_cast<uint32_t*>(counters)[i] = 0;
    }
    __syncthreads();
  }
  GRADSCALE_DEVICE void count(int32_t bin) const {
    constexpr int half = kThreads / 2; // two that share a word, and so a bank, are in different warps
    ++counters[bin * kThreads + threadIdx.x % half * 2 + threadIdx.x / half];
  }
  // One bin after the other by each warp.
  GRADSCALE_DEVICE void store(int32_t* histogram) const {
    __syncthreads();
    const Group warp{32, static_cast<int>(threadIdx.x % 32), nullptr};
    for (int bin = threadIdx.x / 32; bin < kHistogramBins; bin += kWarps) {
      int32_t count = 0;
      for (int i = warp.rank; i < kThreads / 2; i += 32) {
        const uint32_t two = reinterpret_cast<const uint32_t*>(counters + bin * kThreads)[i];
        count += static_cast<int32_t>((two & 0xffff) + (two >> 16));
      }
      count = warp.sum(count);
      if (warp.rank == 0) {
        histogram[bin] = count;
      }
    }
  }
};

// Calls function(value) for the finite elements of this thread.
template <class T, class Function>
GRADSCALE_DEVICE void each_finite(const T* data, int32_t size, const Group& block, Function function) {
  using A = typename AccumulateType<T>::type;
  each_window_of_range(data, size, block, [&](const A* values, int32_t first) {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      const bool inside = first + k >= 0 && first + k < size;
      if (inside && Magnitude<A>::of(values[k]) < Magnitude<A>::kInfinity) {
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

// The sums of the elements of a chunk that one thread has seen.
struct ChunkSums {
  double powers;
  double sum;
  double largest;
  int32_t zeros;
  int32_t nans;
  int32_t infs;
};

// Takes the sums of this thread's elements, and counts their bins.
template <class T>
GRADSCALE_DEVICE ChunkSums
sums_of_thread(const T* data, int32_t size, double p, const BinCounters& bins, const Group& block) {
  using A = typename AccumulateType<T>::type;
  using M = Magnitude<A>;
  ChunkSums own{0, 0, 0, 0, 0, 0};
  each_window_of_range(data, size, block, [&](const A* values, int32_t first) {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      const typename M::Bits bits = M::of(values[k]);
      if (first + k < 0 || first + k >= size) {
        continue;
      }
      if (bits == 0) {
        ++own.zeros;
      } else if (bits < M::kInfinity) {
        const auto value = static_cast<double>(values[k]);
        const double magnitude = std::abs(value);
        bins.count(M::bin(bits));
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

// The sums of the block, taken again with a root where the plain ones would overflow or vanish.
template <class T>
GRADSCALE_DEVICE ElementSums
sums_of_block(const ChunkSums& own, const T* data, int32_t size, double p, const Group& block) {
  const double largest = block.maximum(own.largest);
  double powers = std::isinf(p) ? largest : block.sum(own.powers);
  double sum = block.sum(own.sum);
  double root = 1;
  if (!is_safe(powers) && largest > 0) { // the same for all threads
    root = root_for(largest);
    add_finite(data, size, p, 1 / root, block, powers, sum);
    powers = std::isinf(p) ? largest / root / root : powers;
  }
  return {powers, sum, largest, root};
}

GRADSCALE_KERNEL(kThreads, 2)
chunk_statistics(GRADSCALE_ARGUMENT(RangeTable) table, double p, ChunkStatistics* out) {
  GRADSCALE_SHARED(double, shared, kWarps);
  GRADSCALE_SHARED(uint32_t, memory, kHistogramBins* kThreads / 2);
  const BinCounters bins{reinterpret_cast<uint16_t*>(memory)};
  bins.clear();
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  const ChunkOfTensor chunk = chunk_of_block(table, kChunkOfStatistics);
  ChunkStatistics& result = out[blockIdx.x];
  dispatch_element(chunk.entry.range.element, [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(chunk.entry.range.data) + chunk.begin;
    const ChunkSums own = sums_of_thread(data, chunk.size, p, bins, block);
    const ElementSums sums = sums_of_block(own, data, chunk.size, p, block);
    const int32_t zeros = block.sum(own.zeros);
    const int32_t nans = block.sum(own.nans);
    const int32_t infs = block.sum(own.infs);
    if (threadIdx.x == 0) {
      result.sums = sums;
      result.zeros = zeros;
      result.nans = nans;
      result.infs = infs;
    }
  });
  bins.store(result.histogram);
}

// Adds up one bin of the chunks of a tensor for each of the first threads. A few threads take turns with the chunks.
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
tensor_statistics(GRADSCALE_ARGUMENT(RangeTable) table, const ChunkStatistics* chunks, double p, StatisticsOut out) {
  GRADSCALE_SHARED(double, shared, kWarps);
  GRADSCALE_SHARED(int64_t, counts, kThreads);
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  const RangeEntry& entry = table[blockIdx.x];
  const int64_t count = (entry.range.size + kChunkOfStatistics - 1) / kChunkOfStatistics;
  chunks += entry.first_block;
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
