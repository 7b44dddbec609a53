// Rows of logits, float or a half type, whose width is known at compile time.
//
// A lane owns every lanes_per_row-th unit of a row, in registers (LaneUnits). A warp owns up to 32 rows: it
// computes 32 / lanes_per_row of them side by side, and then the next ones. Lane r holds the per-row numbers of row r
// (target, factors, sums), so that one instruction computes with the numbers of all rows of a warp; some of these
// computations are in double. A block has 4 warps, which share nothing: small blocks fill multiprocessors although rows
// need many registers.
//
// The next rows are loaded while rows are reduced and stored: the 16 to 32 warps of a multiprocessor keep 30 to 100 KB
// of loads in flight. If the lanes of a row access less than a sector at once, all rows of a warp are copied through
// shared memory together. Bytes: logits (and targets over them) are read once, gradients are written once.
//
// The computation is a formula, a type that derives from LaneShape and has
//
// - begin_row(row): the following calls are for row `row` of the warp, whose numbers lane `row` holds;
// - target(units, n, t): the target of element n of this lane, whose value in memory is t;
// - add(sums, units, n, e, d, t), add_lane(sums, units): add element n, with d = x - maximum and e = exp(d), and a term
//   for all elements of the lane, to the kSums sums of the row;
// - gradient(sums, units, e, d, t): replaces e by the gradient; sums are of the whole row;
// - counts(): false if the gradient of the row is 0 instead;
// - add_square(units, n, g, square), if kHasMetrics: adds element n of the gradient to the sum of its squares;
//   store_square(row, square) of each row follows;
// - finish(maximum, largest_logit, sums, gradients), if kFinishes: stores the results of the row of each lane; the
//   maximum is valid if kNeedsMaximum, the largest magnitude of finite logits if kHasMetrics;
// - kLoadsAhead: false if the next rows are loaded after rows are stored;
// - kKeepsDifferences: true if gradient() uses d.
#pragma once

#include "lanes.cuh"

namespace gradscale {

// ---- Short rows in shared memory ------------------------------------------------------------------------------------

// Up to 32 short rows of a warp in shared memory. All lanes together copy them from and to device memory, 16 bytes per
// lane if the rows are contiguous. Between the copies, each lane reads and writes elements of its own row.

// Rows in device memory or in a tile, `stride` elements apart.
template <class T>
struct RowsInMemory {
  T* data;
  int64_t stride;

  GRADSCALE_DEVICE T* row(int64_t index) const {
    return data + index * stride;
  }
};

template <class T, int width>
class Tile {
  static constexpr int kRowBytes = width * static_cast<int>(sizeof(T));
  static constexpr int kPitch = tile_pitch(width, static_cast<int>(sizeof(T)));
  static constexpr int kVectors = 2 * kRowBytes; // 16 bytes each, in 32 rows
  static constexpr int kVectorsPerLane = (kVectors + 31) / 32;
  static constexpr int kPending = 8; // loads that a lane issues before it waits for the first

 public:
  static constexpr int kBytes = 32 * kPitch;

  // `shared`: kBytes of shared memory, aligned to 16 bytes.
  GRADSCALE_DEVICE Tile(char* shared, int lane) : shared_(shared), lane_(lane) {
  }

  GRADSCALE_DEVICE RowsInMemory<T> rows() const {
    return {reinterpret_cast<T*>(shared_), kPitch / static_cast<int>(sizeof(T))};
  }

  GRADSCALE_DEVICE void load(const RowsInMemory<const T>& from, int count) const {
    if (!is_contiguous(from, count)) {
      copy_elements(from, rows(), count);
      return;
    }
#pragma unroll
    for (int first = 0; first < kVectorsPerLane; first += kPending) {
      Words16 vectors[kPending];
#pragma unroll
      for (int i = 0; i < kPending; ++i) {
        if (exists(first + i)) {
          vectors[i] = load16<Words16>(reinterpret_cast<const Words16*>(from.data) + vector(first + i));
        }
      }
#pragma unroll
      for (int i = 0; i < kPending; ++i) {
        if (exists(first + i)) {
          put16(in_tile(vector(first + i)), vectors[i]);
        }
      }
    }
  }

  GRADSCALE_DEVICE void store(const RowsInMemory<T>& to, int count) const {
    if (!is_contiguous(to, count)) {
      copy_elements(rows(), to, count);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      if (exists(i)) {
        put16(reinterpret_cast<Words16*>(to.data) + vector(i), *in_tile(vector(i)));
      }
    }
  }

 private:
  template <class U>
  GRADSCALE_DEVICE static bool is_contiguous(const RowsInMemory<U>& rows, int count) {
    return count == 32 && rows.stride == width && aligned(rows.data);
  }
  // Neighbouring lanes copy neighbouring elements.
  template <class From>
  GRADSCALE_DEVICE void copy_elements(const RowsInMemory<From>& from, const RowsInMemory<T>& to, int count) const {
#pragma unroll 8
    for (int i = lane_; i < count * width; i += 32) {
      to.row(i / width)[i % width] = from.row(i / width)[i % width];
    }
  }
  GRADSCALE_DEVICE int vector(int index) const {
    return 32 * index + lane_;
  }
  GRADSCALE_DEVICE bool exists(int index) const {
    return 32 * index + 32 <= kVectors || vector(index) < kVectors;
  }
  GRADSCALE_DEVICE Words16* in_tile(int vector) const {
    const int gaps = kPitch == kRowBytes ? 0 : vector / (kRowBytes / 16); // 16 bytes after each row
    return reinterpret_cast<Words16*>(shared_) + vector + gaps;
  }

  char* shared_;
  int lane_;
};

// ---- The elements of a row that one lane owns -----------------------------------------------------------------------

// `lanes_per_row` lanes of a warp own a row together. Its elements are grouped into units of `unit` elements, which a
// lane accesses at once, and a lane owns every lanes_per_row-th unit. A unit divides the width and the beginning of
// each row, so that no unit is partly outside of a row: a unit is one element if widths are odd. The lanes of a row
// access lanes_per_row units at once, from a multiple of 32 bytes on, a sector of memory. If these units are less than
// a sector, rows are copied through a tile in shared memory.

template <class T, int width, int lanes_per_row, int unit>
struct LaneUnits {
  static constexpr int kElementsPerSector = 32 / static_cast<int>(sizeof(T));
  static constexpr int kUnit = unit;
  static constexpr int kStep = lanes_per_row * unit; // elements from one unit of a lane to its next
  static constexpr bool kTiled = kStep < kElementsPerSector;
  static constexpr int kMostBefore = kTiled ? 0 : kElementsPerSector - unit; // elements of the sector before the row
  static constexpr int kUnits = (width + kMostBefore + kStep - 1) / kStep;   // of a lane
  static constexpr int kElements = kUnits * unit;
  static constexpr int kMiddle = kUnits / 2;
  using Values = float[kElements];
  template <class U>
  using Words = Packed<U, unit>[kUnits];

  int32_t first; // the index of this lane's first element; negative: before the row

  GRADSCALE_DEVICE static LaneUnits of_row(const T* row, int lane) {
    const int32_t first = unit * (lane % lanes_per_row);
    if constexpr (kTiled) {
      return {first};
    } else {
      return {first - static_cast<int32_t>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kElementsPerSector)};
    }
  }

  // True if unit `c` is inside the row. Constant for most units.
  GRADSCALE_DEVICE bool exists(int c) const {
    if (kStep * (c + 1) > width) {
      return static_cast<uint32_t>(first + kStep * c) < static_cast<uint32_t>(width);
    }
    return kTiled || c > 0 || first >= 0;
  }

  // The index of element n of this lane is first + index(n). Its distance from the middle of the row, in elements, is
  // distance(n) + middle(), where distance(n) is a constant whole number, so that sums over it are exact.
  GRADSCALE_DEVICE static constexpr int index(int n) {
    return kStep * (n / unit) + n % unit;
  }
  GRADSCALE_DEVICE static constexpr float distance(int n) {
    return static_cast<float>(index(n) - kStep * kMiddle);
  }
  GRADSCALE_DEVICE float middle() const {
    return static_cast<float>(first + kStep * kMiddle) - 0.5f * (width - 1);
  }

  template <class U>
  GRADSCALE_DEVICE void load(const U* row, float outside, Words<U>& units) const {
    const U* const from = kTiled ? row + first : kept(row + first);
    float values[unit];
#pragma unroll
    for (int k = 0; k < unit; ++k) {
      values[k] = outside;
    }
#pragma unroll
    for (int c = 0; c < kUnits; ++c) {
      units[c] = packed<U, unit>(values);
      if (exists(c)) {
        if constexpr (kTiled) {
          units[c] = *reinterpret_cast<const Packed<U, unit>*>(from + kStep * c);
        } else {
          units[c] = load_packed<U, unit>(from + kStep * c);
        }
      }
    }
  }

  template <class U>
  GRADSCALE_DEVICE void store(U* row, const Values& values) const {
    U* const to = kTiled ? row + first : kept(row + first);
#pragma unroll
    for (int c = 0; c < kUnits; ++c) {
      if (exists(c)) {
        const auto words = packed<U, unit>(values + unit * c);
        if constexpr (kTiled) {
          *reinterpret_cast<Packed<U, unit>*>(to + kStep * c) = words;
        } else {
          store_packed(to + kStep * c, words);
        }
      }
    }
  }
};

// ---- Rows of a warp -------------------------------------------------------------------------------------------------

// Rows first .. first + count of a warp.
struct RowsOfWarp {
  int64_t first;
  int count; // up to 32; 0 or less: the warp has no rows
  int lane;

  GRADSCALE_DEVICE RowsOfWarp(int64_t block, int32_t rows_per_warp, int64_t rows)
      : first((block * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32) * rows_per_warp),
        count(uniform(static_cast<int32_t>(rows - first < rows_per_warp ? rows - first : rows_per_warp))),
        lane(static_cast<int>(threadIdx.x) % 32) {
  }
  // The row of this lane; lanes without a row repeat the last one.
  GRADSCALE_DEVICE int64_t own() const {
    return first + (lane < count ? lane : count - 1);
  }
  template <class T>
  GRADSCALE_DEVICE RowsInMemory<T> at(T* data, int64_t stride) const {
    return {data + first * stride, stride};
  }
};

// Returns the number of row `row` that lane `row` holds in `own`.
template <int lanes_per_row, class T>
GRADSCALE_DEVICE T of_row(T own, int row) {
  return lanes_per_row == 1 ? own : __shfl_sync(kWholeWarp, own, row);
}

template <class T, class Default>
using NotVoid = std::conditional_t<std::is_same_v<T, void>, Default, T>;

// Rows of `width` logits T with targets U over them (void: none) and gradients G (void: none is wanted).
// `lanes_per_row` lanes own a row, and each accesses `unit` elements at once.
template <class T, class U, class G, int width, int lanes_per_row, int unit>
struct LaneShape {
  using Logit = T;
  using Probability = NotVoid<U, float>;
  using Gradient = NotVoid<G, T>;
  using Units = LaneUnits<T, width, lanes_per_row, unit>;
  using Values = typename Units::Values;
  static constexpr int kWidth = width, kLanes = lanes_per_row, kElements = Units::kElements;
  static constexpr bool kHasTargets = !std::is_same_v<U, void>, kWantsGradient = !std::is_same_v<G, void>;
};

template <class Formula>
class LaneRows {
  using Logit = typename Formula::Logit;
  using Probability = typename Formula::Probability;
  using Gradient = typename Formula::Gradient;
  using Units = typename Formula::Units;
  using Values = typename Formula::Values;
  static constexpr int kWidth = Formula::kWidth, kLanes = Formula::kLanes, kSideBySide = 32 / kLanes;
  static constexpr int kSums = Formula::kSums, kElements = Formula::kElements;
  static constexpr bool kHasTargets = Formula::kHasTargets, kWantsGradient = Formula::kWantsGradient;

  // Gradients replace logits in shared memory. A lane replaces only logits that it has read itself. If the sizes of
  // gradients and logits differ, rows are at other addresses: then all lanes read their whole rows before any writes.
  using Logits = Tile<Logit, kWidth>;
  using Gradients = Tile<Gradient, kWidth>;
  using Targets = Tile<Probability, kWidth>;
  static_assert(!Units::kTiled || kLanes == 1 || sizeof(Gradient) == sizeof(Logit));
  static constexpr int kLogitsBytes = Logits::kBytes > Gradients::kBytes ? Logits::kBytes : Gradients::kBytes;

 public:
  // Shared memory of a warp.
  static constexpr int kBytes = Units::kTiled ? kLogitsBytes + (kHasTargets ? Targets::kBytes : 0) : 0;

  // Copies the rows to shared memory if they pass through it, and loads the first ones.
  GRADSCALE_DEVICE LaneRows(
      const RowsOfWarp& warp,
      const RowsInMemory<const Logit>& logits,
      const RowsInMemory<const Probability>& targets,
      const RowsInMemory<Gradient>& gradients,
      char* shared)
      : warp_(warp), shared_(shared), logits_(logits), targets_(targets), gradients_(gradients), to_(gradients) {
    if constexpr (Units::kTiled) {
      const Logits tile(shared, warp.lane);
      tile.load(logits, warp.count);
      logits_ = {tile.rows().data, tile.rows().stride};
      to_ = Gradients(shared, warp.lane).rows();
      if constexpr (kHasTargets) {
        const Targets of_targets(shared + kLogitsBytes, warp.lane);
        of_targets.load(targets, warp.count);
        targets_ = {of_targets.rows().data, of_targets.rows().stride};
      }
      __syncwarp();
    }
    load(0);
    if constexpr (Units::kTiled) {
      __syncwarp(); // all lanes have read these rows before gradients replace them
    }
  }

  GRADSCALE_DEVICE void run(Formula& formula) {
    float maximum = 0;
    float sums[kSums] = {};
    float largest_logit = 0;
    if constexpr (kLanes == 1) {
      compute(formula, 0, maximum, largest_logit, sums);
    } else {
#pragma unroll 1
      for (int begin = 0; begin < warp_.count; begin += kSideBySide) {
        compute(formula, begin, maximum, largest_logit, sums);
      }
    }
    __syncwarp(); // finish() may overwrite elements that other lanes have stored
    if constexpr (Formula::kFinishes) {
      formula.finish(maximum, largest_logit, sums, to_);
    }
    if constexpr (Units::kTiled && kWantsGradient) {
      __syncwarp();
      Gradients(shared_, warp_.lane).store(gradients_, warp_.count);
    }
  }

 private:
  // Loads this lane's part of the rows from `begin` on, side by side. Lanes without a row repeat the last row.
  GRADSCALE_DEVICE void load(int begin) {
    const int wanted = begin + warp_.lane / kLanes;
    row_ = wanted < warp_.count ? wanted : warp_.count - 1;
    units_ = Units::of_row(logits_.row(row_), warp_.lane);
    units_.load(logits_.row(row_), -INFINITY, x_);
    if constexpr (kHasTargets) {
      units_.load(targets_.row(row_), 0, t_);
    }
  }

  // Computes the rows that were loaded, and loads the next ones. Lane r gets the maximum and sums of row r.
  GRADSCALE_DEVICE void compute(
      Formula& formula, int begin, float& own_maximum, float& own_largest_logit, float (&own_sums)[kSums]) {
    const Units units = units_;
    const int row = row_;
    Values e, d, t{};
    float sums[kSums] = {};
    unpack_rows(d, t);
    const float maximum = maximum_of(d);
    if constexpr (Formula::kHasMetrics) {
      keep(begin, largest_finite(units, d, maximum), own_largest_logit);
    }
    formula.begin_row(row);
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
      d[n] -= maximum;
      e[n] = approximate_exp(d[n]);
      t[n] = formula.target(units, n, t[n]);
      formula.add(sums, units, n, e[n], d[n], t[n]);
    }
    formula.add_lane(sums, units);
    const bool has_next = kLanes > 1 && begin + kSideBySide < warp_.count;
    if (Formula::kLoadsAhead && has_next) {
      load(begin + kSideBySide);
    }
    sums_of_lanes<kLanes>(sums, warp_.lane);
    if constexpr (kWantsGradient) {
      formula.gradient(sums, units, e, d, t);
      if constexpr (Formula::kHasMetrics) {
        float square = 0;
#pragma unroll
        for (int n = 0; n < kElements; ++n) {
          formula.add_square(units, n, e[n], square);
        }
        square = sum_of_lanes<kLanes>(square);
        if (warp_.lane % kLanes == 0 && begin + warp_.lane / kLanes < warp_.count) {
          formula.store_square(row, square);
        }
      }
      const bool repeats = kLanes < 32 && begin + warp_.lane / kLanes >= warp_.count; // other lanes store the row
      if (!repeats) {
        units.store(to_.row(row), e);
      }
      if (!repeats && !formula.counts()) { // rare: the branch costs less than a selection for each element
        const Values zeros{};
        units.store(to_.row(row), zeros);
      }
    }
    if (!Formula::kLoadsAhead && has_next) {
      load(begin + kSideBySide);
    }
    if constexpr (Formula::kNeedsMaximum) {
      keep(begin, maximum, own_maximum);
    }
#pragma unroll
    for (int i = 0; i < kSums && Formula::kFinishes; ++i) {
      keep(begin, sums[i], own_sums[i]);
    }
  }

  GRADSCALE_DEVICE void unpack_rows(Values& x, Values& t) const {
#pragma unroll
    for (int c = 0; c < Units::kUnits; ++c) {
      unpack(x_[c], x + Units::kUnit * c);
      if constexpr (kHasTargets) {
        unpack(t_[c], t + Units::kUnit * c);
      }
    }
  }

  GRADSCALE_DEVICE static float maximum_of(const Values& x) {
    float maximum = -INFINITY;
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
      maximum = larger(maximum, x[n]);
    }
    return maximum_of_lanes<kLanes>(maximum);
  }

  // The largest magnitude of finite logits. `maximum` is the largest logit of the row.
  GRADSCALE_DEVICE static float largest_finite(const Units& units, const Values& x, float maximum) {
    float minimum = maximum;
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
      minimum = std::fmin(minimum, units.exists(n / Units::kUnit) ? x[n] : maximum);
    }
    minimum = -maximum_of_lanes<kLanes>(-minimum);
    float largest = larger(std::abs(minimum), std::abs(maximum));
    if (__any_sync(kWholeWarp, !(largest < INFINITY))) { // rare: a logit is not finite, as for illegal actions
      largest = 0;
#pragma unroll
      for (int n = 0; n < kElements; ++n) {
        largest = larger(largest, finite_magnitude(x[n]));
      }
      largest = maximum_of_lanes<kLanes>(largest);
    }
    return largest;
  }

  // Passes a number of each row from `begin` on, which all lanes of the row hold, to the lane that finishes the row.
  GRADSCALE_DEVICE void keep(int begin, float of_row, float& own) const {
    if constexpr (kLanes == 1) {
      own = of_row;
    } else {
      const int lane = warp_.lane;
      const float got = kLanes == 32 ? of_row : __shfl_sync(kWholeWarp, of_row, lane % kSideBySide * kLanes);
      own = lane / kSideBySide * kSideBySide == begin ? got : own;
    }
  }

  RowsOfWarp warp_;
  char* shared_;
  RowsInMemory<const Logit> logits_;
  RowsInMemory<const Probability> targets_;
  RowsInMemory<Gradient> gradients_, to_;
  int row_ = 0; // the row that was loaded last, into units_, x_ and t_
  Units units_{};
  typename Units::template Words<Logit> x_;
  typename Units::template Words<Probability> t_;
};

// The blocks per multiprocessor that the registers allow. A thread needs `others` registers, and for each element one
// register each for its exponential, its target, its difference from the maximum, and the logit and target of the next
// row, where the formula has them.
template <class Formula>
GRADSCALE_HOST_DEVICE constexpr int blocks_of_lanes(int others) {
  constexpr int rows = (Formula::kHasTargets ? 2 : 1) * (Formula::kLanes > 1 && Formula::kLoadsAhead ? 2 : 1);
  constexpr int registers = Formula::kElements * (rows + (Formula::kKeepsDifferences ? 1 : 0));
  const int wanted = (registers + others + 7) / 8 * 8;
  return 65536 / kRowThreads / (wanted < 64 ? 64 : (wanted > 168 ? 168 : wanted));
}

} // namespace gradscale
