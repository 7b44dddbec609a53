// The losses of rows of logits, as formulas of lane_rows.cuh: BinsLoss for targets with mass in a few bins, PolicyLoss
// for targets over all logits. LossRows is their kind of rows for loss_rows.
#pragma once

#include "../../cuda/lane_rows.cuh"
#include "../../formulas/cross_entropy.h"
#include "../../formulas/targets.h"
#include "block_of_rows.cuh"

namespace gradscale {

// ---- Targets --------------------------------------------------------------------------------------------------------

// One lane holds the target of a row of TwoHot or HLGauss, a target over bins of targets.h that also has
//
// - kLanes: the number of lanes that share the bins of a target, so that the order of their sum does not depend on the
//   number of rows;
// - count_of(lane): the number of bins of the target that `lane` holds;
// - from_lane(lane): the target that `lane` holds;
// - for_each_of(part, function): for_each() for the bins of one of kLanes parts.

struct TwoHotBins : TwoBins<float> {
  static constexpr int kLanes = 1;

  GRADSCALE_DEVICE TwoHotBins(double x, double /*sigma_ratio*/, const Support& support) {
    const TwoHotTarget target = two_hot(x, support);
    begin = target.begin;
    lower = static_cast<float>(target.lower);
    upper = static_cast<float>(target.upper);
  }
  GRADSCALE_DEVICE static int32_t count_of(int /*lane*/) {
    return 2;
  }
  GRADSCALE_DEVICE TwoHotBins from_lane(int /*lane*/) const {
    return *this;
  }
  template <class Function>
  GRADSCALE_DEVICE void for_each_of(int /*part*/, Function function) const {
    for_each(function);
  }
};

// The masses of GaussTarget in float: differences of tails, on the bin's side of the mean, lose no digits.
struct GaussTails {
  using Number = float;

  GRADSCALE_DEVICE static float at(float edge) {
    return std::copysign(approximate_erfc(std::abs(edge)), edge);
  }
  GRADSCALE_DEVICE static float between(float low, float high) {
    const bool has_middle = bit_cast<int32_t>(low) < 0 && bit_cast<int32_t>(high) >= 0;
    return low - high + (has_middle ? 2.0f : 0.0f);
  }
  GRADSCALE_DEVICE static float around(float below, float above) {
    return 2 - approximate_erfc(below) - approximate_erfc(above);
  }
};

struct GaussBins : GaussTarget<GaussTails> {
  static constexpr int kLanes = 4;

  GRADSCALE_DEVICE GaussBins(double x, double sigma_ratio, const Support& support)
      : GaussTarget(x, support, static_cast<float>(kRootOfHalf / sigma_ratio)) {
  }
  GRADSCALE_DEVICE int32_t count_of(int lane) const {
    return __shfl_sync(kWholeWarp, end - begin, lane);
  }
  GRADSCALE_DEVICE GaussBins from_lane(int lane) const {
    GaussBins result = *this; // the width is the same for all rows
    result.begin = __shfl_sync(kWholeWarp, begin, lane);
    result.end = __shfl_sync(kWholeWarp, end, lane);
    result.first_edge = __shfl_sync(kWholeWarp, first_edge, lane);
    result.inverse_total = __shfl_sync(kWholeWarp, inverse_total, lane);
    return result;
  }
  template <class Function>
  GRADSCALE_DEVICE void for_each_of(int part, Function function) const {
    const int32_t bins = (end - begin + kLanes - 1) / kLanes; // of a part
    const int32_t first = begin + part * bins;
    for_each(first, first + bins < end ? first + bins : end, function);
  }
};

// ---- Losses ---------------------------------------------------------------------------------------------------------

// The base of both losses: the factor of each row of a warp, its label smoothing, and stores of its results.
struct LaneLoss {
  using Exponent = BinaryExponent;
  static constexpr bool kLoadsAhead = true, kFinishes = true, kHasMetrics = true;

  const BlockOfRows& block;
  RowsOfWarp warp;
  float coefficient; // of the gradient of this lane's row
  uint32_t counted;  // bit l is set if the row that lane l holds is neither masked nor skipped
  int owner = 0;     // the lane that holds the numbers of the row being computed; set by begin_row()
  Smoothing<float> smoothing;

  GRADSCALE_DEVICE LaneLoss(const BlockOfRows& block, const RowsOfWarp& warp, bool smooths, int width)
      : block(block), warp(warp), smoothing(smooths ? block.head.label_smoothing : 0, width) {
    const RowFactor factor = block.factor_of(warp.own());
    coefficient = static_cast<float>(factor.coefficient);
    counted = __ballot_sync(kWholeWarp, factor.counts && warp.has_row());
  }
  GRADSCALE_DEVICE bool counts(int lane) const {
    return (counted >> lane & 1) != 0;
  }
  GRADSCALE_DEVICE bool counts() const {
    return counts(owner);
  }
  GRADSCALE_DEVICE void store(float loss, float detail, float largest_logit, float square) const {
    if (warp.has_row()) {
      block.store(warp.own(), counts(warp.lane), loss, detail, {square, largest_logit});
    }
  }
};

// Cross-entropy with a sparse target. LaneRows stores the gradient without it for all bins. finish() then stores the
// bins with mass again, with Bins::kLanes lanes per row.
template <class Shape, class Bins, bool smooths, bool raw>
class BinsLoss : public Shape, public BinSums<raw>, public LaneLoss {
  using RowFormula = CrossEntropy<float, 0>;
  static_assert(
      RowFormula::kMass == 1 && RowFormula::kWeighted == 2 && RowFormula::kCorrect == 3,
      "gradient() and finish() list the sums in this order");
  using Sums = BinSums<raw>;
  using Sums::kMoment, Sums::kShifted, Sums::kShiftedUnit, Sums::kSum;

 public:
  using typename Shape::Gradient, typename Shape::Logit, typename Shape::Vectors, typename Shape::Values;
  static constexpr int kSums = smooths ? 3 : 2, kRowSums = 1;
  static constexpr bool kKeepsDifferences = false;

  GRADSCALE_DEVICE BinsLoss(const BlockOfRows& block, const RowsOfWarp& warp)
      : Sums(reinterpret_cast<const float*>(block.table + block.row_range.raw_centers)),
        LaneLoss(block, warp, smooths, Shape::kWidth),
        bins_(block.segment.target.load(warp.own()), block.head.sigma_ratio, support()) {
    coefficient = bins_.is_nan() ? NAN : coefficient;
  }

  GRADSCALE_DEVICE void begin_row(int row_owner, const Vectors& vectors, const Exponent&) {
    owner = row_owner;
    if constexpr (Shape::kWantsGradient) {
      with_mass_ = vectors.mask(from_owner<Shape::kLanes>(owner, bins_.begin), bins_.count_of(owner));
    }
  }

  GRADSCALE_DEVICE static void add_illegal(float (&)[kSums], float, float) {
  }

  GRADSCALE_DEVICE void gradient(
      const float (&sums)[kSums], const Vectors& vectors, Values& e, const Values&, const Values&) const {
    const float c = from_owner<Shape::kLanes>(owner, coefficient);
    const auto factors = RowFormula::factors({sums[kSum], 1, 0, 0}, approximate_reciprocal(sums[kSum]), c);
#pragma unroll
    for (float& value : e) {
      value =
          smooths ? RowFormula::gradient(factors, value, smoothing.everywhere) : RowFormula::gradient(factors, value);
    }
    if (!smooths && !(std::abs(c) < INFINITY)) { // rarely: 0 * inf outside of the row must not reach the squares
#pragma unroll
      for (int n = 0; n < Shape::kElements; ++n) {
        e[n] = vectors.exists(n) ? e[n] : 0.0f;
      }
    }
  }

  // Skips the bins with mass, which finish() adds: correcting a sum over all bins would lose digits to cancellation.
  GRADSCALE_DEVICE void add_square(const Vectors& vectors, int n, float value, float& square) const {
    const auto word = static_cast<uint32_t>(with_mass_ >> (n & 32));
    if ((word >> (n & 31) & 1) == 0 && (!smooths || vectors.exists(n))) {
      square = fmaf(value, value, square);
    }
  }

  GRADSCALE_DEVICE void finish(const RowResults<kSums>& results, const RowsInMemory<Gradient>& to) const {
    const auto& sums = results.sums;
    const float inverse_sum = approximate_reciprocal(sums[kSum]);
    const float unit = Exponent(results.maximum).unit() / kShiftedUnit;
    float correct = smooths ? sums[kShifted] * (smoothing.everywhere * unit) : 0.0f;
    float square = results.square;
    finish_bins(results.maximum, inverse_sum, to, correct, square);
    const float mean = sums[kMoment] * inverse_sum, value = raw ? mean : decoded_moment(2 * mean, support());
    store(RowFormula{}.loss({sums[kSum], 1, 0, correct}), value, results.largest_logit, square);
  }

 private:
  GRADSCALE_DEVICE Support support() const {
    Support support = block.head.support;
    support.num_bins = Shape::kWidth;
    support.raw = raw;
    return support;
  }

  // The value that `lane` holds.
  GRADSCALE_DEVICE static float from_lane(float value, int lane) {
    return Bins::kLanes == 1 ? value : __shfl_sync(kWholeWarp, value, lane);
  }

  // Adds the bins with mass to the sum `correct` of this lane's row. Stores the gradients of the bins with mass again,
  // now with the target subtracted, and adds their squares.
  GRADSCALE_DEVICE void finish_bins(
      float own_maximum,
      float own_inverse_sum,
      const RowsInMemory<Gradient>& to,
      float& own_correct,
      float& own_square) const {
    constexpr int rows = 32 / Bins::kLanes; // at a time
#pragma unroll 1
    for (int begin = 0; begin < warp.count; begin += rows) {
      // The row whose bins this lane finishes, and the lane that holds its numbers.
      const int index = Bins::kLanes == 1 ? warp.row : begin + warp.lane / Bins::kLanes;
      const int lane = Bins::kLanes == 1 ? warp.lane : RowsOfWarp::owner_of(index, Shape::kLanes);
      const Bins bins = bins_.from_lane(lane);
      const Exponent exponent(from_lane(own_maximum, lane));
      const float inverse_sum = from_lane(own_inverse_sum, lane);
      const float c = from_lane(coefficient, lane);
      const typename RowFormula::Factors factors{1, inverse_sum, inverse_sum, 0};
      static_assert(sizeof(factors) == 4 * sizeof(float), "add the new factor to the line above");
      const bool is_counted = counts(lane);
      float correct = 0, square = 0;
      if (index < warp.count) {
        const auto logits =
            warp.at(static_cast<const Logit*>(block.segment.prediction.data), block.segment.prediction.stride);
        const Logit* const x = logits.row(index);
        Gradient* const gradient = to.row(index);
        bins.for_each_of(warp.lane % Bins::kLanes, [&](int32_t bin, float mass) {
          const float d = exponent.difference(to_accumulate(x[bin]));
          correct += RowFormula::correct(mass * smoothing.share, d) * exponent.unit();
          if constexpr (Shape::kWantsGradient) {
            const float t = smooths ? smoothing.smoothed(mass) : mass;
            const float value = c * RowFormula::gradient(factors, Exponent::exponential(d), t);
            square += value * value;
            gradient[bin] = from_accumulate<Gradient, float>(is_counted ? value : 0.0f);
          }
        });
      }
      correct = lane_sum<Bins::kLanes>(correct);
      square = lane_sum<Bins::kLanes>(square);
      const int place = Bins::kLanes == 1 ? 0 : warp.row - begin; // of this lane's own row, among these
      correct = from_lane(correct, Bins::kLanes * place & 31);
      square = from_lane(square, Bins::kLanes * place & 31);
      if (static_cast<unsigned>(place) < rows) {
        own_correct += correct;
        own_square += square;
      }
    }
  }

  Bins bins_;
  typename Vectors::Mask with_mass_ = 0; // this lane's elements with mass
};

// Cross-entropy with a target over all logits, or with a class.
template <class Shape, int options>
class PolicyLoss : public Shape, public LaneLoss {
  static constexpr bool kIsClass = !Shape::kHasTargets, kSmooths = (options & kSmoothing) != 0;
  using RowFormula = CrossEntropy<float, options>;

 public:
  using typename Shape::Gradient, typename Shape::Vectors, typename Shape::Values;
  static constexpr int kSums = RowFormula::kSums, kRowSums = RowFormula::kRowSums;
  static constexpr bool kKeepsDifferences = RowFormula::kHasEntropy;

  GRADSCALE_DEVICE PolicyLoss(const BlockOfRows& block, const RowsOfWarp& warp)
      : LaneLoss(block, warp, kSmooths, Shape::kWidth), formula_(RowFormula::of(block.head)) {
    if constexpr (kIsClass) {
      const Segment& segment = block.segment;
      const auto* classes = static_cast<const int64_t*>(segment.target.data);
      class_ = class_of(classes[warp.own() * segment.target.stride], Shape::kWidth);
    }
  }

  GRADSCALE_DEVICE void begin_row(int row_owner, const Vectors&, const Exponent& exponent) {
    owner = row_owner;
    row_formula_ = formula_.in_unit(exponent.unit());
    if constexpr (kIsClass) {
      row_class_ = from_owner<Shape::kLanes>(owner, class_);
    }
  }

  GRADSCALE_DEVICE float target(const Vectors& vectors, int n, float t) const {
    if constexpr (kIsClass) {
      t = class_mass(row_class_, vectors.first + Vectors::index(n));
    }
    if constexpr (kIsClass || kSmooths) {
      t = vectors.exists(n) ? (kSmooths ? smoothing.smoothed(t) : t) : 0.0f;
    }
    return t;
  }

  GRADSCALE_DEVICE static void add(float (&sums)[kSums], const Vectors&, int n, float e, float d, float t) {
    RowFormula::add(sums, e, t, RowFormula::correct_finite(t, d), RowFormula::weighted(e, d));
    if (!Vectors::is_inside(n)) { // LaneRows may not pass it to add_illegal()
      RowFormula::add_illegal(sums, d, t);
    }
  }
  GRADSCALE_DEVICE static void add_illegal(float (&sums)[kSums], float x, float t) {
    RowFormula::add_illegal(sums, x, t);
  }
  GRADSCALE_DEVICE static void add_lane(float (&)[Vectors::kChains][kSums], const Vectors&, const Values&) {
  }

  GRADSCALE_DEVICE void gradient(
      const float (&sums)[kSums], const Vectors&, Values& e, const Values& d, const Values& t) const {
    const float c = from_owner<Shape::kLanes>(owner, coefficient);
    const auto factors = RowFormula::factors(sums, approximate_reciprocal(sums[RowFormula::kSum]), c);
#pragma unroll
    for (int n = 0; n < Shape::kElements; ++n) {
      e[n] = row_formula_.gradient(factors, e[n], d[n], t[n]);
    }
  }

  GRADSCALE_DEVICE static void add_square(const Vectors&, int, float value, float& square) {
    square = fmaf(value, value, square);
  }

  GRADSCALE_DEVICE void finish(RowResults<kSums>& results, const RowsInMemory<Gradient>&) const {
    auto& sums = results.sums;
    const float unit = Exponent(results.maximum).unit();
    sums[RowFormula::kWeighted] *= unit;
    sums[RowFormula::kCorrect] *= unit;
    store(formula_.loss(sums), RowFormula::entropy(sums), results.largest_logit, results.square);
  }

 private:
  const RowFormula formula_;
  RowFormula row_formula_{}; // with the weight for differences in the row's unit
  int32_t class_ = 0, row_class_ = 0;
};

// The kind of rows for loss_rows. U is the type of a policy's target: probabilities, or int64_t for a class; void for
// bins.
template <
    Kind kind,
    class T,
    class U,
    class G,
    int width,
    int lanes_per_row,
    int vector_size,
    bool at_once,
    int options>
struct LossRows {
  static constexpr bool kIsPolicy = kind == Kind::soft_cross_entropy, kRaw = (options & kRawCenters) != 0;
  using Bins = std::conditional_t<kind == Kind::two_hot, TwoHotBins, GaussBins>;
  static constexpr bool kHasTargets = kIsPolicy && !std::is_same_v<U, int64_t>;
  using Shape = LaneShape<T, std::conditional_t<kHasTargets, U, void>, G, width, lanes_per_row, vector_size, at_once>;
  using Formula = std::
      conditional_t<kIsPolicy, PolicyLoss<Shape, options>, BinsLoss<Shape, Bins, (options & kSmoothing) != 0, kRaw>>;
  using WarpRows = LaneRows<Formula>;
  static constexpr int kSharedBytes = kRowThreads / 32 * WarpRows::kBytes;
  static constexpr int kBlocks =
      lane_blocks<Formula>((kIsPolicy ? 52 : (lanes_per_row == 1 ? 64 : 46)) + (kRaw ? 8 : 0));

  GRADSCALE_DEVICE static void run(const BlockOfRows& block) {
    const Segment& segment = block.segment;
    const int32_t rows_per_warp = rounded_rows_per_warp(block.rows_per_warp, lanes_per_row);
    const RowsOfWarp warp(block.thread, block.index, rows_per_warp, block.pass.batch, lanes_per_row);
    if (warp.count > 0) {
      WarpRows rows(
          warp,
          warp.at(static_cast<const T*>(segment.prediction.data), segment.prediction.stride),
          warp.at(static_cast<const typename Shape::Probability*>(segment.target.data), segment.target.stride),
          warp.at(static_cast<typename Shape::Gradient*>(segment.gradient.data), segment.gradient.stride),
          block.shared + block.thread / 32 * WarpRows::kBytes);
      Formula formula(block, warp);
      rows.run(formula);
    }
  }
};

} // namespace gradscale
