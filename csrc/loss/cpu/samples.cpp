// Sums over samples, which follow the rows: the loss of each sample, and what a block of samples adds to the results of
// the call. This file includes itself once for each instruction set.
#ifndef GRADSCALE_VARIANT
#include "../../cpu/scratch.h"
#include "../../formulas/weighted_sum.h"
#include "../kernels.h"

#define GRADSCALE_KERNELS "../loss/cpu/samples.cpp"
#include "../../cpu/each_instruction_set.h"

namespace gradscale {

SumSamples sum_samples_kernel = GRADSCALE_CPU_KERNEL(sum_samples);

} // namespace gradscale

#else

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// A block of samples, with lists of a number for each. Loops over the lists compute whole vectors, so that each sample
// is rounded alike: the numbers after the last sample are 0.
template <class T>
class BlockOfSamples {
 public:
  BlockOfSamples(const Pass& pass, int64_t first, double* scratch, BlockSums& sums)
      : pass_(pass),
        first_(first),
        count_(pass.batch - first < kSamplesOfBlock ? pass.batch - first : kSamplesOfBlock),
        padded_(padded_width(count_)),
        sums_(sums),
        losses_(scratch),
        values_(scratch + kSamplesOfBlock),
        by_head_(scratch + 2 * kSamplesOfBlock) {
  }

  // Stores the loss L_b of each sample, and adds up everything else.
  void run() {
    fill(losses_, 0);
    const Segment* segments = pass_.segments;
    for (int64_t h = 0; h < pass_.num_heads; ++h) {
      add_head(h, segments);
      segments += pass_.steps_of(pass_.heads[h]);
    }
    store_samples();
    add_shares();
    segments = pass_.segments;
    for (int64_t h = 0; h < pass_.num_heads; ++h) {
      add_metrics(segments, pass_.steps_of(pass_.heads[h]), sums_.heads[h]);
      if (pass_.coefficients[h].approx_kl.data != nullptr) {
        add_policy(h, segments);
      }
      segments += pass_.steps_of(pass_.heads[h]);
    }
  }

 private:
  // The sums of a head's samples over its unmasked steps, as in StepSums.
  double* weighted(int64_t h) const {
    return by_head_ + 2 * h * kSamplesOfBlock;
  }
  double* unmasked(int64_t h) const {
    return weighted(h) + kSamplesOfBlock;
  }
  StepSums sums_of(int64_t h, int64_t b) const {
    return {0, weighted(h)[b], unmasked(h)[b]};
  }
  bool is_finite(int64_t b) const { // as the user reads it
    return std::isfinite(static_cast<T>(losses_[b]));
  }
  void fill(double* list, double value) const {
    for (int64_t b = 0; b < padded_; ++b) {
      list[b] = b < count_ ? value : 0;
    }
  }

  // Adds a head's losses, weighted and summed over its steps, to the loss of each sample. `segments` are the segments
  // of this head, as below.
  void add_head(int64_t h, const Segment* segments) {
    const Head& head = pass_.heads[h];
    const Coefficients& coefficients = pass_.coefficients[h];
    const int64_t steps = pass_.steps_of(head);
    const bool is_masked = coefficients.mask.data != nullptr;
    fill(weighted(h), 0);
    fill(unmasked(h), is_masked ? 0 : static_cast<double>(steps));
    double losses = 0, entries = 0;
    for (int64_t t = 0; t < steps; ++t) {
      const bool is_plain = !is_masked && coefficients.step_weights.values.data == nullptr;
      losses += is_plain ? add_step(h, segments[t]) : add_weighted_step(h, segments[t]);
    }
    const double weight = head.weight, head_weight = coefficients.head_weight();
#pragma omp simd reduction(+ : entries)
    for (int64_t b = 0; b < padded_; ++b) {
      entries += unmasked(h)[b];
      losses_[b] += sums_of(h, b).loss(weight, head_weight);
    }
    sums_.heads[h].losses = losses;
    sums_.heads[h].unmasked = entries;
  }

  // Adds a step without tensors of weights to weighted(h). Returns the sum of its losses.
  double add_step(int64_t h, const Segment& segment) const {
    const int64_t stride = segment.loss.stride;
    const T* losses = static_cast<const T*>(segment.loss.data) + first_ * stride;
    double *values = values_, *to = weighted(h), sum = 0;
    fill(values, 0);
    for (int64_t b = 0; b < count_ && stride == 1; ++b) {
      values[b] = losses[b];
    }
    for (int64_t b = 0; b < count_ && stride != 1; ++b) {
      values[b] = losses[b * stride];
    }
    const double weight = segment.step_weight;
#pragma omp simd reduction(+ : sum)
    for (int64_t b = 0; b < padded_; ++b) {
      sum += values[b];
      to[b] += weight * values[b];
    }
    return sum;
  }

  // The same for any step, which is also added to unmasked(h).
  double add_weighted_step(int64_t h, const Segment& segment) const {
    const Coefficients& coefficients = pass_.coefficients[h];
    double sum = 0;
    for (int64_t b = 0; b < count_; ++b) {
      StepSums of_sample{sum, weighted(h)[b], 0};
      const bool is_unmasked = coefficients.mask.includes(first_ + b, segment.step);
      of_sample.add(is_unmasked, segment.loss.load(first_ + b), coefficients.step_weight(segment, first_ + b));
      sum = of_sample.losses;
      weighted(h)[b] = of_sample.weighted;
      unmasked(h)[b] += coefficients.mask.data == nullptr ? 0 : of_sample.unmasked;
    }
    return sum;
  }

  void store_samples() {
    pass_.per_sample.store(first_, count_, losses_);
    int64_t finite = 0;
#pragma omp simd reduction(+ : finite)
    for (int64_t b = 0; b < count_; ++b) {
      finite += is_finite(b) ? 1 : 0;
    }
    sums_.total.nonfinite = static_cast<double>(count_ - finite);
    for (int64_t b = 0; b < count_ && finite < count_ && pass_.skips_nonfinite; ++b) {
      for (int64_t s = 0; s < pass_.num_segments && !is_finite(b); ++s) {
        pass_.segments[s].metrics[first_ + b].gradient_square = 0;
        pass_.clear_gradients(pass_.segments[s], first_ + b);
      }
    }
  }

  // Adds up the part of each sample in the loss of the call.
  void add_shares() {
    double* parts = unmasked(pass_.num_heads);
    fill(parts, 0);
    for (int64_t h = 0; h < pass_.num_heads; ++h) {
      const Coefficients& coefficients = pass_.coefficients[h];
      const StepWeight importance = coefficients.importance_weights;
      double *weights = values_, *shares = weighted(pass_.num_heads);
      fill(weights, 1);
      for (int64_t b = 0; b < count_ && importance.values.data != nullptr; ++b) {
        weights[b] = importance.at(first_ + b, 0);
      }
      const double head_weight = coefficients.head_weight(), factor = coefficients.factor;
      const bool skips = pass_.skips_nonfinite;
      double sum = 0, weighted_sum = 0;
#pragma omp simd reduction(+ : sum, weighted_sum)
      for (int64_t b = 0; b < padded_; ++b) {
        const bool counts = !skips || is_finite(b);
        const StepSums own = sums_of(h, b);
        const double share = counts ? own.share(weights[b], factor) : 0;
        const double weighted_share = counts ? own.weighted_share(share, head_weight) : 0;
        sum += share;
        weighted_sum += weighted_share;
        shares[b] = share;
        parts[b] += weighted_share;
      }
      sums_.heads[h].share = sum;
      sums_.heads[h].weighted_share = weighted_sum;
      if (pass_.each_sample && coefficients.share.data != nullptr) {
        coefficients.share.store(first_, count_, shares);
      }
    }
    double loss = 0;
#pragma omp simd reduction(+ : loss)
    for (int64_t b = 0; b < padded_; ++b) {
      loss += parts[b];
    }
    sums_.total.loss = loss;
    if (pass_.each_sample) {
      pass_.loss.store(first_, count_, parts);
    }
  }

  // Adds up the squares of a head's gradient, and finds its largest logit.
  void add_metrics(const Segment* segments, int64_t steps, HeadSums& sums) const {
    double squares = 0, largest = 0;
    for (int64_t t = 0; t < steps; ++t) {
      const RowMetrics* rows = segments[t].metrics + first_;
#pragma omp simd reduction(+ : squares) reduction(max : largest)
      for (int64_t b = 0; b < count_; ++b) {
        squares += rows[b].gradient_square;
        largest = rows[b].largest_logit > largest ? rows[b].largest_logit : largest;
      }
    }
    sums.squares = squares;
    sums.largest_logit = largest;
  }

  // Adds up the differences of a policy from the one that chose the actions.
  void add_policy(int64_t h, const Segment* segments) const {
    const StepMask& mask = pass_.coefficients[h].mask;
    double divergence = 0, clipped = 0;
    for (int64_t t = 0; t < pass_.steps_of(pass_.heads[h]); ++t) {
      const auto* rows = static_cast<const typename PolicyScore<T>::Difference*>(
          pass_.fields[segments[t].first_field + kDifferences].data);
#pragma omp simd reduction(+ : divergence, clipped)
      for (int64_t b = first_; b < first_ + count_; ++b) {
        const bool counts = mask.includes(b, segments[t].step);
        divergence += counts ? rows[b].divergence : T(0);
        clipped += counts ? rows[b].clipped : T(0);
      }
    }
    sums_.heads[h].divergence = divergence;
    sums_.heads[h].clipped = clipped;
  }

  const Pass& pass_;
  const int64_t first_, count_, padded_;
  BlockSums& sums_;
  double *losses_, *values_, *by_head_; // L_b, a list for intermediate numbers, and lists of the heads
};

void sum_samples(const Pass& pass, bool is_double, int64_t first, double* scratch, BlockSums& sums) {
  is_double ? BlockOfSamples<double>(pass, first, scratch, sums).run()
            : BlockOfSamples<float>(pass, first, scratch, sums).run();
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
