// The tensors of a launch that has one block for each chunk of each of them.
#pragma once

#include "../cuda/norms.cuh"
#include "calls.h"

namespace gradscale {

// The tensor that this block works on, and the block's chunk.
struct ChunkOfTensor {
  const RangeTable::Entry& entry;
  int64_t begin;
  int32_t size;
};

// Finds the chunk of this block, which has so many bytes.
GRADSCALE_DEVICE ChunkOfTensor chunk_of_block(const RangeTable& table, int64_t bytes) {
  const RangeTable::Entry& entry = table.find(blockIdx.x);
  const int64_t chunk = elements_of_chunk(entry.range, bytes);
  const int64_t begin = (blockIdx.x - entry.first_block) * chunk;
  const int64_t rest = entry.range.size - begin;
  return {entry, begin, static_cast<int32_t>(rest < chunk ? rest : chunk)};
}

// All threads of the block write changed(x) for each element x of a chunk, in the type of sums.
template <class Change>
GRADSCALE_DEVICE void change_chunk(const ChunkOfTensor& chunk, Change changed) {
  dispatch_element(chunk.entry.range.element, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(chunk.entry.range.data) + chunk.begin;
    T* to = static_cast<T*>(chunk.entry.range.out) + chunk.begin;
    change_range(from, to, chunk.size, Group{kThreads, static_cast<int>(threadIdx.x), nullptr}, changed);
  });
}

// An element times the factor of its gradient; `zeros`: 0 times NaN or inf is 0.
struct Clipped {
  double factor;
  bool zeros;
  bool narrow;

  GRADSCALE_DEVICE Clipped(double factor, bool zeros)
      : factor(factor), zeros(zeros && factor == 0), narrow(Scaling{1, factor, false}.is_normal_in_float()) {
  }
  template <class A>
  GRADSCALE_DEVICE A operator()(A x) const {
    return narrow ? x * static_cast<A>(factor) : static_cast<A>(zeros ? 0 : static_cast<double>(x) * factor);
  }
};

} // namespace gradscale
