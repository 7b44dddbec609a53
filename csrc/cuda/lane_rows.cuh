// Rows of logits, float or a half type, whose width is known at compile time.
//
// A lane owns every lanes_per_row-th vector of a row, in registers (LaneVectors). A warp owns up to 32 rows: it
// computes 32 / lanes_per_row of them side by side, and then the next ones. Each lane holds the numbers of one row
// (target, factors, sums), so that formulas of these numbers, some in double, are computed for all rows of a warp at
// once. A block has 4 warps, which share nothing: small blocks fill multiprocessors although rows take many registers.
//
// The next rows are loaded while rows are reduced and stored: the 16 to 32 warps of a multiprocessor keep 30 to 100 KB
// of loads in flight. If the lanes of a row access less than a sector at once, all rows of a warp are copied through
// shared memory together. Bytes: logits (and targets over them) are read once, gradients are written once.
//
// The computation is a formula, a type that derives from LaneShape and has
//
// - Exponent: the type of the differences d of logits from the maximum, and of the exponentials e = exp(x - maximum);
// - begin_row(owner, vectors, exponent): starts a row. Lane `owner` stores its per-row scalars;
// - target(vectors, n, t): the target of element n of this lane, whose value in memory is t;
// - add(sums, vectors, n, e, d, t): adds element n to the kSums sums of its chain (LaneVectors); gradient() needs the
//   first kRowSums sums of the row;
// - add_lane(chains, vectors, e): sets the sums that are computed from all elements of the lane at once;
// - add_illegal(sums, x, t), if kHasMetrics: called also for each element of a lane in which a logit is not finite;
// - gradient(sums, vectors, e, d, t): replaces e by the gradient; sums are of the whole row;
// - counts(): false if the row is masked or skipped: its gradient is 0, and its logits do not enter metrics;
// - add_square(vectors, n, g, square), if kHasMetrics: adds element n of the gradient to the sum of its squares;
// - finish(results, gradients), if kFinishes: stores the results of the row whose numbers this lane holds, and its
//   metrics if kHasMetrics;
// - kLoadsAhead: false if the next rows are loaded only after these rows are stored;
// - kKeepsDifferences: true if gradient() uses d.
#pragma once

#include "lane_vectors.cuh"

namespace gradscale {

// ---- Rows of a warp -------------------------------------------------------------------------------------------------

// The `count` rows of a warp, from row `first` on. The warp computes 32 / lanes_per_row rows side by side in each turn.
// Among the lanes that own a row together, lane l holds the numbers of their row of turn l.
struct RowsOfWarp {
  int64_t first;
  int count; // up to 32; 0 or less: the warp has no rows
  int lane;
  int row; // whose numbers this lane holds; may be `count` or more

  GRADSCALE_DEVICE RowsOfWarp(int thread, int64_t block, int32_t rows_per_warp, int64_t rows, int lanes_per_row)
      : first((block * (kRowThreads / 32) + thread / 32) * rows_per_warp),
        count(uniform(static_cast<int32_t>(rows - first < rows_per_warp ? rows - first : rows_per_warp))),
        lane(thread % 32),
        row(lane % lanes_per_row * (32 / lanes_per_row) + lane / lanes_per_row) {
  }
  // The lane that holds the numbers of a row of the warp.
  GRADSCALE_DEVICE static int owner_of(int row, int lanes_per_row) {
    return row % (32 / lanes_per_row) * lanes_per_row + row / (32 / lanes_per_row);
  }
  GRADSCALE_DEVICE bool has_row() const {
    return row < count;
  }
  // The index of this lane's row in the batch; lanes without a row repeat the last one.
  GRADSCALE_DEVICE int64_t own() const {
    return first + (has_row() ? row : count - 1);
  }
  template <class T>
  GRADSCALE_DEVICE RowsInMemory<T> at(T* data, int64_t stride) const {
    return {data + first * stride, stride};
  }
};

// The number `own` of lane `owner`, which holds the numbers of the row that this lane computes.
template <int lanes_per_row, class T>
GRADSCALE_DEVICE T from_owner(int owner, T own) {
  return lanes_per_row == 1 ? own : __shfl_sync(kWholeWarp, own, owner);
}

// The results of a row, in the lane that holds its numbers.
template <int count>
struct RowResults {
  float maximum = 0;
  float sums[count] = {};
  float square = 0;        // of the gradient
  float largest_logit = 0; // the largest magnitude of finite logits, of all rows of the warp that counts() includes
};

// Sums over the lanes of a row that only finish() needs: each lane puts its part into shared memory, and the lane that
// holds the row adds them up.
template <int lanes_per_row, int count>
struct PartsOfSums {
  static constexpr int kParts = lanes_per_row < 16 ? lanes_per_row : 16; // of a row
  static constexpr int kPitch = 33; // avoids bank conflicts between the lanes of a row, and between rows
  static constexpr int kBytes = lanes_per_row == 1 ? 0 : count * kParts * kPitch * static_cast<int>(sizeof(float));
  float* shared;
  int lane;

  GRADSCALE_DEVICE float& part(int sum, int index, int owner) const {
    return shared[(sum * kParts + index) * kPitch + owner];
  }
  // `rank` is LaneVectors::rank(), so that the order of the parts does not depend on where the row begins.
  GRADSCALE_DEVICE void put(int owner, int rank, float (&sums)[count]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if constexpr (lanes_per_row > kParts) {
        sums[i] += __shfl_xor_sync(kWholeWarp, sums[i], kParts);
      }
      if (lanes_per_row == kParts || lane < kParts) {
        part(i, rank % kParts, owner) = sums[i];
      }
    }
  }
  // Adds the parts to the sums of the row that this lane holds.
  GRADSCALE_DEVICE void add(float (&sums)[count]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        sums[i] += part(i, k, lane);
      }
    }
  }
};

template <class T, class Default>
using NotVoid = std::conditional_t<std::is_same_v<T, void>, Default, T>;

// Rows of `width` logits T with targets U over them (void: none) and gradients G (void: none is wanted).
// The others are as in LaneVectors.
template <class T, class U, class G, int width, int lanes_per_row, int vector_size, bool at_once>
struct LaneShape {
  using Logit = T;
  using Probability = NotVoid<U, float>;
  using Gradient = NotVoid<G, T>;
  using Vectors = LaneVectors<T, width, lanes_per_row, vector_size, at_once>;
  using Values = typename Vectors::Values;
  static constexpr int kWidth = width, kLanes = lanes_per_row, kElements = Vectors::kElements;
  static constexpr bool kHasTargets = !std::is_same_v<U, void>, kWantsGradient = !std::is_same_v<G, void>;
};

template <class Formula>
class LaneRows {
  using Logit = typename Formula::Logit;
  using Probability = typename Formula::Probability;
  using Gradient = typename Formula::Gradient;
  using Vectors = typename Formula::Vectors;
  using Values = typename Formula::Values;
  static constexpr int kWidth = Formula::kWidth, kLanes = Formula::kLanes, kSideBySide = 32 / kLanes;
  static constexpr int kSums = Formula::kSums, kRowSums = Formula::kRowSums, kElements = Formula::kElements;
  static constexpr bool kHasTargets = Formula::kHasTargets, kWantsGradient = Formula::kWantsGradient;

  // Gradients replace logits in shared memory: the lane that writes them has read its row.
  using Logits = Tile<Logit, kWidth>;
  using Gradients = Tile<Gradient, kWidth>;
  using Targets = Tile<Probability, kWidth>;
  static_assert(Vectors::kTiled == (kLanes == 1));
  static constexpr int kParts = kSums - kRowSums + 1; // and the sum of squares
  using Parts = PartsOfSums<kLanes, kParts>;
  static constexpr int kLogitsBytes = Logits::kBytes > Gradients::kBytes ? Logits::kBytes : Gradients::kBytes;

 public:
  // Shared memory of a warp.
  static constexpr int kBytes = Vectors::kTiled
                                    ? kLogitsBytes + (kHasTargets ? Targets::kBytes : 0)
                                    : (Formula::kFinishes ? Parts::kBytes + 32 * static_cast<int>(sizeof(float)) : 0);

  // Copies the rows to shared memory if they pass through it, and loads the first ones.
  GRADSCALE_DEVICE LaneRows(
      const RowsOfWarp& warp,
      const RowsInMemory<const Logit>& logits,
      const RowsInMemory<const Probability>& targets,
      const RowsInMemory<Gradient>& gradients,
      char* shared)
      : warp_(warp),
        shared_(shared),
        logits_(logits),
        targets_(targets),
        gradients_(gradients),
        gradient_rows_(gradients) {
    if constexpr (Vectors::kTiled) {
      const Logits tile(shared, warp.lane);
      tile.load(logits, warp.count);
      logits_ = {tile.rows().data, tile.rows().stride};
      gradient_rows_ = Gradients(shared, warp.lane).rows();
      if constexpr (kHasTargets) {
        const Targets target_rows(shared + kLogitsBytes, warp.lane);
        target_rows.load(targets, warp.count);
        targets_ = {target_rows.rows().data, target_rows.rows().stride};
      }
      __syncwarp();
    }
    row_end_ = warp.count - warp.lane / kLanes;
    const int row = exists(0) ? warp.lane / kLanes : warp.count - 1;
    next_logits_ = logits_.row(row);
    next_targets_ = targets_.row(row);
    load();
    if constexpr (Vectors::kTiled) {
      __syncwarp(); // all lanes have read these rows before gradients replace them
    }
  }

  GRADSCALE_DEVICE void run(Formula& formula) {
    RowResults<kSums> results;
    int owner = warp_.lane & -kLanes;
    if constexpr (kLanes == 1) {
      compute(formula, 0, owner, results);
    } else {
#pragma unroll 1
      for (int begin = 0; begin < warp_.count; begin += kSideBySide) {
        compute(formula, begin, owner++, results);
      }
    }
    __syncwarp(); // finish() may overwrite elements that other lanes have stored
    if constexpr (Formula::kFinishes) {
      if (kLanes > 1 && warp_.has_row()) {
        results.maximum = row_maximum();
        float parts[kParts] = {};
        partial_sums().add(parts);
#pragma unroll
        for (int i = kRowSums; i < kSums; ++i) {
          results.sums[i] = parts[i - kRowSums];
        }
        results.square = parts[kSums - kRowSums];
      }
      results.largest_logit = lane_maximum<32>(results.largest_logit);
      formula.finish(results, gradient_rows_);
    }
    if constexpr (Vectors::kTiled && kWantsGradient) {
      __syncwarp();
      Gradients(shared_, warp_.lane).store(gradients_, warp_.count);
    }
  }

 private:
  GRADSCALE_DEVICE Parts partial_sums() const {
    return {reinterpret_cast<float*>(shared_), warp_.lane};
  }
  // The maximum of the row that this lane holds, which only finish() needs again: it would take a register all the
  // time.
  GRADSCALE_DEVICE float& row_maximum() const {
    return reinterpret_cast<float*>(shared_ + Parts::kBytes)[warp_.lane];
  }
  // False if no row is left for this lane among the rows from `begin` on that are computed side by side. The lane then
  // repeats another row.
  GRADSCALE_DEVICE bool exists(int begin) const {
    return begin < row_end_;
  }

  GRADSCALE_DEVICE void load() {
    vectors_ = Vectors::from_row(next_logits_, warp_.lane);
    vectors_.load(next_logits_, -INFINITY, x_);
    if constexpr (kHasTargets) {
      vectors_.load(next_targets_, 0, t_);
    }
  }

  // Loads this lane's part of the rows from `begin` on. A lane for which there is no row keeps its previous one.
  GRADSCALE_DEVICE void load_next(int begin) {
    if (kLanes > 1 && exists(begin)) {
      next_logits_ += kSideBySide * logits_.stride;
      next_targets_ += kHasTargets ? kSideBySide * targets_.stride : 0;
      load();
    }
  }

  // Computes the rows from `begin` on, which are loaded already, and loads the next ones. Lane `owner` holds the
  // numbers of this lane's row.
  GRADSCALE_DEVICE void compute(Formula& formula, int begin, int owner, RowResults<kSums>& own) {
    const Vectors vectors = vectors_;
    Values e, d, t{};
    float chains[Vectors::kChains][kSums] = {}, square = 0, largest = 0;
    const float maximum = lane_maximum<kLanes>(maximum_of(largest));
    unpack_rows(d, t);
    const typename Formula::Exponent exponent(maximum);
    formula.begin_row(owner, vectors, exponent);
    if constexpr (Formula::kHasMetrics) {
      if (!(largest < INFINITY)) { // rarely
        add_illegal(formula, vectors, chains, largest);
      }
      if (formula.counts()) {
        own.largest_logit = larger(own.largest_logit, largest);
      }
    }
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
      d[n] = exponent.difference(d[n]);
      e[n] = exponent.exponential(d[n]);
      t[n] = formula.target(vectors, n, t[n]);
      formula.add(chains[Vectors::chain(n)], vectors, n, e[n], d[n], t[n]);
    }
    formula.add_lane(chains, vectors, e);
    float sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float parts[Vectors::kChains];
#pragma unroll
      for (int k = 0; k < Vectors::kChains; ++k) {
        parts[k] = chains[k][i];
      }
      sums[i] = vectors.joined(parts);
    }
    if constexpr (Formula::kLoadsAhead) {
      load_next(begin + kSideBySide);
    }
    lane_sums<kLanes, kRowSums>(sums, warp_.lane);
    if constexpr (kWantsGradient) {
      formula.gradient(sums, vectors, e, d, t);
      if constexpr (Formula::kHasMetrics) {
#pragma unroll
        for (int n = 0; n < kElements; ++n) {
          formula.add_square(vectors, n, e[n], square);
        }
      }
      if (exists(begin)) { // otherwise, other lanes store the row
        store_gradient(vectors, gradient_rows_.row(begin + warp_.lane / kLanes), e, formula.counts());
      }
    }
    if constexpr (!Formula::kLoadsAhead) {
      load_next(begin + kSideBySide);
    }
    if constexpr (Formula::kFinishes) {
      keep(owner, maximum, square, sums, own);
    }
  }

  // Keeps the numbers of a row for finish(), which adds up, over the row's lanes, the sums that the gradient does not
  // need.
  GRADSCALE_DEVICE void keep(
      int owner, float maximum, float square, const float (&sums)[kSums], RowResults<kSums>& own) {
    if constexpr (kLanes > 1) {
      float parts[kParts];
#pragma unroll
      for (int i = kRowSums; i < kSums; ++i) {
        parts[i - kRowSums] = sums[i];
      }
      parts[kSums - kRowSums] = square;
      partial_sums().put(owner, vectors_.rank(), parts);
    }
    if (owner == warp_.lane) {
      (kLanes == 1 ? own.maximum : row_maximum()) = maximum;
      own.square = kLanes == 1 ? square : 0;
#pragma unroll
      for (int i = 0; i < (kLanes == 1 ? kSums : kRowSums); ++i) {
        own.sums[i] = sums[i];
      }
    }
  }

  // Adds illegal actions and bins to the sums, and finds the largest magnitude of this lane's finite logits.
  GRADSCALE_DEVICE void add_illegal(
      const Formula& formula, const Vectors& vectors, float (&chains)[Vectors::kChains][kSums], float& largest) const {
    largest = 0;
    Values x, t{};
    unpack_rows(x, t);
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
      largest = larger(largest, finite_magnitude(x[n]));
      formula.add_illegal(chains[Vectors::chain(n)], x[n], formula.target(vectors, n, t[n]));
    }
  }

  GRADSCALE_DEVICE static void store_gradient(
      const Vectors& vectors, Gradient* row, const Values& gradient, bool counts) {
    vectors.store(row, gradient);
    if (!counts) { // rarely: the branch costs less than a choice for each element
      const Values zeros{};
      vectors.store(row, zeros);
    }
  }

  GRADSCALE_DEVICE void unpack_rows(Values& x, Values& t) const {
#pragma unroll
    for (int c = 0; c < Vectors::kVectors; ++c) {
      unpack(x_[c], x + Vectors::kVectorSize * c);
      if constexpr (kHasTargets) {
        unpack(t_[c], t + Vectors::kVectorSize * c);
      }
    }
  }

  // Returns the largest of this lane's logits. Also finds the largest magnitude, which is infinite if a logit in a
  // vector that is wholly inside the row is infinite.
  GRADSCALE_DEVICE float maximum_of(float& magnitude) const {
    Values x;
    VectorExtremes<Logit, Vectors::kVectorSize> extremes;
    float maximum = -INFINITY;
#pragma unroll
    for (int c = 0; c < Vectors::kVectors; ++c) {
      unpack(x_[c], x + Vectors::kVectorSize * c);
      if (Vectors::is_whole(c)) {
        extremes.add(x_[c]);
      } else {
#pragma unroll
        for (int n = Vectors::kVectorSize * c; n < Vectors::kVectorSize * (c + 1); ++n) {
          maximum = larger(maximum, x[n]);
          magnitude = larger(magnitude, finite_magnitude(x[n]));
        }
      }
    }
    maximum = larger(maximum, extremes.maximum());
    magnitude = larger(magnitude, extremes.magnitude());
    return maximum;
  }

  RowsOfWarp warp_;
  char* shared_;
  RowsInMemory<const Logit> logits_;
  RowsInMemory<const Probability> targets_;
  RowsInMemory<Gradient> gradients_, gradient_rows_;
  int row_end_; // the number of rows from this lane's first row on
  const Logit* next_logits_;
  const Probability* next_targets_;
  Vectors vectors_{};
  typename Vectors::template Words<Logit> x_;
  typename Vectors::template Words<Probability> t_;
};

// The number of blocks that should fit on a multiprocessor. A thread needs `others` registers, and for each element the
// registers of its exponential, of its target and difference if these are kept, and of the logit and target of the next
// row if that is loaded ahead. Half types are packed in pairs, one register each.
template <class Formula>
GRADSCALE_HOST_DEVICE constexpr int lane_blocks(int others) {
  constexpr int rows = Formula::kHasTargets ? 2 : 1;
  constexpr int bytes =
      Formula::kLanes > 1 && Formula::kLoadsAhead ? static_cast<int>(sizeof(typename Formula::Logit)) : 0;
  constexpr int registers =
      Formula::kElements * (rows + (Formula::kKeepsDifferences ? 1 : 0)) + Formula::kElements * rows * bytes / 4;
  const int wanted = (registers + others + 7) / 8 * 8;
  return 65536 / kRowThreads / (wanted < 64 ? 64 : (wanted > 168 ? 168 : wanted));
}

// A base of formulas: the sums of a row over bins, of exponentials, and of exponentials times the bin's distance from
// the middle, or times its raw centre. The expectation of a uniform row is exactly the middle: either only integers are
// added, or terms of raw centres are added in the order of their distance from the middle, to one sum on each side, and
// the sums of opposite bins cancel.
template <bool raw>
class BinSums {
  const float* centers_; // [width] if raw

 public:
  enum Sum { kSum, kMoment, kShifted };
  static constexpr float kShiftedUnit = 0x1p-16f; // so that a sum of differences does not overflow

  GRADSCALE_DEVICE explicit BinSums(const float* centers) : centers_(raw ? kept(centers) : nullptr) {
  }

  template <class Vectors>
  GRADSCALE_DEVICE static float target(const Vectors&, int, float t) {
    return t;
  }
  // The place of element n: its raw centre, or its distance from the middle less middle().
  template <class Vectors>
  GRADSCALE_DEVICE float place(const Vectors& vectors, int n) const {
    if constexpr (raw) {
      return vectors.exists(n) ? (centers_ + vectors.first)[Vectors::index(n)] : 0.0f; // constants are added to it
    } else {
      return Vectors::distance(n);
    }
  }
  // Makes place() read raw centres again, instead of keeping them in registers.
  GRADSCALE_DEVICE void forget_places() {
    centers_ = raw ? kept(centers_) : nullptr;
  }
  template <class Vectors>
  GRADSCALE_DEVICE static float middle(const Vectors& vectors) {
    return raw ? 0.0f : vectors.middle();
  }

  // This lane's part of the sum of e times (place() + from).
  template <class Vectors>
  GRADSCALE_DEVICE float moment(const Vectors& vectors, const typename Vectors::Values& e, float from) const {
    float chains[Vectors::kChains] = {};
    if constexpr (raw) {
      mirrored_moments(vectors, e, from, chains);
    } else {
#pragma unroll
      for (int n = 0; n < Vectors::kElements; ++n) {
        chains[Vectors::chain(n)] += e[n] * (place(vectors, n) + from);
      }
    }
    return vectors.joined(chains);
  }

  template <class Vectors, int count>
  GRADSCALE_DEVICE void add(float (&sums)[count], const Vectors& vectors, int n, float e, float d, float) const {
    sums[kSum] += e;
    if constexpr (!raw) {
      sums[kMoment] += e * (place(vectors, n) + middle(vectors)); // the place is exact
    }
    if constexpr (count > kShifted) {
      sums[kShifted] = fmaf(vectors.exists(n) ? d : 0.0f, kShiftedUnit, sums[kShifted]);
    }
  }
  template <class Vectors, int count>
  GRADSCALE_DEVICE void add_lane(
      float (&chains)[Vectors::kChains][count], const Vectors& vectors, const typename Vectors::Values& e) const {
    if constexpr (raw) {
      float moments[Vectors::kChains] = {};
      mirrored_moments(vectors, e, 0, moments);
#pragma unroll
      for (int k = 0; k < Vectors::kChains; ++k) {
        chains[k][kMoment] = moments[k];
      }
    }
  }

 private:
  // Every kStep-th element of a row belongs to the same class: element k of the vectors of one lane. Mirroring a class
  // at the middle of the row gives another class. A class is summed upwards above the middle, and downwards below it.
  // Its upper sum is added to the lower sum of the mirrored class, which is in another lane. If the row and its support
  // are symmetric, both sums have the same magnitude, and cancel exactly.
  template <class Vectors>
  GRADSCALE_DEVICE void mirrored_moments(
      const Vectors& vectors, const typename Vectors::Values& e, float from, float (&chains)[Vectors::kChains]) const {
    constexpr int vector_size = Vectors::kVectorSize, elements = Vectors::kElements, last = Vectors::kWidth - 1;
    static_assert(vector_size <= 2);
    float above[vector_size] = {}, below[vector_size] = {};
    const auto add_if = [&](bool is_inside, int n, float& sum) {
      sum = fmaf(is_inside ? e[n] : 0.0f, place(vectors, n) + from, sum);
    };
#pragma unroll
    for (int n = 0; n < elements; ++n) {
      if (Vectors::index(n) + Vectors::kStep > last / 2) { // may be above the middle
        add_if(2 * (vectors.first + Vectors::index(n)) >= last, n, above[n % vector_size]);
      }
    }
#pragma unroll
    for (int n = elements - 1; n >= 0; --n) {
      if (Vectors::index(n) - Vectors::kMostBefore <= last / 2) {
        add_if(2 * (vectors.first + Vectors::index(n)) < last, n, below[n % vector_size]);
      }
    }
    const int lane = static_cast<int>(threadIdx.x) % Vectors::kLanes, before = vector_size * lane - vectors.first;
#pragma unroll
    for (int k = 0; k < vector_size; ++k) {
      const int opposite = (last + 2 * before - vector_size * lane - k) & (Vectors::kStep - 1);
      const float other = below[(last - k) & (vector_size - 1)];
      chains[Vectors::chain(k)] +=
          above[k] + from_owner<Vectors::kLanes>(
                         (static_cast<int>(threadIdx.x) % 32 & -Vectors::kLanes) + opposite / vector_size, other);
    }
  }
};

} // namespace gradscale
