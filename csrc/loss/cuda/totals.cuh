// The kernels that add up the losses of rows.
//
// loss_totals    one thread per sample: the loss L_b of each sample, the loss of the call, and the means and shares of
//                the heads. Sums have a fixed order: a block adds up the numbers of its threads, and the last block to
//                finish adds up the sums of all blocks. Reads the loss of each row (4 or 8 bytes) and its metrics (16
//                bytes).
// count_unmasked one block per head: the number of unmasked entries, where it is the divisor of the head's sum.
#pragma once

#include "../../cuda/rows.cuh"
#include "block_of_rows.cuh"

namespace gradscale {

// Sets the gradients of a sample to 0 if its thread passes clears = true. All threads of the block must call it.
GRADSCALE_DEVICE void clear_gradients(const DevicePass& device, bool clears, int64_t sample, int64_t* clearing) {
  clearing[threadIdx.x] = clears ? sample : -1;
  __syncthreads();
  for (int i = 0; i < kThreads; ++i) {
    if (clearing[i] < 0) {
      continue;
    }
    for (int64_t k = 0; k < device.pass.num_segments; ++k) {
      const Segment& segment = device.segment(k);
      const int64_t width = segment.gradient.data == nullptr ? 0 : segment.width;
      dispatch_element(segment.gradient.element, [&](auto type) {
        using T = decltype(type);
        T* row = static_cast<T*>(segment.gradient.data) + clearing[i] * segment.gradient.stride;
        for (int64_t j = threadIdx.x; j < width; j += kThreads) {
          row[j] = T{};
        }
      });
    }
  }
}

// The losses of a sample, summed over heads and steps: L_b, and the sample's part of the loss.
struct SampleLoss {
  double loss;
  double reduced;
};

// The sums over the samples of a block, from the sums of its threads.
GRADSCALE_DEVICE HeadSums over_block(const HeadSums& own, const Group& block) {
  return {
      block.sum(own.losses),
      block.sum(own.unmasked),
      block.sum(own.share),
      block.sum(own.weighted_share),
      block.sum(own.squares),
      block.maximum(own.largest_logit)};
}

// Adds up the losses of this thread's sample, and stores the block's sums for each head. A sample adds to the shares
// and to the squares of the gradients only if it `counts`.
GRADSCALE_DEVICE SampleLoss add_heads(const DevicePass& device, const Group& block, int64_t sample, bool counts) {
  const Pass& pass = device.pass;
  const bool active = sample < pass.batch;
  SampleLoss result{0, 0};
  const int64_t own = active ? sample : 0; // row 0 exists unless the batch is empty
  int64_t next = 0;
  for (int64_t h = 0; h < pass.num_heads; ++h) {
    const Head& head = device.head(h);
    const Coefficients& c = device.coefficients_of(h);
    HeadSums sums{};
    double weighted = 0;
    const double importance = counts ? c.importance_weights.at(own, 0) : 0;
    const auto num_segments = static_cast<int32_t>(pass.batch == 0 ? 0 : pass.steps_of(head));
#pragma unroll 4
    for (int32_t i = 0; i < num_segments; ++i) { // all loads are issued before the first is waited for
      const Segment& segment = device.segment(next + i);
      const double loss = segment.loss.load(own);
      const double weight = c.step_weight(segment, own);
      const bool is_unmasked = active && c.mask.includes(own, segment.step);
      sums.losses += is_unmasked ? loss : 0;
      weighted += is_unmasked ? weight * loss : 0;
      sums.unmasked += is_unmasked ? 1 : 0;
      const RowMetrics row = segment.metrics[own];
      sums.squares += counts ? row.gradient_square : 0;
      sums.largest_logit = larger(sums.largest_logit, row.largest_logit);
    }
    next += pass.steps_of(head);
    const double head_weight = c.head_weight();
    // A sample without unmasked entries adds 0, also if a weight is not finite.
    sums.share = counts && sums.unmasked != 0 ? importance * (c.share_factor() * weighted) : 0;
    sums.weighted_share = counts && sums.unmasked != 0 ? head_weight * sums.share : 0;
    result.loss += sums.unmasked != 0 ? head.weight * head_weight * weighted : 0;
    result.reduced += sums.weighted_share;
    if (active && pass.each_sample && c.share.data != nullptr) {
      c.share.store(sample, sums.share);
    }
    sums = over_block(sums, block);
    if (threadIdx.x == 0) {
      device.partial.heads[blockIdx.x * pass.num_heads + h] = sums;
    }
  }
  return result;
}

// Stores the losses of a sample, and returns what it adds to the sums of its block.
GRADSCALE_DEVICE LossSums store_sample(const DevicePass& device, int64_t sample, const SampleLoss& losses) {
  const Pass& pass = device.pass;
  LossSums result{0, 0};
  pass.per_sample.store(sample, losses.loss);
  result.nonfinite = std::isfinite(pass.per_sample.load(sample)) ? 0 : 1; // as the user reads it, after rounding
  result.loss = losses.reduced;
  if (pass.skips_nonfinite) {
    pass.skipped.store(sample, losses.loss);
    result.loss = result.nonfinite != 0 ? 0 : result.loss;
  }
  if (pass.each_sample) {
    pass.loss.store(sample, result.loss);
  }
  return result;
}

// One block adds up the sums of all blocks, in their order.
GRADSCALE_DEVICE void store_totals(const DevicePass& device, const Group& block) {
  const Pass& pass = device.pass;
  LossSums own{0, 0};
  for (int64_t i = threadIdx.x; i < gridDim.x; i += kThreads) {
    own.loss += device.partial.losses[i].loss;
    own.nonfinite += device.partial.losses[i].nonfinite;
  }
  const double loss = block.sum(own.loss);
  const double num_nonfinite = block.sum(own.nonfinite);
  if (threadIdx.x == 0) {
    if (!pass.each_sample) {
      pass.loss.store(0, loss);
    }
    *pass.num_nonfinite = static_cast<int64_t>(num_nonfinite);
  }
  for (int64_t h = 0; h < pass.num_heads; ++h) {
    HeadSums sums{};
    for (int64_t i = threadIdx.x; i < gridDim.x; i += kThreads) {
      const HeadSums& part = device.partial.heads[i * pass.num_heads + h];
      sums.losses += part.losses;
      sums.unmasked += part.unmasked;
      sums.share += part.share;
      sums.weighted_share += part.weighted_share;
      sums.squares += part.squares;
      sums.largest_logit = larger(sums.largest_logit, part.largest_logit);
    }
    sums = over_block(sums, block);
    if (threadIdx.x == 0) {
      pass.store_head(h, device.coefficients_of(h), sums);
    }
  }
}

GRADSCALE_KERNEL(kThreads, 2) loss_totals(GRADSCALE_ARGUMENT(DevicePass) device) {
  const Pass& pass = device.pass;
  GRADSCALE_SHARED(double, shared, kWarps);
  GRADSCALE_SHARED(unsigned, last, 1);
  GRADSCALE_SHARED(int64_t, clearing, kThreads);
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  const int64_t sample = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool active = sample < pass.batch;
  const SampleLoss losses = add_heads(device, block, sample, active);
  const LossSums own = active ? store_sample(device, sample, losses) : LossSums{0, 0};
  const double loss = block.sum(own.loss);
  const double nonfinite = block.sum(own.nonfinite);
  if (pass.skips_nonfinite && nonfinite > 0) {
    clear_gradients(device, own.nonfinite != 0, sample, clearing);
    add_heads(device, block, sample, active && own.nonfinite == 0); // again, now without the skipped samples
  }
  if (threadIdx.x == 0) {
    device.partial.losses[blockIdx.x] = {loss, nonfinite};
    __threadfence(); // other blocks see the sums before the block is counted
    last[0] = gridDim.x == 1 || atomicAdd(device.blocks_done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last[0] != 0) {
    __threadfence();
    store_totals(device, block);
  }
}

GRADSCALE_KERNEL(kThreads, 2)
count_unmasked(GRADSCALE_ARGUMENT(DevicePass) device) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  const Head& head = device.head(blockIdx.x);
  const Coefficients& c = device.coefficients_of(blockIdx.x);
  double unmasked = 0;
  for (int64_t sample = threadIdx.x; sample < device.pass.batch; sample += kThreads) {
    for (int64_t step = head.first_step; step < device.pass.steps; ++step) {
      unmasked += c.mask.includes(sample, step) ? 1 : 0;
    }
  }
  unmasked = block.sum(unmasked);
  if (threadIdx.x == 0 && c.counts_unmasked) {
    *c.entries = unmasked;
  }
}

} // namespace gradscale
