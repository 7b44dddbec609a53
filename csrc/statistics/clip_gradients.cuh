// The kernels that clip many gradients by the norm of all of them.
//
// find_clipping     one block: the norm and the factor, from the statistics of the gradients;
// clipped_tensors   one block for each chunk of a gradient: read once, written once, and neither where the factor is 1.
#pragma once

#include "range_table.cuh"

namespace gradscale {

GRADSCALE_KERNEL(kThreads, 2) find_clipping(GRADSCALE_ARGUMENT(ClippingCall) call) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  double largest = 0;
  int64_t nans = 0;
  int64_t infs = 0;
  for (int64_t i = threadIdx.x; i < call.count; i += kThreads) {
    largest = call.values[i] > largest ? call.values[i] : largest;
    nans += call.counts[2 * call.count + i];
    infs += call.counts[3 * call.count + i];
  }
  largest = block.maximum(largest);
  double powers = 0;
  for (int64_t i = threadIdx.x; i < call.count && largest > 0; i += kThreads) {
    powers += power_in_norm(call.values[i] / largest, call.p);
  }
  powers = block.sum(powers);
  nans = block.sum(nans);
  infs = block.sum(infs);
  if (threadIdx.x == 0) {
    const double total = total_norm(largest, powers, call.p, nans, infs);
    store_clipping(total, call.max_norm, call.skip_nonfinite, call.out);
  }
}

GRADSCALE_KERNEL(kThreads, 2)
clipped_tensors(GRADSCALE_ARGUMENT(ClippedTensors) arguments) {
  const double factor = *arguments.factor;
  if (factor == 1) {
    return;
  }
  change_chunk(block_chunk(arguments.table, kChunkOfTensor), Clipped(factor, arguments.zeros));
}

} // namespace gradscale
