// The kernels of the multi-step loss.
//
// loss_rows      one launch for the rows of all heads and steps. Logits and targets are read once, gradients written
//                once: bytes = logits + targets + gradients. A block has rows of one segment; a group of threads has a
//                row: threads_for_row() of them, so that short rows share a warp and long ones take a block.
// loss_totals    one thread a sample: L_b, the loss, the means of the heads. Sums are taken in a fixed order: a block
//                adds up its threads, and the last block that is done adds up the blocks. Reads 4 bytes a row.
// count_unmasked one block a head counts the unmasked entries; only where a mean is taken over those.
#pragma once

#include "rows.cuh"

namespace gradscale {

// ---- Rows -----------------------------------------------------------------------------------------------------------

struct RowsArguments {
  int64_t batch;
  unsigned* blocks_done; // a counter for loss_totals, which comes next: set to 0
  Slab grad_output;      // no data: this is the forward pass
  bool has_gradients;    // gradients for grad_output 1 are there
  Slab skipped;          // the backward pass skips samples whose loss here is not finite; no data: it skips none
};

GRADSCALE_DEVICE int64_t segment_of_block(const LossTable& table, int64_t block) {
  int64_t low = 0;
  int64_t high = table.num_segments;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (table.segment(middle).first_block <= block ? low : high) = middle;
  }
  return low;
}

GRADSCALE_DEVICE double head_factor(const DeviceHead& head) {
  const double factor = head.coefficients.factor;
  return head.num_unmasked == nullptr || *head.num_unmasked <= 1 ? factor : factor / *head.num_unmasked;
}

template <class A>
GRADSCALE_KERNEL(kThreads, 1)
loss_rows(GRADSCALE_ARGUMENT(LossTable) table, RowsArguments arguments) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const bool backward = arguments.grad_output.data != nullptr;
  if (backward && arguments.has_gradients && arguments.grad_output.stride == 0 && arguments.grad_output.load(0) == 1) {
    return;
  }
  if (!backward && blockIdx.x == 0 && threadIdx.x == 0) {
    *arguments.blocks_done = 0;
  }
  const DeviceSegment& segment = table.segment(segment_of_block(table, blockIdx.x));
  const DeviceHead& head = table.head(segment.head);
  const RowOfThread own(blockIdx.x - segment.first_block, head.threads_per_row, arguments.batch, shared);
  const int64_t row = own.row;
  bool counts = head.coefficients.mask.includes(row, segment.step);
  double coefficient = 0;
  if (segment.gradient != nullptr) {
    const Coefficients& c = head.coefficients;
    coefficient = head_factor(head) * segment.step_weight * segment.gradient_scale *
                  c.step_weights.at(row, segment.step) * c.step_gradient_scale.at(row, segment.step) *
                  c.importance_weights.at(row, 0);
    if (backward) {
      coefficient *= arguments.grad_output.load(row);
      counts = counts && (arguments.skipped.data == nullptr || std::isfinite(arguments.skipped.load(row)));
    }
  }
  const RowTask task{
      segment,
      head,
      head.raw_centers < 0 ? nullptr : table.table.at<char>(head.raw_centers),
      own.group,
      row,
      own.active ? static_cast<int32_t>(head.width) : 0,
      own.active,
      counts,
      /*writes_outputs=*/!backward,
      coefficient};
  run_row<A>(task);
}

// ---- Sums over samples ----------------------------------------------------------------------------------------------

// The sums of each block: contributions to the loss, samples that are not finite, and the losses and unmasked entries
// of every head.
struct PartialSums {
  double* data; // [blocks][2 + 2 num_heads]
  int64_t num_heads;

  GRADSCALE_HOST_DEVICE int64_t size() const {
    return 2 + 2 * num_heads;
  }
  GRADSCALE_HOST_DEVICE double& at(int64_t block, int64_t index) const {
    return data[block * size() + index];
  }
};

struct TotalsArguments {
  int64_t batch;
  bool each_sample;
  bool skip_nonfinite;
  Slab per_sample;
  Slab skipped;
  Slab loss;
  Slab head_means;
  int64_t* num_nonfinite;
  PartialSums partial;
  unsigned* blocks_done;
};

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
};

// Adds up the losses of this thread's sample, and leaves the sums of its block over each head.
GRADSCALE_DEVICE SampleLoss
add_heads(const LossTable& table, const PartialSums& partial, const Group& block, int64_t sample, bool active) {
  SampleLoss result{0, 0};
  int64_t next = 0;
  for (int64_t h = 0; h < table.num_heads; ++h) {
    const DeviceHead& head = table.head(h);
    const Coefficients& c = head.coefficients;
    double plain = 0;
    double weighted = 0;
    double unmasked = 0;
    for (int32_t i = 0; i < head.num_segments; ++i, ++next) {
      const DeviceSegment& segment = table.segment(next);
      if (active && c.mask.includes(sample, segment.step)) {
        const double loss = head.loss.from(segment.step - head.head.first_step).load(sample);
        plain += loss;
        weighted += segment.step_weight * c.step_weights.at(sample, segment.step) * loss;
        unmasked += 1;
      }
    }
    result.loss += head.head.weight * weighted;
    result.reduced += head_factor(head) * weighted;
    plain = block.sum(plain);
    unmasked = block.sum(unmasked);
    if (threadIdx.x == 0) {
      partial.at(blockIdx.x, 2 + h) = plain;
      partial.at(blockIdx.x, 2 + table.num_heads + h) = unmasked;
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
  result.nonfinite = std::isfinite(arguments.per_sample.load(sample)) ? 0 : 1; // as the user sees it, in float
  result.loss = table.head(0).coefficients.importance_weights.at(sample, 0) * losses.reduced;
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
    const double sum = total(2 + h);
    const double unmasked = total(2 + table.num_heads + h);
    if (threadIdx.x == 0) {
      arguments.head_means.store(h, sum / (unmasked < 1 ? 1 : unmasked));
    }
  }
}

GRADSCALE_KERNEL(kThreads, 2) loss_totals(GRADSCALE_ARGUMENT(LossTable) table, TotalsArguments arguments) {
  GRADSCALE_SHARED(double, shared, kWarps);
  GRADSCALE_SHARED(unsigned, last, 1);
  GRADSCALE_SHARED(int64_t, clearing, kThreads);
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  const int64_t sample = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool active = sample < arguments.batch;
  const SampleLoss losses = add_heads(table, arguments.partial, block, sample, active);
  const Contribution own = active ? store_sample(table, arguments, sample, losses) : Contribution{0, 0};
  const double loss = block.sum(own.loss);
  const double nonfinite = block.sum(own.nonfinite);
  if (arguments.skip_nonfinite && nonfinite > 0) {
    clear_gradients(table, own.nonfinite != 0, sample, clearing);
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
count_unmasked(GRADSCALE_ARGUMENT(LossTable) table, int64_t batch, double* num_unmasked) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const Group block{kThreads, static_cast<int>(threadIdx.x), shared};
  const DeviceHead& head = table.head(blockIdx.x);
  double unmasked = 0;
  for (int64_t sample = threadIdx.x; sample < batch; sample += kThreads) {
    for (int32_t t = 0; t < head.num_segments; ++t) {
      unmasked += head.coefficients.mask.includes(sample, head.head.first_step + t) ? 1 : 0;
    }
  }
  unmasked = block.sum(unmasked);
  if (threadIdx.x == 0) {
    num_unmasked[blockIdx.x] = unmasked;
  }
}

} // namespace gradscale
