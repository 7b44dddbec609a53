// How the blocks of a launch share the ranges of a list.
#pragma once

#include "../../cuda/norms.cuh"
#include "../kernels.h"

namespace gradscale {

// The index of this warp among all warps of the launch.
GRADSCALE_DEVICE int64_t warp_index() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}

// True for the blocks whose warps each process one of the singles. If their number is not a multiple of kWarps, the
// last warps of the last block have none.
template <class List>
GRADSCALE_DEVICE bool is_block_of_singles(const List& list) {
  return blockIdx.x < list.blocks_of_singles();
}

// The chunk of a tensor that a block processes.
struct ChunkOfTensor {
  const ListedTensor& tensor;
  int64_t begin;
  int32_t size;
};

// The chunk of this block. `bytes` is the size of a full chunk.
template <class List>
GRADSCALE_DEVICE ChunkOfTensor chunk_of_block(const List& list, int64_t bytes) {
  const ListedTensor& tensor = list.range_for_block(blockIdx.x);
  const int64_t chunk = elements_per_chunk(tensor, bytes);
  const int64_t begin = (static_cast<int32_t>(blockIdx.x) - tensor.first_block) * chunk;
  const int64_t rest = tensor.size - begin;
  return {tensor, begin, static_cast<int32_t>(rest < chunk ? rest : chunk)};
}

} // namespace gradscale
