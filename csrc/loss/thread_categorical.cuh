// Rows of logits over few bins of a support, a thread each: TwoHot and HLGauss, not raw.
#pragma once

#include "../math/normal_tails.cuh"
#include "thread_rows.cuh"
#include "thread_targets.cuh"

namespace gradscale {

// Targets of scalars have `count` bins with mass from `begin` on. each_bin(function) calls function(bin, mass, kept)
// for these; what it leaves in kept, a float, each_kept(function) gives as function(bin, kept).

template <int width>
class TwoHotOfThread {
 public:
  static constexpr int kBytes = 0; // of shared memory

  GRADSCALE_DEVICE TwoHotOfThread(
      double x, const Head& /*head*/, const Support& support, char* /*shared*/, int /*lane*/)
      : TwoHotOfThread(two_hot(x, support)) {
  }
  GRADSCALE_DEVICE float nan() const {
    return mass_[0] - mass_[0];
  }
  template <class Function>
  GRADSCALE_DEVICE void each_bin(Function function) {
    function(begin_, mass_[0], kept_[0]);
    function(begin_ + 1, mass_[1], kept_[1]);
  }
  template <class Function>
  GRADSCALE_DEVICE void each_kept(Function function) const {
    function(begin_, kept_[0]);
    function(begin_ + 1, kept_[1]);
  }

 private:
  GRADSCALE_DEVICE explicit TwoHotOfThread(const TwoHotTarget& target)
      : begin_(target.begin), mass_{static_cast<float>(1 - target.upper), static_cast<float>(target.upper)} {
  }

  int32_t begin_;
  float mass_[2];
  float kept_[2];
};

template <int width>
class HLGaussOfThread {
 public:
  static constexpr int kBytes = 32 * width * static_cast<int>(sizeof(float));

  GRADSCALE_DEVICE HLGaussOfThread(double x, const Head& head, const Support& support, char* shared, int lane)
      : kept_(reinterpret_cast<float*>(shared) + lane),
        bin_width_(static_cast<float>(0.70710678118654752440 / head.sigma_ratio)) {
    const double position = position_among_bins(transformed_target(x, support), support);
    const int32_t center = position > 0 ? static_cast<int32_t>(position + 0.5) : 0; // in range for NaN too
    const float offset = static_cast<float>(position - center);
    const auto reach = static_cast<int32_t>(kReach / bin_width_ + 1.5f);
    begin_ = center > reach ? center - reach : 0;
    end_ = center + reach < width ? center + reach + 1 : width;
    const float below = static_cast<float>(center) + offset + 0.5f;
    const float above = static_cast<float>(width - 1 - center) - offset + 0.5f;
    first_edge_ = static_cast<float>(begin_ - center) - 0.5f - offset;
    inverse_total_ = 1 / (2 - std::erfc(below * bin_width_) - std::erfc(above * bin_width_));
  }
  GRADSCALE_DEVICE float nan() const {
    return inverse_total_ - inverse_total_;
  }
  template <class Function>
  GRADSCALE_DEVICE void each_bin(Function function) {
    float edge = first_edge_;
    float tail = signed_tail(edge * bin_width_);
#pragma unroll 1
    for (int32_t bin = begin_; bin < end_; ++bin) {
      edge += 1;
      const float next = signed_tail(edge * bin_width_);
      function(bin, mass_between(tail, next) * inverse_total_, kept_[32 * bin]);
      tail = next;
    }
  }
  template <class Function>
  GRADSCALE_DEVICE void each_kept(Function function) const {
#pragma unroll 1
    for (int32_t bin = begin_; bin < end_; ++bin) {
      function(bin, kept_[32 * bin]);
    }
  }

 private:
  static constexpr float kReach = 6; // erf is 1 from 5.93 on, in double

  float* kept_;
  float bin_width_; // in units of sqrt(2) standard deviations
  int32_t begin_;
  int32_t end_;
  float first_edge_; // the lower one of the first bin, from the target, in bins
  float inverse_total_;
};

// The computation of 32 rows between logits of type T and scalars, with gradients of type G.
template <class T, class G, int width, class Target, Transform transform, bool smooths>
class ThreadCategorical : RowsOfThreads<T, G, width> {
  using Base = RowsOfThreads<T, G, width>;
  using Row = ThreadRow<T, width>;
  static constexpr int kGroup = larger_of(Base::Logits::kUnit, Base::Gradient::kUnit);

 public:
  static constexpr int kBlocks = blocks_of_threads(width);
  static constexpr bool kHasHalves = std::is_same_v<G, BFloat16Bits>;
  static constexpr int kSharedBytes = Base::kBytes + Target::kBytes;

  GRADSCALE_DEVICE ThreadCategorical(const BlockOfRows& block, const WarpOfRows& rows, char* shared)
      : Base(rows, shared), block_(block), for_target_(shared + Base::kBytes), support_(block.head.head.support) {
    support_.num_bins = width;
    support_.transform = transform;
    support_.raw = false;
  }

  GRADSCALE_DEVICE void compute() {
    const DeviceSegment& segment = block_.segment;
    NotStaged none;
    Prepared prepared = this->stage(segment.prediction, segment.prediction_stride, none, [&](int64_t own) {
      const double x = block_.template target<double>(own);
      return Prepared{block_.factor_of(own), Target(x, block_.head.head, support_, for_target_, this->rows_.lane)};
    });
    Row row(this->logits_);
    const ThreadSoftmax sums = softmax_of<kGroup>(row);
    const float loss = loss_of(sums, prepared);
    if (this->rows_.is_active()) {
      block_.store_loss(this->rows_.own(), loss, prepared.factor.counts);
      block_.store_detail(this->rows_.own(), decoded_moment(sums.moment * sums.inverse_sum, support_));
    }
    if constexpr (Base::kWantsGradient) {
      put_gradient(row, sums, prepared);
      this->write_gradient(segment.gradient, segment.gradient_stride, prepared.factor.counts);
    }
  }

 private:
  struct Prepared {
    RowFactor factor;
    Target target;
  };

  GRADSCALE_DEVICE float everywhere() const {
    return static_cast<float>(block_.head.head.label_smoothing / width);
  }

  // log(sum) - sum_j t_j (x_j - maximum). The gradients of the target's bins are kept there.
  GRADSCALE_DEVICE float loss_of(const ThreadSoftmax& sums, Prepared& prepared) const {
    const float share = smooths ? static_cast<float>(1 - block_.head.head.label_smoothing) : 1.0f;
    const float c = static_cast<float>(prepared.factor.coefficient);
    float cost = smooths ? everywhere() * sums.differences : 0.0f;
    prepared.target.each_bin([&](int32_t bin, float mass, float& kept) {
      const float difference = to_accumulate(this->logits_[bin]) - sums.maximum;
      const float t = smooths ? mass * share : mass;
      cost += product(t, difference); // an illegal bin (-inf) without mass costs nothing
      kept = c * (approximate_exp(difference) * sums.inverse_sum - (smooths ? t + everywhere() : t));
    });
    return std::log(sums.sum) - cost;
  }

  // Leaves c (p_j - t_j) in shared memory.
  GRADSCALE_DEVICE void put_gradient(const Row& row, const ThreadSoftmax& sums, const Prepared& prepared) const {
    const float c = static_cast<float>(prepared.factor.coefficient);
    const float factor = c * sums.inverse_sum + prepared.target.nan();
    const float offset = smooths ? c * everywhere() : 0.0f;
#pragma unroll
    for (int first = 0; first < width; first += kGroup) {
      float values[kGroup];
      row.get_exponentials(first, sums.maximum, values);
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        values[k] = smooths ? values[k] * factor - offset : values[k] * factor;
      }
      this->gradient_.set(first, values);
    }
    prepared.target.each_kept([&](int32_t bin, float kept) {
      this->gradient_[bin] = from_accumulate<typename Base::GradientElement, float>(kept);
    });
  }

  const BlockOfRows& block_;
  char* for_target_;
  Support support_;
};

template <Kind kind, class T, class G, int width, Transform transform, bool smooths>
using CategoricalThreadRows = RowsByThreads<ThreadCategorical<
    T,
    G,
    width,
    std::conditional_t<kind == Kind::two_hot, TwoHotOfThread<width>, HLGaussOfThread<width>>,
    transform,
    smooths>>;

} // namespace gradscale
