// The sum of squares of many tensors. The gradient is computed by scaled_units (clip_gradients.cuh).
//
// sums_of_squares   one warp for a tensor of up to 16 KB, one block for each chunk of a larger one: elements are read
//                   once;
// squares_total     one block adds the sums, in their order.
#pragma once

#include "lists.cuh"

namespace gradscale {

template <class List>
GRADSCALE_KERNEL(kThreads, 2)
sums_of_squares(GRADSCALE_ARGUMENT(SquaresArguments<List>) arguments) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const List& list = arguments.list;
  const auto add = [&](const ListedTensor& tensor, int64_t begin, int32_t size, const ThreadGroup& group, double* sum) {
    dispatch_element(tensor.element, [&](auto type) {
      using T = decltype(type);
      const PowerSum squares = range_power_sum(static_cast<const T*>(tensor.data) + begin, size, 2.0, group);
      if (group.rank == 0) {
        const double scale = squares.root * squares.root;
        *sum = squares.sum * scale * scale;
      }
    });
  };
  if (is_block_of_singles(list)) {
    const int64_t index = warp_index();
    if (index < list.singles) {
      const ListedTensor& tensor = list.ranges[index];
      add(tensor, 0, static_cast<int32_t>(tensor.size), warp_threads(), arguments.sums + index);
    }
    return;
  }
  const ChunkOfTensor chunk = chunk_of_block(list, kChunkOfSquares);
  double* const sum = arguments.sums + list.singles + (blockIdx.x - list.blocks_of_singles());
  add(chunk.tensor, chunk.begin, chunk.size, block_threads(shared), sum);
}

GRADSCALE_KERNEL(kThreads, 2) squares_total(GRADSCALE_ARGUMENT(SquaresTotal) arguments) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const ThreadGroup block = block_threads(shared);
  double sum = 0;
  for (int64_t i = threadIdx.x; i < arguments.count; i += kThreads) {
    sum += arguments.sums[i];
  }
  sum = block.sum(sum);
  if (threadIdx.x == 0) {
    arguments.loss.store(0, arguments.factor * sum);
  }
}

} // namespace gradscale
