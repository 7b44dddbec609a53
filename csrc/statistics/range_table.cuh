// The tensors of a launch that has one block for each chunk of each of them.
#pragma once

#include "../cuda/norms.cuh"
#include "range_table.h"

namespace gradscale {

// The tensor that this block works on, and the block's chunk.
struct ChunkOfTensor {
  const RangeEntry& entry;
  int64_t begin;
  int32_t size;
};

// Finds the chunk of this block, which has so many bytes. Empty tensors have no block: among tensors that begin at the
// same block the last has it.
GRADSCALE_DEVICE ChunkOfTensor chunk_of_block(const RangeTable& table, int64_t bytes) {
  int64_t low = 0;
  int64_t high = table.count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (table[middle].first_block <= blockIdx.x ? low : high) = middle;
  }
  const RangeEntry& entry = table[low];
  const int64_t chunk = elements_of_chunk(entry.range, bytes);
  const int64_t begin = (blockIdx.x - entry.first_block) * chunk;
  const int64_t rest = entry.range.size - begin;
  return {entry, begin, static_cast<int32_t>(rest < chunk ? rest : chunk)};
}

// All threads of the block write scaled(x) for each element x of a chunk, in the type of sums.
template <class Scaled>
GRADSCALE_DEVICE void scale_chunk(const ChunkOfTensor& chunk, Scaled scaled) {
  const Group block{kThreads, static_cast<int>(threadIdx.x), nullptr};
  dispatch_element(chunk.entry.range.element, [&](auto type) {
    using T = decltype(type);
    using A = typename AccumulateType<T>::type;
    const T* data = static_cast<const T*>(chunk.entry.range.data) + chunk.begin;
    T* out = static_cast<T*>(chunk.entry.range.out) + chunk.begin;
    each_window_of_range(data, chunk.size, block, [&](A* values, int32_t first) {
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) {
        values[k] = scaled(values[k]);
      }
      write_elements<kVector<T>>(out, chunk.size, first, values);
    });
  });
}

} // namespace gradscale
