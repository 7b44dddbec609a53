// The kernels that add up the losses of rows.
//
// loss_totals    one thread a sample: L_b, the loss, the means and shares of the heads. Sums are taken in a fixed
// order: a block
//                adds up its threads, and the last block that is done adds up the blocks. Reads 4 bytes a row.
// count_unmasked one block a head counts the unmasked entries; only where a mean is taken over those.
#pragma once

#include "../math/rows.cuh"
#include "block_of_rows.cuh"

namespace gradscale {

// All threads of the block set to 0 the gradients of the samples whose threads ask for it.
GRADSCALE_DEVICE void clear_gradients(const LossTable& table, bool clears, int64_t sample, int64_t* clearing) {
  clearing[threadIdx.x] = clears ? sample : -1;
  __syncthreads();
  for (int i = 0; i < kThreads; ++i) {
    if (clearing[i] < 0) {
      continue;
    }
    for (int64_t k = 0; k < table.num_segments; ++k) {
      const DeviceSegment& segment = table.segment(k);
      const int64_t width = segment.gradient == nullptr ? 0 : table.head(segment.head).width;
      dispatch_element(static_cast<Element>(segment.gradient_element), [&](auto type) {
        using T = decltype(type);
        T* row = static_cast<T*>(segment.gradient) + clearing[i] * segment.gradient_stride;
        for (int64_t j = threadIdx.x; j < width; j += kThreads) {
          row[j] = T{};
        }
      });
    }
  }
}

// The losses of a sample, summed over heads and steps: as they are weighted, and with the factors of the reduction.
struct SampleLoss {
  double loss;
  double reduced;
  bool has_entries; // false where every entry is masked
};

// Adds up the losses of this thread's sample, and leaves the sums of its block over each head. Only a sample that
// `counts` adds to the shares of the heads.
GRADSCALE_DEVICE SampleLoss
add_heads(const TotalsArguments& arguments, const Group& block, int64_t sample, bool counts) {
  const LossTable& table = arguments.table;
  const PartialSums& partial = arguments.partial;
  const bool active = sample < arguments.batch;
  SampleLoss result{0, 0, false};
  const int64_t own = active ? sample : 0; // row 0 is there unless the batch is empty
  const double importance = counts ? table.head(0).coefficients.importance_weights.at(own, 0) : 0;
  int64_t next = 0;
  for (int64_t h = 0; h < table.num_heads; ++h) {
    const DeviceHead& head = table.head(h);
    const Coefficients& c = head.coefficients;
    double plain = 0;
    double weighted = 0;
    double unmasked = 0;
    const int32_t num_segments = arguments.batch == 0 ? 0 : head.num_segments;
#pragma unroll 4
    for (int32_t i = 0; i < num_segments; ++i) { // all numbers are asked for before the first is waited for
      const DeviceSegment& segment = table.segment(next + i);
      const double loss = head.loss.from(segment.step - head.head.first_step).load(own);
      const double weight = segment.step_weight * c.step_weights.at(own, segment.step);
      const bool is_unmasked = active && c.mask.includes(own, segment.step);
      plain += is_unmasked ? loss : 0;
      weighted += is_unmasked ? weight * loss : 0;
      unmasked += is_unmasked ? 1 : 0;
    }
    next += head.num_segments;
    const double reduced = head_factor(head) * weighted;
    result.loss += head.head.weight * weighted;
    result.reduced += reduced;
    result.has_entries |= unmasked != 0;
    const double share = block.sum(counts && unmasked != 0 ? importance * reduced : 0);
    plain = block.sum(plain);
    unmasked = block.sum(unmasked);
    if (threadIdx.x == 0) {
      partial.at(blockIdx.x, partial.index_of(PartialSums::kPlain, h)) = plain;
      partial.at(blockIdx.x, partial.index_of(PartialSums::kUnmasked, h)) = unmasked;
      partial.at(blockIdx.x, partial.index_of(PartialSums::kShare, h)) = share;
    }
  }
  return result;
}

// The part of a sample in the sums of its block.
struct Contribution {
  double loss;
  double nonfinite; // 1 where the sample's loss is not finite
};

// Stores the losses of a sample, and returns its part in the sums.
GRADSCALE_DEVICE Contribution
store_sample(const LossTable& table, const TotalsArguments& arguments, int64_t sample, const SampleLoss& losses) {
  Contribution result{0, 0};
  arguments.per_sample.store(sample, losses.loss);
  const double importance_weight = table.head(0).coefficients.importance_weights.at(sample, 0);
  result.nonfinite = std::isfinite(arguments.per_sample.load(sample)) ? 0 : 1; // as the user sees it, in float
  // A weight that is not finite adds nothing to a sample without entries.
  result.loss = losses.has_entries ? importance_weight * losses.reduced : 0;
  if (arguments.skip_nonfinite) {
    arguments.skipped.store(sample, losses.loss);
    result.loss = result.nonfinite != 0 ? 0 : result.loss;
  }
  if (arguments.each_sample) {
    arguments.loss.store(sample, result.loss);
  }
  return result;
}

// One block adds up the sums of all blocks, in their order.
GRADSCALE_DEVICE void store_totals(const LossTable& table, const TotalsArguments& arguments, const Group& block) {
  const auto total = [&](int64_t index) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < gridDim.x; i += kThreads) {
      sum += arguments.partial.at(i, index);
    }
    return block.sum(sum);
  };
  const double loss = total(0);
  const double num_nonfinite = total(1);
  if (threadIdx.x == 0) {
    if (!arguments.each_sample) {
      arguments.loss.store(0, loss);
    }
    *arguments.num_nonfinite = static_cast<int64_t>(num_nonfinite);
  }
  for (int64_t h = 0; h < table.num_heads; ++h) {
    const double sum = total(arguments.partial.index_of(PartialSums::kPlain, h));
    const double unmasked = total(arguments.partial.index_of(PartialSums::kUnmasked, h));
    const double share = total(arguments.partial.index_of(PartialSums::kShare, h));
    if (threadIdx.x == 0) {
      arguments.head_means.store(h, sum / (unmasked < 1 ? 1 : unmasked));
      arguments.head_losses.store(h, share);
    }
  }
}

GRADSCALE_KERNEL(kThreads, 2) loss_totals(GRADSCALE_ARGUMENT(TotalsArguments) arguments) {
  const LossTable& table = arguments.table;
  GRADSCALE_SHARED(double, shared, kWarps);
  GRADSCALE_SHARED(unsigned, last, 1);
  GRADSCALE_SHARED(int64_t, clearing, kThreads);
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  const int64_t sample = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool active = sample < arguments.batch;
  const SampleLoss losses = add_heads(arguments, block, sample, active);
  const Contribution own = active ? store_sample(table, arguments, sample, losses) : Contribution{0, 0};
  const double loss = block.sum(own.loss);
  const double nonfinite = block.sum(own.nonfinite);
  if (arguments.skip_nonfinite && nonfinite > 0) {
    clear_gradients(table, own.nonfinite != 0, sample, clearing);
    add_heads(arguments, block, sample, active && own.nonfinite == 0); // once more, as it is known now which count
  }
  if (threadIdx.x == 0) {
    arguments.partial.at(blockIdx.x, 0) = loss;
    arguments.partial.at(blockIdx.x, 1) = nonfinite;
    __threadfence(); // the sums are seen before the block is counted
    last[0] = gridDim.x == 1 || atomicAdd(arguments.blocks_done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last[0] != 0) {
    __threadfence();
    store_totals(table, arguments, block);
  }
}

GRADSCALE_KERNEL(kThreads, 2)
count_unmasked(GRADSCALE_ARGUMENT(CountArguments) arguments) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  const DeviceHead& head = arguments.table.head(blockIdx.x);
  double unmasked = 0;
  for (int64_t sample = threadIdx.x; sample < arguments.batch; sample += kThreads) {
    for (int32_t t = 0; t < head.num_segments; ++t) {
      unmasked += head.coefficients.mask.includes(sample, head.head.first_step + t) ? 1 : 0;
    }
  }
  unmasked = block.sum(unmasked);
  if (threadIdx.x == 0) {
    arguments.divisors[blockIdx.x] = unmasked < 1 ? 1 : unmasked;
  }
}

} // namespace gradscale
