// Rows of logits over the bins of a support, by warps that walk over them: float and half types, a width that is known
// at compile time, any distance between rows.
//
// A block has four warps, and as many registers a thread as leave a multiprocessor 20 to 32 warps: what these have on
// their way, a row each, is 30 to 70 KB. Where rows are few, each has a warp: it waits for memory twice, for itself and
// for the bins of its target, and for some 40 instructions one after the other.
//
// A warp has up to 32 rows, one after the other. Lane r knows of row r what is one number a row: target, factors, and
// in the end the loss and the decoded prediction, so that their formulas, in double, are computed once for 32 rows. All
// lanes have a part of each row's elements. Bytes: logits are read once, gradients written once, and the bins of a
// target both once more, from and to the cache.
#pragma once

#include "../math/normal_tails.cuh"
#include "../math/warp_row.cuh"
#include "block_of_rows.cuh"
#include "warp_rows.h"

namespace gradscale {

// Pointers to gradients of type void are never read.
template <class G>
using GradientOf = std::conditional_t<std::is_same_v<G, void>, float, G>;

// What all targets need of a row that is being stored.
struct RowInWork {
  int index; // in the warp
  float maximum;
  float factor; // the coefficient over the sum
  float coefficient;
};

// Two-hot targets: lane r has the two bins of row r, and reads and writes them alone.
template <class T, class G, int width>
class TwoHotOfLanes {
 public:
  static constexpr int kTogether = 1;
  struct Asked {};

  // `row` is this lane's; `everywhere` is the mass that label smoothing gives each bin.
  GRADSCALE_DEVICE TwoHotOfLanes(const BlockOfRows& block, int64_t row, int /*count*/, float everywhere, int lane)
      : lane_(lane) {
    const Head& head = block.head.head;
    const DeviceSegment& segment = block.segment;
    Support support = head.support;
    support.raw = false;
    const TwoHotTarget of_row = two_hot(block.template target<double>(row), support);
    logits_ = kept(static_cast<const T*>(segment.prediction) + row * segment.prediction_stride + of_row.begin);
    if constexpr (!std::is_same_v<G, void>) {
      gradient_ = kept(static_cast<G*>(segment.gradient) + row * segment.gradient_stride + of_row.begin);
    }
    const double share = 1 - head.label_smoothing;
    low_mass_ = static_cast<float>(share * (1 - of_row.upper)) + everywhere;
    high_mass_ = static_cast<float>(share * of_row.upper) + everywhere;
  }

  GRADSCALE_DEVICE bool is_nan() const {
    return low_mass_ != low_mass_;
  }

  GRADSCALE_DEVICE Asked ask(int index, Constant<0>, const T*, bool exists) {
    if (lane_ == index && exists) {
      low_ = load_packed<T, 1>(logits_).words[0];
      high_ = load_packed<T, 1>(logits_ + 1).words[0];
    }
    return {};
  }

  GRADSCALE_DEVICE void finish_row(
      const RowInWork& row, Constant<0>, const Asked&, const T*, GradientOf<G>*, bool counts) const {
    if constexpr (!std::is_same_v<G, void>) {
      if (lane_ == row.index && counts) {
        const float low = approximate_exp(from_word(T(), low_) - row.maximum);
        const float high = approximate_exp(from_word(T(), high_) - row.maximum);
        const float of_low = low * row.factor - row.coefficient * low_mass_;
        const float of_high = high * row.factor - row.coefficient * high_mass_;
        store_packed(gradient_, packed<G, 1>(&of_low));
        store_packed(gradient_ + 1, packed<G, 1>(&of_high));
      }
    }
  }

  // sum_j t_j (x_j - maximum) of this lane's row, but for what smoothing gives to all bins.
  GRADSCALE_DEVICE float cost(float maximum, float everywhere) const {
    return product(low_mass_ - everywhere, from_word(T(), low_) - maximum) +
           product(high_mass_ - everywhere, from_word(T(), high_) - maximum);
  }

 private:
  int lane_;
  const T* logits_;
  GradientOf<G>* gradient_;
  float low_mass_, high_mass_;
  uint32_t low_ = 0, high_ = 0; // logits as they were read
};

// Normals as targets: lane r has the place of row r's, and the lanes of a part of the warp a bin of it each: of half of
// the warp where that is enough for all bins, so that the bins of two rows are finished at once, with the second one. A
// mass is a difference of tails, erfc, on the bin's own side of the normal, which loses no digits.
template <class T, class G, int width, int options>
class GaussOfLanes {
  static constexpr bool kSmooths = (options & kSmoothing) != 0;
  static constexpr int kLanes = (options & kFewBins) != 0 ? 16 : 32; // of a part
  static constexpr int kBins = kLanes - 1;                           // the last lane has the edge above them
  static constexpr int32_t kNowhere = -(1 << 30);

 public:
  static constexpr int kTogether = 32 / kLanes; // rows that are finished at once
  struct Asked {
    int32_t place;  // of this lane's bin, from element kWindow * lane of the row on; none: kNowhere
    uint32_t logit; // as it was read
  };

  GRADSCALE_DEVICE GaussOfLanes(const BlockOfRows& block, int64_t row, int count, float everywhere, int lane)
      : block_(block), lane_(lane), count_(count), everywhere_(everywhere) {
    const Head& head = block.head.head;
    const Support& support = head.support;
    const double y = transformed_target(block.template target<double>(row), support);
    const double position = (clamp_between(y, support.minimum, support.maximum) - support.minimum) *
                            ((width - 1) / (support.maximum - support.minimum));
    center_ = position > 0 ? static_cast<int32_t>(position + 0.5) : 0; // in range for NaN too
    offset_ = static_cast<float>(position - center_);
    bin_width_ = 0.707106781f / static_cast<float>(head.sigma_ratio);
    reach_ = uniform(bins_beside_target(head.sigma_ratio));
    const float below = (static_cast<float>(center_) + offset_ + 0.5f) * bin_width_;
    const float above = (static_cast<float>(width - 1 - center_) - offset_ + 0.5f) * bin_width_;
    inverse_total_ =
        static_cast<float>(1 - head.label_smoothing) / (2 - approximate_erfc(below) - approximate_erfc(above));
  }

  GRADSCALE_DEVICE bool is_nan() const {
    return offset_ != offset_;
  }

  template <int k>
  GRADSCALE_DEVICE Asked ask(int index, Constant<k>, const T* own, bool exists) {
    if (exists && k == 0) {
      asked_ = asked_of(index, 0, own + (part() == 0 ? 0 : block_.segment.prediction_stride), index + part() < count_);
    }
    return asked_;
  }

  template <int k>
  GRADSCALE_DEVICE void finish_row(
      const RowInWork& row, Constant<k>, const Asked& asked, const T* own, GradientOf<G>* gradient, bool counts) {
    constexpr bool is_second = k != 0;
    if (is_second || kTogether == 1 || row.index == count_ - 1) {
      const bool takes_first = is_second && part() == 0;
      const RowInWork in_work{
          row.index - is_second,
          takes_first ? before_.maximum : row.maximum,
          takes_first ? before_.factor : row.factor,
          takes_first ? before_.coefficient : row.coefficient};
      gradient -= takes_first ? block_.segment.gradient_stride : 0;
      finish_bins(in_work, asked, own, gradient, takes_first ? before_counts_ : counts);
    } else {
      before_ = row;
      before_counts_ = counts;
    }
  }

  // sum_j t_j (x_j - maximum) of this lane's row, but for what smoothing gives to all bins.
  GRADSCALE_DEVICE float cost(float, float) const {
    return cost_;
  }

 private:
  GRADSCALE_DEVICE int part() const {
    return kTogether == 1 ? 0 : lane_ >> 4;
  }
  GRADSCALE_DEVICE int lane_in_part() const {
    return lane_ & (kLanes - 1);
  }

  // Asks for this lane's bin, of those from bin `first` of the target on, of the row of its part; row `index` is that
  // of the first part.
  GRADSCALE_DEVICE Asked asked_of(int index, int first, const T* own, bool exists) const {
    const int32_t bin = __shfl_sync(kWholeWarp, center_, index + part()) + (first - reach_ + lane_in_part());
    const bool has = exists && lane_in_part() < kBins && static_cast<uint32_t>(bin) < static_cast<uint32_t>(width);
    const int32_t place = bin - kWindow * lane_;
    return {has ? place : kNowhere, has ? load_packed<T, 1>(own + place).words[0] : 0u};
  }

  // Finishes all bins of the row that this part of the warp has; row.index is that of the first part.
  GRADSCALE_DEVICE void finish_bins(
      const RowInWork& row, const Asked& asked, const T* own, GradientOf<G>* gradient, bool counts) {
    const int of_part = (row.index + part()) & 31;
    const float offset = __shfl_sync(kWholeWarp, offset_, of_part);
    const float inverse_total = __shfl_sync(kWholeWarp, inverse_total_, of_part);
    float cost = finish_bin(row, asked, mass_of(0, offset) * inverse_total, gradient, counts);
    if constexpr (kTogether == 1) {
#pragma unroll 1
      for (int first = kBins; first <= 2 * reach_; first += kBins) {
        const Asked more = asked_of(row.index, first, own, true);
        cost += finish_bin(row, more, mass_of(first, offset) * inverse_total, gradient, counts);
      }
    }
    settle(row.index, cost);
  }

  // Stores a bin of a gradient, and returns what its mass costs.
  GRADSCALE_DEVICE float finish_bin(
      const RowInWork& row, const Asked& asked, float mass, GradientOf<G>* gradient, bool counts) const {
    const float difference = from_word(T(), asked.logit) - row.maximum;
    if constexpr (!std::is_same_v<G, void>) {
      const float of_bin =
          approximate_exp(difference) * row.factor - row.coefficient * (kSmooths ? mass + everywhere_ : mass);
      if (counts && asked.place != kNowhere) {
        store_packed(gradient + asked.place, packed<G, 1>(&of_bin));
      }
    }
    return asked.place != kNowhere ? product(mass, difference) : 0.0f;
  }

  // The mass of this lane's bin, of those from bin `first` of the target on, before all are normalised.
  GRADSCALE_DEVICE float mass_of(int first, float offset) const {
    const float edge = (static_cast<float>(first + lane_in_part() - reach_) - 0.5f - offset) * bin_width_;
    const float tail = signed_tail(edge);
    return mass_between(tail, __shfl_down_sync(kWholeWarp, tail, 1));
  }

  // Gives the costs of the rows in work, from row `index` on, to their lanes.
  GRADSCALE_DEVICE void settle(int index, float cost) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      cost += __shfl_xor_sync(kWholeWarp, cost, distance);
    }
    if constexpr (kTogether > 1) {
      cost = __shfl_sync(kWholeWarp, cost, lane_ % kTogether * kLanes);
    }
    cost_ = (lane_ & -kTogether) == index ? cost : cost_;
  }

  const BlockOfRows& block_;
  int lane_;
  int count_;
  int32_t center_; // the bin next to the target
  float everywhere_;
  float offset_;    // of the target from its centre, in bins
  float bin_width_; // in units of sqrt(2) standard deviations
  int32_t reach_;   // bins with mass, on each side of the centre
  float inverse_total_;
  float cost_ = 0;
  Asked asked_{kNowhere, 0};
  RowInWork before_{};
  bool before_counts_ = false;
};

// G is the type of gradients; void: none are wanted. `options` are bits of WarpOptions.
template <Kind kind, class T, class G, int width, int options>
struct WarpRows {
  using Place = RowPlace<width>;
  using Values = float[Place::kWindows][kWindow];
  static constexpr bool kWantsGradient = !std::is_same_v<G, void>;
  static constexpr bool kHasHalves = std::is_same_v<G, BFloat16Bits>;
  static constexpr int kSharedBytes = 0;
  static constexpr bool kSmooths = (options & kSmoothing) != 0;
  using Targets =
      std::conditional_t<kind == Kind::two_hot, TwoHotOfLanes<T, G, width>, GaussOfLanes<T, G, width, options>>;
  // At least, and some for what is not usual.
  static constexpr int kRegisters = Place::kWindows * (static_cast<int>(sizeof(T)) + kWindow) + 42 +
                                    (kind != Kind::hl_gauss ? 0
                                     : sizeof(T) == 2       ? 16
                                                            : 8) +
                                    ((options & (kSmoothing | kOtherBegin)) != 0 ? 8 : 0);
  static constexpr int kBlocks = 65536 / 128 / (kRegisters < 64 ? 64 : kRegisters);
  static constexpr int kWarpsOfBlock = kRowThreads / 32;

  GRADSCALE_DEVICE static int32_t rows_of_block(const BlockOfRows& block) {
    return kWarpsOfBlock * block.arguments.rows_of_warp;
  }

  GRADSCALE_DEVICE static void store(GradientOf<G>* own, const Place& place, const Values& values) {
    if constexpr ((options & kOtherBegin) != 0) {
      store_elements<width>(own, place, values);
    } else {
      store_row<width>(own, place, values);
    }
  }

  // Stores c (p_j - everywhere), or zeros, in the place of exponentials.
  GRADSCALE_DEVICE static void store_softmax(
      GradientOf<G>* own, const Place& place, Values& e, const RowInWork& row, float everywhere, bool counts) {
    if (counts) {
      const float offset = row.coefficient * everywhere;
#pragma unroll
      for (int i = 0; i < kWindow * Place::kWindows; ++i) {
        float& value = e[i / kWindow][i % kWindow];
        value = kSmooths ? value * row.factor - offset : value * row.factor;
      }
      store(own, place, e);
    } else {
      const Values zeros{};
      store(own, place, zeros);
    }
  }

  GRADSCALE_DEVICE static void store_outputs(
      const BlockOfRows& block, int64_t row, const WarpSoftmax& softmax, float cost, bool counts) {
    const Support& support = block.head.head.support;
    block.store_loss(row, std::log(softmax.sum) - cost, counts);
    const float expected = expectation_from_moment(2 * softmax.moment / softmax.sum, support);
    block.store_detail(row, inverse_transform_value(support.transform, expected, static_cast<float>(support.eps)));
  }

  GRADSCALE_DEVICE static void run(const BlockOfRows& block) {
    const int32_t most = block.arguments.rows_of_warp;
    const int64_t first = static_cast<int64_t>(block.index * kWarpsOfBlock + static_cast<int>(threadIdx.x) / 32) * most;
    const int64_t left = block.arguments.batch - first;
    if (left > 0) {
      run_warp(block, first, uniform(left < most ? static_cast<int32_t>(left) : most));
    }
  }

  // Rows first .. first + count, by a warp.
  GRADSCALE_DEVICE static void run_warp(const BlockOfRows& block, int64_t first, int count) {
    const DeviceSegment& segment = block.segment;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const T* const logits = static_cast<const T*>(segment.prediction) + first * segment.prediction_stride;
    auto* const gradients = static_cast<GradientOf<G>*>(segment.gradient) + first * segment.gradient_stride;
    WarpRow<T, width> row(lane);
    row.load(logits + kWindow * lane);
    const int64_t of_lane = first + (lane < count ? lane : count - 1);
    const float everywhere = kSmooths ? static_cast<float>(block.head.head.label_smoothing / width) : 0.0f;
    Targets targets(block, of_lane, count, everywhere, lane);
    const RowFactor factor = block.factor_of(of_lane);
    const float coefficient = targets.is_nan() ? NAN : static_cast<float>(factor.coefficient);
    const uint32_t counted = __ballot_sync(kWholeWarp, factor.counts);
    WarpSoftmax of_own{};
    auto* own_gradient = gradients + kWindow * lane;
    walk_rows<kSmooths, Targets::kTogether>(
        row,
        logits + kWindow * lane,
        segment.prediction_stride,
        count,
        [&](int i, auto k, const T* own, bool exists) { return targets.ask(i, k, own, exists); },
        [&](int i, auto k, const T* own, const Place& place, Values& e, const WarpSoftmax& softmax, const auto& asked) {
          of_own = lane == i ? softmax : of_own;
          const bool counts = (counted >> i & 1) != 0; // for the whole warp alike
          RowInWork in_work{i, softmax.maximum, 0, 0};
          if constexpr (kWantsGradient) {
            in_work.coefficient = __shfl_sync(kWholeWarp, coefficient, i);
            in_work.factor = in_work.coefficient * approximate_reciprocal(softmax.sum);
            store_softmax(own_gradient, place, e, in_work, everywhere, counts);
            __syncwarp(); // the target's bins are stored once more
          }
          targets.finish_row(in_work, k, asked, own, own_gradient, counts);
          if constexpr (kWantsGradient) {
            own_gradient += segment.gradient_stride;
          }
        });
    if (lane < count) {
      const float cost = targets.cost(of_own.maximum, everywhere) + (kSmooths ? everywhere * of_own.shifted : 0.0f);
      store_outputs(block, first + lane, of_own, cost, (counted >> lane & 1) != 0);
    }
  }
};

} // namespace gradscale
