// The sum of squares of many tensors. The gradient is computed by scaled_units (clip_gradients.cuh).
//
// sums_of_squares   one block for each chunk of each tensor: elements are read once;
// squares_total     one block adds the sums of the chunks, in their order.
#pragma once

#include "../cuda/norms.cuh"
#include "calls.h"

namespace gradscale {

GRADSCALE_KERNEL(kThreads, 2) sums_of_squares(GRADSCALE_ARGUMENT(Squares) arguments) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  const ChunkOfTensor chunk = chunk_of_block(arguments.table, blockIdx.x, kChunkOfTensor);
  dispatch_element(chunk.entry.range.element, [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(chunk.entry.range.data) + chunk.begin;
    const PowerSum squares = range_power_sum(data, chunk.size, 2.0, block);
    if (threadIdx.x == 0) {
      const double scale = squares.root * squares.root;
      arguments.sums[blockIdx.x] = squares.sum * scale * scale;
    }
  });
}

GRADSCALE_KERNEL(kThreads, 2) squares_total(GRADSCALE_ARGUMENT(Squares) arguments) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
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
