// The kernels of recurrences. This file includes itself once for each instruction set.
//
// Each row is walked step by step, so that its results have the same bits wherever it is: among any number of rows, in
// any layout, and for any number of threads.
//
// Along steps: a vector holds neighbouring steps of one row, or of several rows that are joined, and computes their
// maps y -> a + b y. Then some rows are walked side by side, one number at a time, and vectors of steps compute the
// results from y.
// Across rows: a vector holds one step of neighbouring rows, for trajectories whose rows are adjacent in memory.
//
// Both process one tile at a time, and multiply where formulas select 0. A tile with a number that is not finite is
// computed again, one number at a time, with selection. Numbers that were finite keep their bits: both ways round
// after each multiplication and addition.
#ifndef GRADSCALE_VARIANT
#include "../kernels.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>

#define GRADSCALE_KERNELS "../returns/cpu/recurrences.cpp"
#include "../../cpu/each_instruction_set.h"

namespace gradscale {

const ReturnsRows along_steps_kernel = GRADSCALE_CPU_KERNEL(along_steps);
const ReturnsRows across_rows_kernel = GRADSCALE_CPU_KERNEL(across_rows);

} // namespace gradscale

#else
// A product and a sum that are contracted into one instruction are rounded once, in some functions and not in others.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif
#include "../../cpu/vectors.h"
#include "../formulas.h"
#include "sources.h"

#include "../../cpu/compile_baseline_fast.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// ---- Steps ----------------------------------------------------------------------------------------------------------

// Element i of row r of a tile, or of the elements from there on.
template <class L, class A>
GRADSCALE_HOST_DEVICE auto loaded(const Piece<A>& piece, int64_t r, int64_t i) {
  return L::load(piece.data + r * piece.row_advance + i * piece.advance);
}

// `masked`: steps may be masked.
template <class F, class L, bool masked = true, class A>
GRADSCALE_HOST_DEVICE Transition<L> transition(const Tile<A>& tile, int64_t r, int64_t i) {
  const auto load = [r, i](const auto& piece) { return loaded<L>(piece, r, i); };
  Transition<L> s;
  s.reward = load(tile.numbers[kRewards]);
  s.value = load(tile.numbers[kValues]);
  s.next_value = load(tile.numbers[kNextValues]);
  s.discount = load(tile.numbers[kDiscount]);
  s.lambda = load(tile.numbers[kLambda]);
  s.ratio = load(tile.numbers[kRatios]);
  s.later_value = typename L::V{};
  if constexpr (F::kReadsLaterValue) {
    s.later_value = load(tile.later_values);
  }
  for (int k = 0; k < 3; ++k) {
    s.limits[k] = tile.limits[k] - typename L::V{};
  }
  s.live = masked ? load(tile.live) : typename L::M{} == 0;
  s.terminated = load(tile.terminated);
  const auto at = [r, i](const Piece<uint8_t>& flags) {
    return flags.data + r * flags.row_advance + i * flags.advance;
  };
  s.cut = L::load_cut(at(tile.terminated), at(tile.truncated), at(tile.later_live));
  return s;
}

// One number per lane. Computes the same bits as VectorLanes, except where they are not finite: there, a coefficient of
// 0 selects 0.
template <class A>
struct ExactLane : OneLane<A> {
  static GRADSCALE_HOST_DEVICE void store(A* to, A x) {
    *to = x;
  }
  static GRADSCALE_HOST_DEVICE A times(A c, A x) {
    return c == 0 && x - x != 0 ? A(0) : c * x;
  }
  static GRADSCALE_HOST_DEVICE A product(A c, A d) {
    const A p = c * d;
    return c == 0 || d == 0 ? (p - p == 0 ? p : A(0)) : p == 0 ? OneLane<A>::underflow(p) : p;
  }
};

// Writes the results of a step, or of several. Returns a number that is finite only if all results and `own` are.
template <class F, class L, class V, class A>
GRADSCALE_HOST_DEVICE V
put_results(const Tile<A>& tile, int64_t r, int64_t i, const Transition<L>& s, V own, V before) {
  V out[kOutputs];
  F::results(s, own, before, out);
  V sum = own;
  for (int k = 0; k < F::kResults; ++k) {
    L::store(tile.out[k] + r * tile.out_row_advance[k] + i, out[k]);
    sum += out[k];
  }
  return sum - sum;
}

// Walks one step in each lane. `y` is y of the step before, and becomes y of the step. `again`: a number is not finite.
template <class F, class L, bool again = false, class A, class V = typename L::V>
GRADSCALE_HOST_DEVICE V walk(const Tile<A>& tile, int64_t r, int64_t i, V& y) {
  const Transition<L> s = transition<F, L>(tile, r, i);
  const V before = y;
  const auto step = F::step(s);
  y = F::kIsScaled ? step.walked(before) : applied(step.map(), before);
  if constexpr (again) {
    y = y - y == 0 ? y : step.walked(before); // the products in the map may overflow, or cancel as infinities
  }
  return put_results<F>(tile, r, i, s, y, before);
}

// ---- Vectors as lanes ----------------------------------------------------------------------------------------------

// Lanes of vectors. They multiply by coefficients of 0 instead of selecting 0.
template <class A>
struct VectorLanes {
  using V = typename Vectors<A>::V;
  using M = typename Vectors<A>::Integers;
  using Bytes = typename Vectors<A>::Bytes;

  static GRADSCALE_HOST_DEVICE V load(const A* from) {
    return load_vector(from);
  }
  static GRADSCALE_HOST_DEVICE M load(const uint8_t* from) {
    return widened<A>(from) != 0;
  }
  // Combines the flags as bytes, before they are widened to lanes.
  static GRADSCALE_HOST_DEVICE M
  load_cut(const uint8_t* terminated, const uint8_t* truncated, const uint8_t* later_live) {
    Bytes bytes[3];
    memcpy(&bytes[0], terminated, sizeof(Bytes));
    memcpy(&bytes[1], truncated, sizeof(Bytes));
    memcpy(&bytes[2], later_live, sizeof(Bytes));
    const Bytes cut = bytes[0] | bytes[1] | (Bytes)(bytes[2] == 0);
    uint8_t joined[sizeof(Bytes)];
    memcpy(joined, &cut, sizeof(Bytes));
    return load(joined);
  }
  static GRADSCALE_HOST_DEVICE V times(V c, V x) {
    return c * x;
  }
  // As in OneLane.
  static GRADSCALE_HOST_DEVICE V product(V c, V d) {
    const V p = c * d;
    const M is_underflow = (M)(p == 0) & (M)(c != 0) & (M)(d != 0);
    // A product of 0 has no bits but its sign.
    const M sign = (M)p, least = (M)splat(OneLane<A>::underflow(A(1)));
    return (V)(sign | (least & is_underflow));
  }
  static GRADSCALE_HOST_DEVICE void store(A* to, V x) {
    store_vector(to, x);
  }
};

// True if all lanes are +0. A sum minus itself is +0 if it is finite, and NaN otherwise.
template <class V>
GRADSCALE_HOST_DEVICE bool are_zero(V x) {
  uint64_t words[sizeof(V) / 8];
  memcpy(words, &x, sizeof(V));
  uint64_t any = 0;
  for (const uint64_t word : words) {
    any |= word;
  }
  return any == 0;
}

// ---- Along steps ---------------------------------------------------------------------------------------------------

constexpr int64_t kSideBySide = 8; // rows that are walked at once, because each step waits for the one before

// The maps of a tile's steps, and y. The y of row r begin at ys[r * pitch]: forwards, y of the step before the first
// comes first; backwards, it comes last.
template <class A>
struct Walk {
  int64_t pitch;
  A a[kTile];
  A b[kTile];
  A scale[kTile]; // if the recurrence is scaled: y = scale (a + b y')
  A ys[2 * kTile + 1];
  A carries[kTile]; // y of the last step that was walked, of each row
  A later_values[kTile];
  uint8_t later_live[kTile];
  int64_t later_rows = 0, later_count = 0; // of the tile that later_live was made for
  bool later_has_end = false;
};

// The numbers of the next steps, which the last step of a row does not have.
template <class F, class A>
void read_later(Sources<A>& sources, Walk<A>& to, int64_t row, int64_t begin) {
  Tile<A>& tile = sources.tile;
  const int64_t count = tile.count;
  const bool has_end = begin + count == sources.call.steps;
  const int64_t behind = has_end ? count - 1 : count;
  const bool is_masked = sources.call.operands[kMask].data != nullptr;
  if (is_masked || to.later_rows != tile.rows || to.later_count != count || to.later_has_end != has_end) {
    to.later_rows = tile.rows;
    to.later_count = count;
    to.later_has_end = has_end;
    memset(to.later_live, 1, tile.rows * count);
    if (is_masked && behind > 0) {
      const Piece<uint8_t> mask = sources.later_mask.piece(row, tile.rows, begin + 1, behind);
      for (int64_t r = 0; r < tile.rows; ++r) {
        for (int64_t i = 0; i < behind; ++i) {
          to.later_live[r * count + i] = mask.data[r * mask.row_advance + i * mask.advance];
        }
      }
    }
    for (int64_t r = 0; r < tile.rows && has_end; ++r) {
      to.later_live[r * count + count - 1] = 0;
    }
  }
  tile.later_live = {to.later_live, 1, count};
  if constexpr (F::kReadsLaterValue) {
    const Piece<A> values = behind > 0 ? sources.later_values.piece(row, tile.rows, begin + 1, behind) : Piece<A>{};
    for (int64_t r = 0; r < tile.rows; ++r) {
      for (int64_t i = 0; i < count; ++i) {
        to.later_values[r * count + i] = i < behind ? values.data[r * values.row_advance + i * values.advance] : A(0);
      }
    }
    tile.later_values = {to.later_values, 1, count};
  }
}

// Calls function(lanes, r, i) for vectors of the tile's steps, and for the single steps that remain.
template <class A, class Function>
GRADSCALE_HOST_DEVICE void each_vector(const Tile<A>& tile, const Function& function) {
  const int64_t rows = tile.is_flat ? 1 : tile.rows, count = tile.is_flat ? tile.rows * tile.count : tile.count;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t i = 0;
    for (; i + Vectors<A>::kCount <= count; i += Vectors<A>::kCount) {
      function(VectorLanes<A>(), r, i);
    }
    for (; i < count; ++i) {
      function(ExactLane<A>(), r, i);
    }
  }
}

template <class F, int side_by_side, class A>
GRADSCALE_HOST_DEVICE void walk_rows(const Tile<A>& tile, Walk<A>& w, int64_t row) {
  const int64_t count = tile.count;
  A y[side_by_side];
  for (int k = 0; k < side_by_side; ++k) {
    y[k] = w.carries[row + k];
    w.ys[(row + k) * w.pitch + (F::kAdjoint ? 0 : count)] = y[k];
  }
  for (int64_t n = 0; n < count; ++n) {
    const int64_t t = F::kAdjoint ? n : count - 1 - n;
#pragma GCC unroll 8
    for (int k = 0; k < side_by_side; ++k) {
      const int64_t i = (row + k) * count + t;
      y[k] = w.a[i] + w.b[i] * y[k];
      if constexpr (F::kIsScaled) {
        y[k] *= w.scale[i];
      }
      w.ys[(row + k) * w.pitch + t + (F::kAdjoint ? 1 : 0)] = y[k];
    }
  }
  for (int k = 0; k < side_by_side; ++k) {
    w.carries[row + k] = y[k];
  }
}

// Returns false if a number is not finite. The tile is passed by value, so that stores of results cannot alias it.
template <class F, bool masked, class A>
bool walk_along(const Tile<A> tile, Walk<A>& w) {
  w.pitch = tile.is_flat ? tile.count : tile.count + 1;
  const int64_t pitch = tile.is_flat ? tile.rows * tile.count : w.pitch; // of the rows that each_vector() visits
  const int64_t width = tile.is_flat ? tile.rows * tile.count : tile.count;
  each_vector(tile, [&](auto lanes, int64_t r, int64_t i) {
    using L = decltype(lanes);
    const Transition<L> s = transition<F, L, masked>(tile, r, i);
    const int64_t to = r * width + i;
    const auto step = F::step(s);
    if constexpr (F::kIsScaled) {
      L::store(w.a + to, step.a);
      L::store(w.b + to, step.inner);
      L::store(w.scale + to, step.outer);
    } else {
      const Affine<L> map = step.map();
      L::store(w.a + to, map.a);
      L::store(w.b + to, map.b);
    }
  });
  int64_t row = 0;
  for (; row + kSideBySide <= tile.rows; row += kSideBySide) {
    walk_rows<F, kSideBySide>(tile, w, row);
  }
  for (; row < tile.rows; ++row) {
    walk_rows<F, 1>(tile, w, row);
  }
  typename VectorLanes<A>::V check{};
  A last_check = A(0);
  each_vector(tile, [&](auto lanes, int64_t r, int64_t i) {
    using L = decltype(lanes);
    const Transition<L> s = transition<F, L, masked>(tile, r, i);
    const A* const ys = w.ys + r * pitch + i;
    const auto own = L::load(ys + (F::kAdjoint ? 1 : 0)), before = L::load(ys + (F::kAdjoint ? 0 : 1));
    const auto sum = put_results<F>(tile, r, i, s, own, before);
    if constexpr (std::is_same_v<L, VectorLanes<A> >) {
      check += sum;
    } else {
      last_check += sum;
    }
  });
  return are_zero(check) && last_check == 0;
}

// Computes `rows` rows, side by side.
template <class F, class A>
void along_rows(Sources<A>& sources, Walk<A>& w, int64_t row, int64_t rows) {
  const int64_t steps = sources.call.steps;
  const int64_t tiles = (steps - 1) / (kTile / rows) + 1, most = (steps - 1) / tiles + 1;
  std::fill(w.carries, w.carries + rows, A(0));
  for (int64_t n = 0; n < tiles; ++n) {
    const int64_t begin = (F::kAdjoint ? n : tiles - 1 - n) * most, count = std::min(most, steps - begin);
    if (count <= 0) {
      continue;
    }
    sources.read(row, rows, begin, count);
    sources.tile.is_flat &= rows == 1 || tiles == 1; // in the middle of joined rows, y has no room between two rows
    read_later<F>(sources, w, row, begin);
    A before[kTile];
    std::copy(w.carries, w.carries + rows, before);
    const bool is_masked = sources.call.operands[kMask].data != nullptr;
    if (!(is_masked ? walk_along<F, true>(sources.tile, w) : walk_along<F, false>(sources.tile, w))) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < count; ++i) {
          walk<F, ExactLane<A>, true>(sources.tile, r, F::kAdjoint ? i : count - 1 - i, before[r]);
        }
      }
      std::copy(before, before + rows, w.carries);
    }
    sources.write(row, begin);
  }
}

// Calls function(A(), F()) with the type and the formula of a recurrence. Does nothing for the functions of n steps,
// which are not recurrences.
template <class Function>
void dispatch_call(const ReturnsCall& call, Function function) {
  const auto with = [&](auto formula) {
    if (call.element == Element::float64) {
      function(double(), formula);
    } else {
      function(float(), formula);
    }
  };
  const auto either = [&](auto formula, auto adjoint) {
    if (call.is_adjoint) {
      with(adjoint);
    } else {
      with(formula);
    }
  };
  switch (call.formula) {
#define GRADSCALE_CASE(name, type_name, ...) \
  case Formula::name:                        \
    return either(type_name(), Adjoint<type_name>());
    GRADSCALE_RECURRENCES(GRADSCALE_CASE)
#undef GRADSCALE_CASE
    case Formula::n_step_returns:
    case Formula::n_step_transitions:
      return;
  }
}

void along_steps(const ReturnsCall& call, int64_t begin, int64_t end) {
  // Short rows fill a tile. Of long rows, a tile has as many as are walked side by side.
  const int64_t rows_of_tile = std::max(kSideBySide, kTile / call.steps / kSideBySide * kSideBySide);
  dispatch_call(call, [&](auto number, auto formula) {
    Sources<decltype(number)> sources(call, kStep);
    Walk<decltype(number)> w;
    for (int64_t row = begin; row < end; row += rows_of_tile) {
      along_rows<decltype(formula)>(sources, w, row, std::min(rows_of_tile, end - row));
    }
  });
}

// ---- Across rows ---------------------------------------------------------------------------------------------------

// Walks one step of each row. Returns false if a number is not finite.
template <class F, class A>
GRADSCALE_HOST_DEVICE bool walk_across(const Tile<A> tile, A* y) {
  using Lanes = VectorLanes<A>;
  typename Lanes::V check{};
  int64_t i = 0;
  for (; i + Vectors<A>::kCount <= tile.count; i += Vectors<A>::kCount) {
    typename Lanes::V own = load_vector(y + i);
    check += walk<F, Lanes>(tile, 0, i, own);
    store_vector(y + i, own);
  }
  A last_check = A(0);
  for (; i < tile.count; ++i) {
    last_check += walk<F, ExactLane<A> >(tile, 0, i, y[i]);
  }
  return are_zero(check) && last_check == 0;
}

template <class F, class A>
void across_tile(Sources<A>& sources, int64_t begin, int64_t count) {
  const int64_t steps = sources.call.steps;
  static constexpr uint8_t kEnded[kMostLanes] = {};
  static constexpr A kZeros[kMostLanes] = {};
  Tile<A>& tile = sources.tile;
  A y[kTile] = {}, before[kTile];
  for (int64_t n = 0; n < steps; ++n) {
    const int64_t t = F::kAdjoint ? n : steps - 1 - n;
    const bool has_later = t + 1 < steps;
    sources.read(t, 1, begin, count);
    tile.later_live = has_later ? sources.later_mask.piece(t + 1, 1, begin, count) : Piece<uint8_t>{kEnded, 0, 0};
    if (F::kReadsLaterValue) {
      tile.later_values = has_later ? sources.later_values.piece(t + 1, 1, begin, count) : Piece<A>{kZeros, 0, 0};
    }
    std::copy(y, y + count, before);
    if (!walk_across<F>(tile, y)) {
      for (int64_t i = 0; i < count; ++i) {
        walk<F, ExactLane<A>, true>(tile, 0, i, before[i]);
      }
      std::copy(before, before + count, y);
    }
    sources.write(t, begin);
  }
}

void across_rows(const ReturnsCall& call, int64_t begin, int64_t end) {
  dispatch_call(call, [&](auto number, auto formula) {
    Sources<decltype(number)> sources(call, kRow);
    for (int64_t row = begin; row < end; row += kTile) {
      across_tile<decltype(formula)>(sources, row, std::min(kTile, end - row));
    }
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#if !defined(__clang__)
#pragma GCC pop_options
#endif
#endif
