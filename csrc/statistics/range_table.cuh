// Access to many tensors in a launch with one block per chunk.
#pragma once

#include "../cuda/norms.cuh"
#include "calls.h"

namespace gradscale {

// The tensor that this block works on, and its chunk of that tensor.
struct ChunkOfTensor {
  const RangeTable::Entry& entry;
  int64_t begin;
  int32_t size;
};

// Returns the chunk of this block. `bytes` is the size of a full chunk.
GRADSCALE_DEVICE ChunkOfTensor block_chunk(const RangeTable& table, int64_t bytes) {
  const RangeTable::Entry& entry = table.entry_for_block(blockIdx.x);
  const int64_t chunk = elements_per_chunk(entry.range, bytes);
  const int64_t begin = (blockIdx.x - entry.first_block) * chunk;
  const int64_t rest = entry.range.size - begin;
  return {entry, begin, static_cast<int32_t>(rest < chunk ? rest : chunk)};
}

} // namespace gradscale
