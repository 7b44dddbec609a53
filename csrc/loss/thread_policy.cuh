// Rows of logits over few actions, a thread each: SoftCrossEntropy.
#pragma once

#include "thread_policy.h"
#include "thread_rows.cuh"
#include "thread_targets.cuh"

namespace gradscale {

// The computation of 32 rows between logits of type T and targets, with gradients of type G.
template <class T, class G, int width, class Target, int options>
class ThreadPolicy : RowsOfThreads<T, G, width> {
  using Base = RowsOfThreads<T, G, width>;
  using Row = ThreadRow<T, width>;
  static constexpr int kGroup = larger_of(larger_of(Base::Logits::kUnit, Target::kUnit), Base::Gradient::kUnit);
  static constexpr bool kSmoothed = (options & kSmoothsPolicy) != 0;
  static constexpr bool kEntropy = (options & kWithEntropy) != 0;

  struct Sums {
    float maximum;
    float sum; // of e_j = exp(x_j - maximum)
    float inverse_sum;
    float target_sum;
    float correct; // sum of t_j (x_j - maximum)
    float shifted; // sum of e_j (x_j - maximum)
  };

 public:
  static constexpr int kBlocks = blocks_of_threads(width);
  static constexpr bool kHasHalves = std::is_same_v<G, BFloat16Bits>;
  static constexpr int kSharedBytes = Base::kBytes + Target::kBytes;

  GRADSCALE_DEVICE ThreadPolicy(const BlockOfRows& block, const WarpOfRows& rows, char* shared)
      : Base(rows, shared),
        block_(block),
        target_(block.segment, rows, shared + Base::kBytes),
        share_(static_cast<float>(1 - block.head.head.label_smoothing)),
        everywhere_(static_cast<float>(block.head.head.label_smoothing / width)),
        weight_(static_cast<float>(block.head.head.entropy_weight)) {
  }

  GRADSCALE_DEVICE void compute() {
    const DeviceSegment& segment = block_.segment;
    const RowFactor factor = this->stage(segment.prediction, segment.prediction_stride, target_, [&](int64_t own) {
      target_.prepare(segment, own);
      return block_.factor_of(own);
    });
    Row row(this->logits_);
    const Sums sums = sums_of(row);
    if (this->rows_.is_active()) {
      const float entropy = std::log(sums.sum) - sums.shifted * sums.inverse_sum;
      block_.store_loss(this->rows_.own(), loss_of(sums, entropy), factor.counts);
      block_.store_detail(this->rows_.own(), entropy);
    }
    if constexpr (Base::kWantsGradient) {
      put_gradient(row, sums, static_cast<float>(factor.coefficient));
      this->write_gradient(segment.gradient, segment.gradient_stride, factor.counts);
    }
  }

 private:
  // Reads elements first .. first + kGroup of the target, smoothed.
  GRADSCALE_DEVICE void get_target(int first, float (&t)[kGroup]) const {
    target_.get(first, t);
    if constexpr (kSmoothed) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        t[k] = t[k] * share_ + everywhere_;
      }
    }
  }

  // Calls function(first, logits - maximum, targets) for groups of elements.
  template <class Function>
  GRADSCALE_DEVICE void each_group(const Row& row, float maximum, Function function) const {
#pragma unroll
    for (int first = 0; first < width; first += kGroup) {
      float differences[kGroup], t[kGroup];
      row.get(first, differences);
      get_target(first, t);
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        differences[k] -= maximum;
      }
      function(first, differences, t);
    }
    row.forget();
  }

  // Takes the sums of a row, and leaves its exponentials in it.
  GRADSCALE_DEVICE Sums sums_of(Row& row) const {
    const float maximum = row.maximum();
    TwoSums sum, target_sum, correct, shifted;
    each_group(row, maximum, [&](int first, float(&differences)[kGroup], const float(&t)[kGroup]) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        const float e = approximate_exp(differences[k]);
        correct.add(first + k, t[k], differences[k]);
        target_sum.add(first + k, t[k]);
        sum.add(first + k, e);
        shifted.add(first + k, e, larger(differences[k], kLowest)); // 0 for -inf
        differences[k] = e;
      }
      row.keep_exponentials(first, differences);
    });
    float correct_sum = correct.total();
    if (correct_sum != correct_sum) { // perhaps illegal actions (-inf) without mass, which cost nothing
      correct_sum = careful_correct_sum(maximum);
    }
    const float total = sum.total();
    return {maximum, total, approximate_reciprocal(total), target_sum.total(), correct_sum, shifted.total()};
  }

  // The sum of t_j (x_j - maximum) over what has mass. Its row is in shared memory.
  GRADSCALE_DEVICE float careful_correct_sum(float maximum) const {
    float correct = 0;
    each_group(Row(this->logits_), maximum, [&](int, const float(&differences)[kGroup], const float(&t)[kGroup]) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        correct += product(t[k], differences[k]);
      }
    });
    return correct;
  }

  // The sum of t_j log t_j. Small terms, all alike, would each lose the same digits: these are carried along.
  GRADSCALE_DEVICE float negative_entropy() const {
    float sum = 0, lost = 0;
#pragma unroll 1
    for (int first = 0; first < width; first += kGroup) {
      float t[kGroup];
      get_target(first, t);
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        const float term = (t[k] == 0 ? 0.0f : t[k] * std::log(t[k])) - lost;
        const float next = sum + term;
        lost = (next - sum) - term;
        sum = next;
      }
    }
    return sum;
  }

  // sum(t) log(sum) - sum_j t_j (x_j - maximum) - w H(p) [+ sum_j t_j log t_j].
  GRADSCALE_DEVICE float loss_of(const Sums& sums, float entropy) const {
    float loss = sums.target_sum * std::log(sums.sum) - sums.correct;
    if constexpr ((options & kSubtractsEntropy) != 0) {
      loss += negative_entropy();
    }
    if constexpr (kEntropy) {
      loss -= weight_ * entropy;
    }
    return loss;
  }

  // Leaves c (sum(t) p_j - t_j + w p_j (log p_j + H)) in shared memory.
  GRADSCALE_DEVICE void put_gradient(const Row& row, const Sums& sums, float c) const {
    const float factor = sums.target_sum * sums.inverse_sum * c;
    const float constant = -sums.shifted * sums.inverse_sum; // log p_j + H = x_j - maximum + constant
#pragma unroll
    for (int first = 0; first < width; first += kGroup) {
      float values[kGroup], t[kGroup];
      row.get_exponentials(first, sums.maximum, values);
      get_target(first, t);
      if constexpr (kEntropy) { // the entropy's part goes with the target's
        float x[kGroup];
        this->logits_.get(first, x);
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
          t[k] -= weight_ * (values[k] * sums.inverse_sum * (larger(x[k] - sums.maximum, kLowest) + constant));
        }
      }
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        values[k] = values[k] * factor - c * t[k];
      }
      this->gradient_.set(first, values);
    }
  }

  const BlockOfRows& block_;
  Target target_;
  float share_;      // of a smoothed target: what the target itself keeps
  float everywhere_; // and what each action gets
  float weight_;     // of the entropy
};

// U: type of the target's probabilities; int64_t: it is a class.
template <class T, class U, class G, int width, int options>
using PolicyThreadRows = RowsByThreads<ThreadPolicy<
    T,
    G,
    width,
    std::conditional_t<std::is_same_v<U, int64_t>, ClassOfThread<width>, ProbabilitiesOfThread<U, width>>,
    options>>;

} // namespace gradscale
