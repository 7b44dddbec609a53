// The kernels that add up the losses of rows.
//
// loss_totals    the loss L_b of each sample, the loss of the call, and the means and shares of the heads. Reads the
//                loss of each row (4 or 8 bytes) and its metrics (16 bytes).
// count_unmasked one block per head: the number of unmasked entries, where it is the divisor of the head's sum.
//
// With the usual few hundred samples, loss_totals takes the time of its longest chain of dependent loads, shuffles and
// barriers, so the chain is short: a lane has one sample, a warp a part of the steps of one head, and all heads are
// reduced at once, each by a warp of its own. Sums have a fixed order: the parts of a head, then the sets of 32
// samples of a block, then its lanes, and the last block to finish adds up the sums of all blocks.
#pragma once

#include "../../cuda/lanes.cuh"
#include "../../formulas/weighted_sum.h"
#include "block_of_rows.cuh"

namespace gradscale {

// The losses of a sample, summed over heads and steps: L_b, and the sample's part of the loss.
struct SampleLoss {
  double loss;
  double reduced;
};

// 32 samples of a block: their part of the loss, and a bit for each sample whose loss is not finite.
struct SetSums {
  double loss;
  unsigned nonfinite;
};

// The sums over the lanes of a warp.
GRADSCALE_DEVICE HeadSums over_lanes(const HeadSums& own, bool has_old_policy) {
  const ThreadGroup warp = warp_threads();
  return {
      warp.sum(own.losses),
      warp.sum(own.unmasked),
      warp.sum(own.share),
      warp.sum(own.weighted_share),
      warp.sum(own.squares),
      warp.maximum(own.largest_logit),
      has_old_policy ? warp.sum(own.divergence) : 0,
      has_old_policy ? warp.sum(own.clipped) : 0};
}

// A block of loss_totals, as one of its threads sees it. `inside`: the table is in the arguments.
//
// A block repeats for more heads than it has warps. Then each head has one warp, whose lanes read only what they wrote
// themselves, so the next heads need no barrier.
template <bool inside>
class BlockOfSamples {
  const DevicePass& device_;
  const Pass& pass_ = device_.pass;
  HeadSums* parts_;     // [warps of the block, 32], in shared memory, like the next two
  SampleLoss* samples_; // the same for the warps that lead; the others' elements are not used
  SetSums* sets_;       // [sets]
  const char* const table_ = device_.table.template begin<inside>();
  const int lane_ = static_cast<int>(threadIdx.x) % 32, warp_ = uniform(static_cast<int>(threadIdx.x) / 32);
  const int num_parts_ = 1 << device_.part_bits, num_sets_ = 1 << device_.set_bits;
  const int warps_per_head_ = num_parts_ * num_sets_, warps_ = static_cast<int>(blockDim.x) / 32;
  const int heads_at_once_ = warps_ / warps_per_head_, num_heads_ = static_cast<int>(pass_.num_heads);
  const int part_ = warp_ % num_parts_, set_ = warp_ / num_parts_ % num_sets_, head_ = warp_ / warps_per_head_;
  const bool leads_ = part_ == num_parts_ - 1; // adds up the parts of a head; it often has fewer steps than the others
  const int64_t sample_ = (static_cast<int64_t>(blockIdx.x) * num_sets_ + set_) * 32 + lane_;
  const bool active_ = sample_ < pass_.batch;

 public:
  GRADSCALE_DEVICE BlockOfSamples(const DevicePass& device, HeadSums* parts, SampleLoss* samples, SetSums* sets)
      : device_(device), parts_(parts), samples_(samples), sets_(sets) {
  }

  GRADSCALE_DEVICE void run(unsigned& last) const {
    add_heads(active_);
    if (leads_ && head_ == 0) {
      store_samples();
    }
    __syncthreads();
    if (pass_.skips_nonfinite && clear_gradients()) {
      add_heads(active_ && (sets_[set_].nonfinite >> lane_ & 1) == 0); // again, now without the skipped samples
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      LossSums sums{0, 0};
      for (int i = 0; i < num_sets_; ++i) {
        sums.loss += sets_[i].loss;
        sums.nonfinite += __popc(sets_[i].nonfinite);
      }
      device_.partial.losses[blockIdx.x] = sums;
      last = gridDim.x == 1 || count_in_order(device_.blocks_done) == gridDim.x - 1 ? 1 : 0;
    }
    __syncthreads();
    if (last != 0) {
      finish();
    }
  }

 private:
  GRADSCALE_DEVICE const Head& head(int index) const {
    return reinterpret_cast<const Head*>(table_ + device_.heads)[index];
  }
  GRADSCALE_DEVICE const Coefficients& coefficients_of(int head) const {
    return reinterpret_cast<const Coefficients*>(table_ + device_.coefficients)[head];
  }
  GRADSCALE_DEVICE const Segment& segment(int64_t index) const {
    return reinterpret_cast<const Segment*>(table_ + device_.segments)[index];
  }
  GRADSCALE_DEVICE HeadSums& partial(int64_t block, int head) const {
    return device_.partial.heads[block * num_heads_ + head];
  }

  // Adds up the losses of all samples of the block, and stores its sums for each head. A sample adds to the shares and
  // to the squares of the gradients only if it `counts`.
  GRADSCALE_DEVICE void add_heads(bool counts) const {
    SampleLoss own{0, 0};
#pragma unroll 1
    for (int first = 0; first < num_heads_; first += heads_at_once_) {
      const int h = first + head_;
      const bool exists = h < num_heads_;
      parts_[threadIdx.x] = exists && active_ ? add_steps(h, counts) : HeadSums{};
      // Loaded before the barrier, at the same time as the rows of other warps.
      const double importance = leads_ && exists && counts ? coefficients_of(h).importance_weights.at(sample_, 0) : 0;
      __syncthreads();
      if (leads_ && exists) {
        add_parts(h, counts, importance, own);
      }
      samples_[threadIdx.x] = own;
      __syncthreads();
      if (leads_ && exists && set_ == 0) {
        HeadSums sums = parts_[threadIdx.x];
#pragma unroll 1
        for (int i = 1; i < num_sets_; ++i) {
          sums.add(parts_[threadIdx.x + 32 * num_parts_ * i]);
        }
        sums = over_lanes(sums, pass_.has_old_policy);
        if (lane_ == 0) {
          partial(blockIdx.x, h) = sums;
        }
      }
    }
  }

  // This thread's part of the steps of a head. `weighted_share` is the sum of the weighted losses.
  GRADSCALE_DEVICE HeadSums add_steps(int h, bool counts) const {
    const Coefficients& c = coefficients_of(h);
    const auto steps = static_cast<int>(pass_.steps_of(head(h)));
    StepSums own{0, 0, 0};
    HeadSums sums{};
#pragma unroll 3
    for (int t = part_; t < steps; t += num_parts_) { // the loads of three rows are issued before the first is used
      const Segment& s = segment(c.first_segment + t);
      const double loss = s.loss.load(sample_);
      const auto row = load16<RowMetrics>(s.metrics + sample_);
      const bool is_unmasked = c.mask.includes(sample_, s.step);
      own.add(is_unmasked, loss, c.step_weight(s, sample_));
      sums.squares += counts ? row.gradient_square : 0;
      sums.largest_logit = larger(sums.largest_logit, row.largest_logit);
      if (c.approx_kl.data != nullptr && is_unmasked) {
        add_policy(s, sums);
      }
    }
    sums.losses = own.losses;
    sums.unmasked = own.unmasked;
    sums.weighted_share = own.weighted;
    return sums;
  }

  // Adds the difference of this lane's sample from the policy that chose the action.
  GRADSCALE_DEVICE void add_policy(const Segment& s, HeadSums& sums) const {
    const Rows* fields = reinterpret_cast<const Rows*>(table_ + device_.fields) + s.first_field;
    sums.divergence += fields[kDifferences].load(sample_, 0);
    sums.clipped += fields[kDifferences].load(sample_, 1);
  }

  // Adds up the parts of this lane's sample in a head, in the place of the last part, and adds the sample's loss to
  // `own`.
  GRADSCALE_DEVICE void add_parts(int h, bool counts, double importance, SampleLoss& own) const {
    const Coefficients& c = coefficients_of(h);
    HeadSums& sums = parts_[threadIdx.x];
    for (int p = num_parts_ - 1; p > 0; --p) {
      sums.add(parts_[threadIdx.x - 32 * p]);
    }
    const StepSums steps{sums.losses, sums.weighted_share, sums.unmasked};
    const double head_weight = c.head_weight();
    sums.share = counts ? steps.share(importance, c.share_factor()) : 0;
    sums.weighted_share = counts ? steps.weighted_share(sums.share, head_weight) : 0;
    own.loss += steps.loss(head(h).weight, head_weight);
    own.reduced += sums.weighted_share;
    if (pass_.each_sample && active_ && c.share.data != nullptr) {
      c.share.store(sample_, sums.share);
    }
  }

  // Stores the loss of this lane's sample, and what the samples of the set add to the sums of the block.
  GRADSCALE_DEVICE void store_samples() const {
    SampleLoss sample{0, 0};
    for (int i = 0; i < heads_at_once_; ++i) {
      const SampleLoss& of_heads = samples_[threadIdx.x + 32 * warps_per_head_ * i];
      sample.loss += of_heads.loss;
      sample.reduced += of_heads.reduced;
    }
    bool finite = true;
    if (active_) {
      pass_.per_sample.store(sample_, sample.loss);
      const auto rounded = static_cast<float>(sample.loss); // not loaded again, which would take a round to the cache
      finite = pass_.per_sample.is_double ? std::isfinite(sample.loss) : std::isfinite(rounded);
      if (pass_.skips_nonfinite) {
        pass_.skipped.store(sample_, sample.loss);
        sample.reduced = finite ? sample.reduced : 0;
      }
      if (pass_.each_sample) {
        pass_.loss.store(sample_, sample.reduced);
      }
    }
    const double loss = ThreadGroup{32, lane_, nullptr}.sum(sample.reduced);
    const unsigned nonfinite = __ballot_sync(kWholeWarp, !finite);
    if (lane_ == 0) {
      sets_[set_] = {loss, nonfinite};
    }
  }

  // Sets the gradients of the samples whose loss is not finite to 0, with all threads of the block. Returns true if
  // there are such samples.
  GRADSCALE_DEVICE bool clear_gradients() const {
    bool any = false;
#pragma unroll 1
    for (int i = 0; i < num_sets_; ++i) {
#pragma unroll 1
      for (unsigned samples = sets_[i].nonfinite; samples != 0; samples &= samples - 1) {
        any = true;
        const int64_t sample = (static_cast<int64_t>(blockIdx.x) * num_sets_ + i) * 32 + __ffs(samples) - 1;
#pragma unroll 1
        for (int64_t k = 0; k < pass_.num_segments; ++k) {
          const Segment& s = segment(k);
          clear_row(s.gradient, sample, s.width);
          if (s.wants_scales) {
            clear_row(
                reinterpret_cast<const Rows*>(table_ + device_.fields)[s.first_field + kLogStdsGradient],
                sample,
                s.width);
          }
        }
      }
    }
    return any;
  }

  GRADSCALE_DEVICE static void clear_row(const Rows& gradient, int64_t sample, int64_t width) {
    dispatch_element(gradient.element, [&](auto type) {
      using T = decltype(type);
      T* row = static_cast<T*>(gradient.data) + sample * gradient.stride;
      for (int64_t j = threadIdx.x; gradient.data != nullptr && j < width; j += blockDim.x) {
        row[j] = T{};
      }
    });
  }

  // Adds up the sums of all blocks, and stores the results. All warps of a head add up a part of the blocks.
  GRADSCALE_DEVICE void finish() const {
    const int part = warp_ % warps_per_head_;
#pragma unroll 1
    for (int first = 0; first < num_heads_; first += heads_at_once_) {
      const int h = first + head_;
      HeadSums sums{};
#pragma unroll 2
      for (unsigned b = 32 * part + lane_; h < num_heads_ && b < gridDim.x; b += 32 * warps_per_head_) {
        sums.add(partial(b, h));
      }
      parts_[threadIdx.x] = sums;
      __syncthreads();
      if (part == 0 && h < num_heads_) {
#pragma unroll 1
        for (int i = 1; i < warps_per_head_; ++i) {
          sums.add(parts_[threadIdx.x + 32 * i]);
        }
        sums = over_lanes(sums, pass_.has_old_policy);
        if (lane_ == 0) {
          pass_.store_head(h, coefficients_of(h), sums);
        }
      }
    }
    if (warp_ == warps_ - 1) {
      finish_loss();
    }
  }

  GRADSCALE_DEVICE void finish_loss() const {
    LossSums sums{0, 0};
#pragma unroll 8
    for (unsigned b = lane_; b < gridDim.x; b += 32) {
      sums.loss += device_.partial.losses[b].loss;
      sums.nonfinite += device_.partial.losses[b].nonfinite;
    }
    const ThreadGroup warp{32, lane_, nullptr};
    const double loss = warp.sum(sums.loss), nonfinite = warp.sum(sums.nonfinite);
    if (lane_ == 0) {
      if (!pass_.each_sample) {
        pass_.loss.store(0, loss);
      }
      *pass_.num_nonfinite = static_cast<int64_t>(nonfinite);
    }
  }
};

template <bool inside>
GRADSCALE_KERNEL(kTotalsThreads, 2)
loss_totals(GRADSCALE_ARGUMENT(DevicePass) device) {
  GRADSCALE_SHARED(HeadSums, parts, kTotalsThreads);
  GRADSCALE_SHARED(SampleLoss, samples, kTotalsThreads);
  GRADSCALE_SHARED(SetSums, sets, kTotalsThreads / 32);
  GRADSCALE_SHARED(unsigned, last, 1);
  BlockOfSamples<inside>(device, parts, samples, sets).run(last[0]);
}

GRADSCALE_KERNEL(kThreads, 2)
count_unmasked(GRADSCALE_ARGUMENT(DevicePass) device) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const ThreadGroup block = block_threads(shared);
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
