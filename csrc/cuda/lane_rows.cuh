// The one family of kernels for rows of logits of a width that is known at compile time, float or a half type.
//
// A lane owns every lanes_per_row-th unit of a row, in registers (LaneUnits). A warp owns up to 32 rows: it
// computes 32 / lanes_per_row of them side by side, and then the next ones. Lane r holds the numbers of row r (target,
// factors, sums), so that formulas of these, some in double, are computed once for all rows of a warp. A block has 4
// warps, which share nothing: small blocks fill multiprocessors although rows take many registers.
//
// The next rows are loaded while rows are reduced and stored: the 16 to 32 warps of a multiprocessor keep 30 to 100 KB
// of loads in flight. Rows of which less than a sector would be accessed at once pass through shared memory, all of a
// warp together. Bytes: logits (and targets over them) are read once, gradients are written once.
//
// What is computed is a formula, a type that derives from LaneShape and has
//
// - Exponent: the type of the differences d of logits from the maximum, and of the exponentials e = exp(x - maximum);
// - begin_row(holder, units, exponent): the following calls are about this row, whose numbers lane `holder` holds;
// - target(units, n, t): the target of element n of this lane, whose value in memory is t;
// - add(sums, units, n, e, d, t), add_lane(sums, units): add element n, and a term for all elements of the lane, to the
//   kSums sums of the row, of which gradient() needs the first kRowSums;
// - add_illegal(sums, x, t), if kHasMetrics: called too for elements of a lane that has logits that are not finite;
// - gradient(sums, units, e, d, t): replaces e by the gradient; sums are of the whole row;
// - counts(): false if the gradient of the row is 0 instead, and its logits do not count;
// - add_square(units, n, g, square), if kHasMetrics: adds element n of the gradient to the sum of its squares;
// - finish(results, gradients), if kFinishes: stores the results of the row of each lane, metrics if kHasMetrics;
// - kLoadsAhead: false if the next rows are loaded after rows are stored;
// - kKeepsDifferences: true if gradient() uses d.
#pragma once

#include "lanes.cuh"

namespace gradscale {

// ---- Short rows in shared memory ------------------------------------------------------------------------------------

// Up to 32 short rows of a warp in shared memory. All lanes together copy them from and to device memory, 16 bytes a
// lane where the rows are contiguous; then each lane reads and writes its own row.

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

  // `shared` is kBytes at a multiple of 16.
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
// lane accesses at once, and a lane owns every lanes_per_row-th unit. Units begin at multiples of their size in memory.
// Where the width is odd, so may be the beginning of a row, and its first and last units may be partly outside: their
// elements are accessed one by one. What the lanes of a row access together starts at a multiple of 32 bytes, a sector
// of memory; if it is less than a sector, rows pass through a tile in shared memory.

constexpr int log2_of(int power) {
  return power == 1 ? 0 : 1 + log2_of(power / 2);
}

template <class T, int width, int lanes_per_row, int unit>
struct LaneUnits {
  static constexpr int kElementsPerSector = 32 / static_cast<int>(sizeof(T));
  static constexpr int kUnit = unit;
  static constexpr int kStep = lanes_per_row * unit; // elements from one unit of a lane to its next
  static constexpr bool kTiled = kStep < kElementsPerSector;
  static constexpr bool kSplits = width % unit != 0; // units may be partly outside of the row
  static constexpr int kMostBefore = kTiled ? 0 : kElementsPerSector - (kSplits ? 1 : unit); // elements before the row
  static constexpr int kUnits = (width + kMostBefore + kStep - 1) / kStep;                   // of a lane
  static constexpr int kElements = kUnits * unit;
  static constexpr int kMiddle = kUnits / 2;
  using Values = float[kElements];
  using Mask = std::conditional_t<(kElements >= 32), uint64_t, uint32_t>; // a bit for each element
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

  // True if element n is inside the row. Constant for most elements.
  GRADSCALE_DEVICE bool exists(int n) const {
    return is_inside(n) || static_cast<uint32_t>(first + compared(n)) < static_cast<uint32_t>(width);
  }

  // True if element n is inside, wherever the row begins.
  GRADSCALE_DEVICE static constexpr bool is_inside(int n) {
    return compared(n) >= kMostBefore && compared(n) + kStep - unit < width;
  }

  // True if all of unit c is inside, wherever the row begins.
  GRADSCALE_DEVICE static constexpr bool is_whole(int c) {
    return is_inside(unit * c) && is_inside(unit * c + unit - 1);
  }

  // A bit for each of this lane's elements that are among `count` elements of the row from `begin` on.
  GRADSCALE_DEVICE Mask mask(int32_t begin, int32_t count) const {
    using Few = std::conditional_t<lanes_per_row == 1, Mask, uint32_t>; // holds the bits of a row's bins with mass
    const int32_t low = elements_before(begin);
    return static_cast<Mask>((Few(1) << (elements_before(begin + count) - low)) - 1) << low;
  }
  GRADSCALE_DEVICE int32_t elements_before(int32_t index) const {
    int32_t count = 0;
#pragma unroll
    for (int k = 0; k < unit; ++k) {
      count += (index - first + kStep - 1 - k) >> log2_of(kStep);
    }
    return count;
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
      if (is_split(c)) {
#pragma unroll
        for (int k = 0; k < unit; ++k) {
          if (exists(unit * c + k)) {
            set(units[c], k, load_packed<U, 1>(from + kStep * c + k));
          }
        }
      } else if (exists(unit * c)) {
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
    const LaneUnits again{forgotten(first)}; // comparisons are repeated: keeping their results costs more
#pragma unroll
    for (int c = 0; c < kUnits; ++c) {
      if (is_split(c)) {
#pragma unroll
        for (int k = 0; k < unit; ++k) {
          if (again.exists(unit * c + k)) {
            store_packed(to + kStep * c + k, packed<U, 1>(values + unit * c + k));
          }
        }
      } else if (again.exists(unit * c)) {
        const auto words = packed<U, unit>(values + unit * c);
        if constexpr (kTiled) {
          *reinterpret_cast<Packed<U, unit>*>(to + kStep * c) = words;
        } else {
          store_packed(to + kStep * c, words);
        }
      }
    }
  }

 private:
  // The index of the element that is compared for element n: the first of a unit that is never split.
  GRADSCALE_DEVICE static constexpr int compared(int n) {
    return index(kSplits ? n : n - n % unit);
  }
  // True if unit c may be partly outside of the row.
  GRADSCALE_DEVICE static constexpr bool is_split(int c) {
    return kSplits && !is_whole(c);
  }
};

// ---- Rows of a warp -------------------------------------------------------------------------------------------------

// Rows first .. first + count of a warp, which computes 32 / lanes_per_row of them side by side, in turns. Lane l of
// the lanes that own a row holds the numbers of the row of turn l.
struct RowsOfWarp {
  int64_t first;
  int count; // up to 32; 0 or less: the warp has no rows
  int lane;
  int row; // whose numbers this lane holds; may be `count` or more

  GRADSCALE_DEVICE RowsOfWarp(int64_t block, int32_t rows_per_warp, int64_t rows, int lanes_per_row)
      : first((block * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32) * rows_per_warp),
        count(uniform(static_cast<int32_t>(rows - first < rows_per_warp ? rows - first : rows_per_warp))),
        lane(static_cast<int>(threadIdx.x) % 32),
        row(lane % lanes_per_row * (32 / lanes_per_row) + lane / lanes_per_row) {
  }
  GRADSCALE_DEVICE static int holder_of(int row, int lanes_per_row) {
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

// A number of this lane's row, which lane `holder` holds.
template <int lanes_per_row, class T>
GRADSCALE_DEVICE T held_by(int holder, T own) {
  return lanes_per_row == 1 ? own : __shfl_sync(kWholeWarp, own, holder);
}

// What a row is reduced to, in the lane that holds its numbers.
template <int count>
struct RowResults {
  float maximum = 0;
  float sums[count] = {};
  float square = 0;        // of the gradient
  float largest_logit = 0; // the largest magnitude of finite logits, of all rows of the warp that count
};

// Sums over the lanes of a row that only finish() needs: each lane puts its part into shared memory, and the lane that
// holds the row adds them up.
template <int lanes_per_row, int count>
struct PartsOfSums {
  static constexpr int kParts = lanes_per_row < 16 ? lanes_per_row : 16; // of a row
  static constexpr int kPitch = 33; // so that neither lanes of a row nor rows meet in a bank
  static constexpr int kBytes = lanes_per_row == 1 ? 0 : count * kParts * kPitch * static_cast<int>(sizeof(float));
  float* shared;
  int lane;

  GRADSCALE_DEVICE float& part(int sum, int index, int holder) const {
    return shared[(sum * kParts + index) * kPitch + holder];
  }
  GRADSCALE_DEVICE void put(int holder, float (&sums)[count]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if constexpr (lanes_per_row > kParts) {
        sums[i] += __shfl_xor_sync(kWholeWarp, sums[i], kParts);
      }
      if (lanes_per_row == kParts || lane < kParts) {
        part(i, lane % kParts, holder) = sums[i];
      }
    }
  }
  // The sums of the row that this lane holds.
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
// `lanes_per_row` lanes own a row, and access `unit` elements each at once.
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
  static constexpr int kSums = Formula::kSums, kRowSums = Formula::kRowSums, kElements = Formula::kElements;
  static constexpr bool kHasTargets = Formula::kHasTargets, kWantsGradient = Formula::kWantsGradient;

  // Gradients replace logits in shared memory: the lane that writes them has read its row.
  using Logits = Tile<Logit, kWidth>;
  using Gradients = Tile<Gradient, kWidth>;
  using Targets = Tile<Probability, kWidth>;
  static_assert(Units::kTiled == (kLanes == 1));
  static constexpr int kParts = kSums - kRowSums + 1; // the square is one too
  using Parts = PartsOfSums<kLanes, Formula::kFinishes ? kParts : 0>;
  static constexpr int kLogitsBytes = Logits::kBytes > Gradients::kBytes ? Logits::kBytes : Gradients::kBytes;

 public:
  // Shared memory of a warp.
  static constexpr int kBytes = Units::kTiled ? kLogitsBytes + (kHasTargets ? Targets::kBytes : 0) : Parts::kBytes;

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
    end_ = warp.count - warp.lane / kLanes;
    const int row = exists(0) ? warp.lane / kLanes : warp.count - 1;
    from_ = logits_.row(row);
    targets_from_ = targets_.row(row);
    gradient_ = to_.row(row);
    load();
    if constexpr (Units::kTiled) {
      __syncwarp(); // several lanes have read the last row, whose gradient replaces it
    }
  }

  GRADSCALE_DEVICE void run(Formula& formula) {
    RowResults<kSums> results;
    int holder = warp_.lane & -kLanes;
    if constexpr (kLanes == 1) {
      compute(formula, 0, holder, results);
    } else {
#pragma unroll 1
      for (int begin = 0; begin < warp_.count; begin += kSideBySide) {
        compute(formula, begin, holder++, results);
      }
    }
    __syncwarp(); // finish() may replace what other lanes have stored
    if constexpr (Formula::kFinishes) {
      if (kLanes > 1 && warp_.has_row()) {
        float parts[kParts] = {};
        parts_of_sums().add(parts);
#pragma unroll
        for (int i = kRowSums; i < kSums; ++i) {
          results.sums[i] = parts[i - kRowSums];
        }
        results.square = parts[kSums - kRowSums];
      }
      results.largest_logit = maximum_of_lanes<32>(results.largest_logit);
      formula.finish(results, to_);
    }
    if constexpr (Units::kTiled && kWantsGradient) {
      __syncwarp();
      Gradients(shared_, warp_.lane).store(gradients_, warp_.count);
    }
  }

 private:
  GRADSCALE_DEVICE PartsOfSums<kLanes, kParts> parts_of_sums() const {
    return {reinterpret_cast<float*>(shared_), warp_.lane};
  }
  // False if this lane has none of the rows from `begin` on, because there are fewer. It repeats another row.
  GRADSCALE_DEVICE bool exists(int begin) const {
    return begin < end_;
  }

  GRADSCALE_DEVICE void load() {
    units_ = Units::of_row(from_, warp_.lane);
    units_.load(from_, -INFINITY, x_);
    if constexpr (kHasTargets) {
      units_.load(targets_from_, 0, t_);
    }
  }

  // Loads this lane's part of the rows from `begin` on. A lane that has none keeps the row before.
  GRADSCALE_DEVICE void load_next(int begin) {
    if (kLanes > 1 && exists(begin)) {
      from_ += kSideBySide * logits_.stride;
      targets_from_ += kHasTargets ? kSideBySide * targets_.stride : 0;
      load();
    }
  }

  // Computes the rows from `begin` on, which were loaded, and loads the next ones. `holder` has this lane's row.
  GRADSCALE_DEVICE void compute(Formula& formula, int begin, int holder, RowResults<kSums>& own) {
    const Units units = units_;
    Values e, d, t{};
    float sums[kSums] = {}, square = 0, largest = 0;
    const float maximum = maximum_of_lanes<kLanes>(maximum_of(largest));
    unpack_rows(d, t);
    const typename Formula::Exponent exponent(maximum);
    formula.begin_row(holder, units, exponent);
    if constexpr (Formula::kHasMetrics) {
      if (!(largest < INFINITY)) { // rarely: illegal actions and bins
        largest = 0;
        Values x, of_x{};
        unpack_rows(x, of_x);
#pragma unroll
        for (int n = 0; n < kElements; ++n) {
          largest = larger(largest, finite_magnitude(x[n]));
          formula.add_illegal(sums, x[n], formula.target(units, n, of_x[n]));
        }
      }
      if (formula.counts()) {
        own.largest_logit = larger(own.largest_logit, largest);
      }
    }
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
      d[n] = exponent.difference(d[n]);
      e[n] = exponent.exponential(d[n]);
      t[n] = formula.target(units, n, t[n]);
      formula.add(sums, units, n, e[n], d[n], t[n]);
    }
    formula.add_lane(sums, units);
    if constexpr (Formula::kLoadsAhead) {
      load_next(begin + kSideBySide);
    }
    sums_of_lanes<kLanes, kRowSums>(sums, warp_.lane);
    if constexpr (kWantsGradient) {
      formula.gradient(sums, units, e, d, t);
#pragma unroll
      for (int n = 0; n < kElements && Formula::kHasMetrics; ++n) {
        formula.add_square(units, n, e[n], square);
      }
      if (exists(begin)) { // otherwise, other lanes store the row
        units.store(gradient_, e);
        if (!formula.counts()) { // rarely: the branch costs less than a choice for each element
          const Values zeros{};
          units.store(gradient_, zeros);
        }
        gradient_ += kSideBySide * to_.stride;
      }
    }
    if constexpr (!Formula::kLoadsAhead) {
      load_next(begin + kSideBySide);
    }
    if constexpr (Formula::kFinishes && kLanes > 1) {
      float parts[kParts];
#pragma unroll
      for (int i = kRowSums; i < kSums; ++i) {
        parts[i - kRowSums] = sums[i];
      }
      parts[kSums - kRowSums] = square;
      parts_of_sums().put(holder, parts);
    }
    if (Formula::kFinishes && holder == warp_.lane) {
      own.maximum = maximum;
      own.square = kLanes == 1 ? square : 0;
#pragma unroll
      for (int i = 0; i < (kLanes == 1 ? kSums : kRowSums); ++i) {
        own.sums[i] = sums[i];
      }
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

  // The largest of this lane's logits. Also finds the largest magnitude, which is infinite where one of them is.
  GRADSCALE_DEVICE float maximum_of(float& magnitude) const {
    Values x;
    Extremes<Logit, Units::kUnit> extremes;
    float maximum = -INFINITY;
#pragma unroll
    for (int c = 0; c < Units::kUnits; ++c) {
      unpack(x_[c], x + Units::kUnit * c);
      if (Units::is_whole(c)) {
        extremes.add(x_[c]);
      } else {
#pragma unroll
        for (int n = Units::kUnit * c; n < Units::kUnit * (c + 1); ++n) {
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
  RowsInMemory<Gradient> gradients_, to_;
  int end_; // of the rows that begin with this lane's
  const Logit* from_;
  const Probability* targets_from_;
  Gradient* gradient_;
  Units units_{};
  typename Units::template Words<Logit> x_;
  typename Units::template Words<Probability> t_;
};

// The blocks that a multiprocessor is to hold: as many as have registers for `others` and for what a thread keeps of
// each element: its exponential, its target, and the next row's.
template <class Formula>
GRADSCALE_HOST_DEVICE constexpr int blocks_of_lanes(int others) {
  constexpr int rows = (Formula::kHasTargets ? 2 : 1) * (Formula::kLanes > 1 && Formula::kLoadsAhead ? 2 : 1);
  constexpr int registers = Formula::kElements * (rows + (Formula::kKeepsDifferences ? 1 : 0));
  const int wanted = (registers + others + 7) / 8 * 8;
  return 65536 / kRowThreads / (wanted < 64 ? 64 : (wanted > 168 ? 168 : wanted));
}

} // namespace gradscale
