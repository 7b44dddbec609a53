// Statistics of many tensors.
//
// chunk_statistics    one warp for each tensor of up to 16 KB, and one block for each chunk of a larger one. Elements
//                     are read once, 128 bytes per thread at a time. Three blocks share a multiprocessor, so that
//                     96 KB of loads are in flight; the registers of a fourth would be too few.
// tensor_statistics   if a tensor has several chunks: one block for each of the larger tensors adds the statistics of
//                     its chunks, in their order. It reads 48 bytes for each 256 KiB of the tensor.
#pragma once

#include "lists.cuh"

namespace gradscale {

// ---- Sums of vectors ------------------------------------------------------------------------------------------------

// Elements narrower than double, for norms of order 2 or inf. A vector of 16 bytes is summed in float, and the sums of
// vectors are added in double. Where float would lose precision, or an element is not finite, the warp computes the
// sums of its vectors again, element by element in double, where no sum of squares of such elements overflows or
// underflows.

// Sums over elements: powers, sum and largest magnitude of the finite ones.
struct ChunkSums {
  double powers;
  double sum;
  double largest;
  int32_t zeros;
  int32_t nans;
  int32_t infs;
};

// The smallest and the largest magnitude in vectors. NaN is passed over, or is treated as some number.
template <class T>
struct MagnitudeExtremes {
  uint32_t least = 0xffffffffu; // two numbers
  uint32_t most = 0;

  GRADSCALE_DEVICE void add(const RawVector<T>& vector) {
#pragma unroll
    for (const uint32_t word : vector.words) {
      const uint32_t magnitudes = word & 0x7fff7fffu;
      least = smaller_pair(T(), least, magnitudes);
      most = larger_pair(T(), most, magnitudes);
    }
  }
  GRADSCALE_DEVICE bool has_zero() const {
    return (least & 0xffff) == 0 || least >> 16 == 0;
  }
  GRADSCALE_DEVICE float largest() const {
    const RawVector<T> vector{most};
    return larger(vector[0], vector[1]);
  }
};

template <>
struct MagnitudeExtremes<float> {
  float least = INFINITY;
  float most = 0;

  GRADSCALE_DEVICE void add(const RawVector<float>& vector) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      least = std::fmin(least, std::abs(vector[k]));
      most = larger(most, std::abs(vector[k]));
    }
  }
  GRADSCALE_DEVICE bool has_zero() const {
    return least == 0;
  }
  GRADSCALE_DEVICE float largest() const {
    return most;
  }
};

constexpr int kVectorsAtOnce = 8; // of a thread: 128 bytes of loads are issued before the first is used

// The sums of a thread of a warp.
template <class T>
struct VectorSums {
  double squares = 0;
  double sum = 0;
  float largest = 0;
  int32_t zeros = 0;
  int32_t nans = 0;
  int32_t infs = 0;

  // All threads of the warp add their vectors. Returns false if the vectors were not added, because float would lose
  // precision or an element is not finite.
  GRADSCALE_DEVICE bool add(const RawVector<T> (&vectors)[kVectorsAtOnce]) {
    VectorSums next = *this;
    MagnitudeExtremes<T> extremes;
    float all_squares = 0;
#pragma unroll
    for (const RawVector<T>& vector : vectors) {
      const float squares = vector.squares();
      all_squares += squares;
      next.squares += static_cast<double>(squares);
      next.sum += static_cast<double>(vector.sum());
      extremes.add(vector);
    }
    const float most = extremes.largest();
    next.largest = larger(next.largest, most);
    const bool safe = is_safe_in_float(all_squares);
    if (!__all_sync(kWholeWarp, safe && !extremes.has_zero())) {
      if (!__all_sync(kWholeWarp, safe || (all_squares == 0 && most == 0))) {
        return false;
      }
#pragma unroll
      for (const RawVector<T>& vector : vectors) {
        next.zeros += vector.zeros();
      }
    }
    *this = next;
    return true;
  }
  // Adds a vector element by element in double.
  GRADSCALE_DEVICE void add_each(const RawVector<T>& vector) {
    using M = Magnitude<float>;
#pragma unroll
    for (int k = 0; k < RawVector<T>::kSize; ++k) {
      const M::Bits bits = M::bits(vector[k]);
      zeros += bits == 0;
      nans += bits > M::kInfinity;
      infs += bits == M::kInfinity;
      const float finite = bits < M::kInfinity ? vector[k] : 0;
      const auto number = static_cast<double>(finite);
      squares += number * number;
      sum += number;
      largest = larger(largest, std::abs(finite));
    }
  }
};

// Sums this thread's vectors of a chunk. The vectors are distributed over the warps of the thread group. Each lane has
// the same number of vectors. Those beyond the chunk are zeros, which are counted too.
template <class T>
GRADSCALE_DEVICE ChunkSums vector_sums(const T* data, int32_t size, const ThreadGroup& group) {
  constexpr int32_t kOfWarp = 32 * kVectorsAtOnce;
  const AlignedVectors<T> vectors(data, size);
  const int32_t lane = group.rank % 32;
  VectorSums<T> own;
  for (int32_t begin = group.rank / 32 * kOfWarp; begin < vectors.count; begin += group.size * kVectorsAtOnce) {
    const int32_t first = vectors.first(begin);
    RawVector<T> now[kVectorsAtOnce];
    if (first >= 0 && first + kOfWarp * RawVector<T>::kSize <= size) { // the same for all of the warp
      const T* const own_data = data + first + lane * RawVector<T>::kSize;
#pragma unroll
      for (int c = 0; c < kVectorsAtOnce; ++c) {
        now[c] = read16<RawVector<T>>(own_data + 32 * c * RawVector<T>::kSize);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kVectorsAtOnce; ++c) {
        now[c] = read_raw_vector(data, size, vectors.first(begin + 32 * c + lane));
      }
    }
    if (!own.add(now)) {
#pragma unroll 1
      for (int c = 0; c < kVectorsAtOnce; ++c) { // read again, because registers are few
        own.add_each(read_raw_vector(data, size, vectors.first(begin + 32 * c + lane)));
      }
    }
  }
  return {own.squares, own.sum, static_cast<double>(own.largest), own.zeros, own.nans, own.infs};
}

// The number of zeros beyond the end of a chunk that vector_sums() counts.
template <class T>
GRADSCALE_DEVICE int32_t padding_zeros(const T* data, int32_t size) {
  constexpr int32_t kOfWarp = 32 * kVectorsAtOnce;
  const int32_t count = (AlignedVectors<T>(data, size).count + kOfWarp - 1) / kOfWarp * kOfWarp;
  return count * RawVector<T>::kSize - size;
}

// ---- Sums of elements, for float64 and other norms ------------------------------------------------------------------

// Adds up (|g| reciprocal^2)^p, and g reciprocal^2, of the finite elements over the thread group.
template <class T>
GRADSCALE_DEVICE void add_finite(
    const T* data, int32_t size, double p, double reciprocal, const ThreadGroup& group, double& powers, double& sum) {
  using A = Accumulate<T>;
  double own_powers = 0;
  double own_sum = 0;
  each_vector(data, size, group, A(0), [&](const A* values, int32_t) { // 0 outside of the range adds nothing
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      if (Magnitude<A>::bits(values[k]) < Magnitude<A>::kInfinity) {
        const double scaled = static_cast<double>(values[k]) * reciprocal * reciprocal;
        own_sum += scaled;
        own_powers += power_in_norm(std::abs(scaled), p);
      }
    }
  });
  powers = group.sum(own_powers);
  sum = group.sum(own_sum);
}

// Adds up this thread's elements one by one.
template <class T>
GRADSCALE_DEVICE ChunkSums element_sums(const T* data, int32_t size, double p, const ThreadGroup& group) {
  using A = Accumulate<T>;
  using M = Magnitude<A>;
  ChunkSums own{0, 0, 0, 0, 0, 0};
  each_vector(data, size, group, A(0), [&](const A* values, int32_t first) {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      const typename M::Bits bits = M::bits(values[k]);
      if (first + k < 0 || first + k >= size) {
        continue;
      }
      if (bits == 0) {
        ++own.zeros;
      } else if (bits < M::kInfinity) {
        const auto value = static_cast<double>(values[k]);
        const double magnitude = std::abs(value);
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

// ---- The kernels ----------------------------------------------------------------------------------------------------

// Computes the statistics of a chunk with the threads of a thread group, for a norm of order p. If `by_vectors` is
// true, p is 2 or inf, and elements narrower than double are summed in vectors of 16 bytes, whose squares need no root.
// each_type(function) calls function(data, size) with a pointer to elements of their type.
template <bool by_vectors, class EachType>
GRADSCALE_DEVICE ChunkStatistics statistics_of(const EachType& each_type, double p, const ThreadGroup& group) {
  const bool is_maximum = std::isinf(p);
  ChunkSums own{};
  int32_t padding = 0; // zeros beyond the end of the chunk that the thread group has counted too
  each_type([&](const auto* data, int32_t size) {
    if constexpr (by_vectors && sizeof(*data) < sizeof(double)) {
      own = vector_sums(data, size, group);
      padding = padding_zeros(data, size);
    } else {
      own = element_sums(data, size, by_vectors ? 2 : p, group);
    }
  });
  const ChunkSums all{
      group.sum(own.powers),
      group.sum(own.sum),
      group.maximum(own.largest),
      group.sum(own.zeros),
      group.sum(own.nans),
      group.sum(own.infs)};
  ElementSums sums{is_maximum ? all.largest : all.powers, all.sum, all.largest, 1};
  if (!is_safe(sums.powers) && all.largest > 0) { // the same for all threads; the sums overflow or underflow
    sums.root = root_for(all.largest, p);
    each_type([&](const auto* data, int32_t size) {
      if constexpr (!by_vectors || sizeof(*data) == sizeof(double)) {
        add_finite(data, size, by_vectors ? 2 : p, 1 / sums.root, group, sums.powers, sums.sum);
      }
    });
    if (is_maximum) {
      sums.powers = all.largest / sums.root / sums.root;
    }
  }
  return {sums, all.zeros - padding, all.nans, all.infs};
}

// Stores the statistics of a tensor. Called by one thread.
template <bool by_vectors, class List>
GRADSCALE_DEVICE void store_statistics(
    const StatisticsArguments<List>& arguments, const ListedTensor& tensor, const ChunkStatistics& all) {
  const double p = by_vectors ? (std::isinf(arguments.p) ? static_cast<double>(INFINITY) : 2) : arguments.p;
  arguments.out.store(tensor.index, all.sums, tensor.size, tensor.implicit_zeros, all.zeros, all.nans, all.infs, p);
}

// Blocks of vector_sums() on a multiprocessor. Before sm_80, the registers of three would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kVectorBlocks = 2;
#else
constexpr int kVectorBlocks = 3;
#endif

template <bool by_vectors, class List>
GRADSCALE_KERNEL(kThreads, by_vectors ? kVectorBlocks : 2)
chunk_statistics(GRADSCALE_ARGUMENT(StatisticsArguments<List>) arguments) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const List& list = arguments.list;
  if (is_block_of_singles(list)) {
    if (warp_index() >= list.singles) { // the same for all of the warp
      return;
    }
    const auto each_type = [&](auto function) {
      const ListedTensor& tensor = list.ranges[warp_index()];
      dispatch_element(tensor.element, [&](auto type) {
        function(static_cast<const decltype(type)*>(tensor.data), static_cast<int32_t>(tensor.size));
      });
    };
    const ChunkStatistics all = statistics_of<by_vectors>(each_type, arguments.p, warp_threads());
    if (threadIdx.x % 32 == 0) {
      store_statistics<by_vectors>(arguments, list.ranges[warp_index()], all);
    }
    return;
  }
  // Looks the chunk up again in each call: keeping it would take registers.
  const auto each_type = [&](auto function) {
    const ChunkOfTensor chunk = chunk_of_block(list, kChunkOfStatistics);
    dispatch_element(chunk.tensor.element, [&](auto type) {
      function(static_cast<const decltype(type)*>(chunk.tensor.data) + chunk.begin, chunk.size);
    });
  };
  const ChunkStatistics all = statistics_of<by_vectors>(each_type, arguments.p, block_threads(shared));
  if (threadIdx.x == 0) {
    const ListedTensor& tensor = list.range_for_block(blockIdx.x);
    if (tensor_blocks(tensor, kChunkOfStatistics) == 1) {
      store_statistics<by_vectors>(arguments, tensor, all);
    } else {
      arguments.chunks[blockIdx.x - list.blocks_of_singles()] = all;
    }
  }
}

template <class List>
GRADSCALE_KERNEL(kThreads, 2)
tensor_statistics(GRADSCALE_ARGUMENT(StatisticsArguments<List>) arguments) {
  const double p = arguments.p;
  const StatisticsOut& out = arguments.out;
  GRADSCALE_SHARED(double, shared, kWarps);
  const ThreadGroup block = block_threads(shared);
  const List& list = arguments.list;
  const ListedTensor& tensor = list.ranges[list.singles + blockIdx.x];
  const int64_t count = tensor_blocks(tensor, kChunkOfStatistics);
  if (count == 1) { // chunk_statistics has stored the results
    return;
  }
  const ChunkStatistics* chunks = arguments.chunks + (tensor.first_block - list.blocks_of_singles());
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
    out.store(tensor.index, all, tensor.size, tensor.implicit_zeros, zeros, nans, infs, p);
  }
}

} // namespace gradscale
