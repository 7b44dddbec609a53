// The kernels of recurrences. This file includes itself once for each instruction set.
//
// Along steps: a vector holds neighbouring steps of one row. Their maps y -> a + b y are composed in log2(lanes)
// rounds. This suits any number of rows, and memory is read and written contiguously.
// Across rows: a vector holds one step of neighbouring rows, for trajectories whose rows are adjacent in memory.
//
// Both process one tile at a time, and multiply where formulas select 0. A tile with a number that is not finite is
// computed again, step by step, with selection.
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
#include "../../cpu/vectors.h"
#include "../formulas.h"
#include "sources.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// ---- Steps ----------------------------------------------------------------------------------------------------------

// `masked`: steps may be masked.
template <class F, class L, bool masked = true, class A>
GRADSCALE_HOST_DEVICE Transition<L> transition(const Tile<A>& tile, int64_t i) {
  const auto load = [i](const auto& piece) { return L::load(piece.data + i * piece.advance); };
  Transition<L> s;
  s.reward = load(tile.numbers[kRewards]);
  s.value = load(tile.numbers[kValues]);
  s.next_value = load(tile.numbers[kNextValues]);
  s.discount = load(tile.numbers[kDiscount]);
  s.lambda = load(tile.numbers[kLambda]);
  s.ratio = load(tile.numbers[kRatios]);
  s.later_value = typename L::V{};
  if constexpr (std::is_same_v<F, VTrace>) {
    s.later_value = load(tile.later_values);
  }
  for (int k = 0; k < 3; ++k) {
    s.limits[k] = tile.limits[k] - typename L::V{};
  }
  s.live = masked ? load(tile.live) : typename L::M{} == 0;
  s.terminated = load(tile.terminated);
  const auto at = [i](const Piece<uint8_t>& flags) { return flags.data + i * flags.advance; };
  s.cut = L::load_cut(at(tile.terminated), at(tile.truncated), at(tile.later_live));
  return s;
}

// Walks one step in each lane. `y` is y of the step before, and becomes y of the step.
template <class F, class L, class A, class V = typename L::V>
GRADSCALE_HOST_DEVICE void walk(const Tile<A>& tile, int64_t i, V& y, V* out) {
  const Transition<L> s = transition<F, L>(tile, i);
  const Affine<L> map = F::template map<L>(s);
  const V before = y;
  y = map.a + L::times(map.b, before);
  F::template results<L>(s, y, before, out);
}

template <class F, class A>
void one_step(const Tile<A>& tile, int64_t i, A& y) {
  A out[kOutputs];
  walk<F, OneLane<A> >(tile, i, y, out);
  for (int k = 0; k < F::kResults; ++k) {
    tile.out[k][i] = out[k];
  }
}

// y of each row of a tile.
template <class A>
struct Carries {
  alignas(64) A y[kRowsOfTile] = {};
};

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
  static GRADSCALE_HOST_DEVICE V product(V c, V d) {
    return c * d;
  }
};

// Shifts the lanes of x: lane i of the result is lane i + distance of x, or lane i - distance if kForward (an adjoint).
// Lanes of `fill` replace lanes that do not exist.
template <bool kForward, size_t distance, class V, size_t... i>
GRADSCALE_HOST_DEVICE V shifted(V x, V fill, std::index_sequence<i...> /*lanes*/) {
  constexpr size_t count = sizeof...(i);
  return shuffled(
      x, fill, std::index_sequence<(kForward ? (i >= distance ? i - distance : count) : i + distance)...>());
}

template <bool kForward, size_t distance, class V>
GRADSCALE_HOST_DEVICE V shifted(V x, V fill) {
  return shifted<kForward, distance>(x, fill, std::make_index_sequence<sizeof(V) / sizeof(x[0])>());
}

// Composes the map of each lane with the maps of the lanes that precede it in the walk.
template <bool kForward, size_t distance, class V>
GRADSCALE_HOST_DEVICE void compose(V& a, V& b) {
  if constexpr (distance < sizeof(V) / sizeof(a[0])) {
    a += b * shifted<kForward, distance>(a, V{});
    b *= shifted<kForward, distance>(b, V{} + 1);
    compose<kForward, 2 * distance>(a, b);
  }
}

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

// Returns false if a number is not finite. The tile is passed by value, so that stores of results cannot alias it.
template <class F, bool masked, class A>
bool walk_along(const Tile<A> tile, int64_t padded, A& carry) {
  using L = VectorLanes<A>;
  using V = typename L::V;
  constexpr int count = Vectors<A>::kCount;
  constexpr int last = F::kAdjoint ? count - 1 : 0; // in the order of the walk
  V y = splat(carry), check{};
  for (int64_t n = 0; n < padded; n += count) {
    const int64_t i = F::kAdjoint ? n : padded - count - n;
    const Transition<L> s = transition<F, L, masked>(tile, i);
    Affine<L> map = F::template map<L>(s);
    compose<F::kAdjoint, 1>(map.a, map.b);
    const V own = map.a + map.b * y;
    V out[kOutputs];
    F::template results<L>(s, own, shifted<F::kAdjoint, 1>(own, y), out);
    V sum = own;
    for (int k = 0; k < F::kResults; ++k) {
      store_vector(tile.out[k] + i, out[k]);
      sum += out[k];
    }
    check += sum - sum;
    y = splat(own[last]);
  }
  carry = y[0];
  return are_zero(check);
}

template <class F, class A>
GRADSCALE_HOST_DEVICE bool walk_across(const Tile<A> tile, int64_t padded, Carries<A>& carry) {
  using L = VectorLanes<A>;
  using V = typename L::V;
  V check{};
  for (int64_t i = 0; i < padded; i += Vectors<A>::kCount) {
    V own = load_vector(carry.y + i);
    V out[kOutputs];
    walk<F, L>(tile, i, own, out);
    V sum = own;
    for (int k = 0; k < F::kResults; ++k) {
      store_vector(tile.out[k] + i, out[k]);
      sum += out[k];
    }
    check += sum - sum;
    store_vector(carry.y + i, own);
  }
  return are_zero(check);
}

// ---- Along steps ---------------------------------------------------------------------------------------------------

// Makes tile.later_live, the mask of the next steps. It is 0 at the last step of each row of `period` steps, several of
// which may be joined.
template <class A>
void read_later_live(Sources<A>& sources, int64_t row, int64_t begin, int64_t count, int64_t padded, int64_t period) {
  uint8_t* later = sources.later_flags;
  sources.tile.later_live = {later, 1};
  const bool is_masked = sources.call.operands[kMask].data != nullptr;
  if (!is_masked && count == sources.later_count && kTile % period == 0) {
    return; // as in the tile before
  }
  sources.later_count = count;
  memset(later, is_masked ? 0 : 1, count);
  memset(later + count, 0, padded - count);
  if (is_masked) {
    const int64_t behind = std::min(count, sources.call.steps - begin - 1);
    memcpy(later, sources.later_mask.piece(row, begin + 1, behind, behind).data, behind);
  }
  for (int64_t end = period - 1 - begin % period; end < count; end += period) {
    later[end] = 0;
  }
}

// Computes a row, or contiguous rows of `period` steps that are joined into one and do not depend on each other.
template <class F, class A>
void along_row(Sources<A>& sources, int64_t row, int64_t period) {
  const int64_t steps = sources.call.steps;
  const int64_t tiles = (steps + kTile - 1) / kTile;
  Tile<A>& tile = sources.tile;
  A carry = A(0);
  for (int64_t n = 0; n < tiles; ++n) {
    const int64_t begin = (F::kAdjoint ? n : tiles - 1 - n) * kTile;
    const int64_t count = std::min(kTile, steps - begin);
    const int64_t padded = (count + Vectors<A>::kCount - 1) / Vectors<A>::kCount * Vectors<A>::kCount;
    sources.read(row, begin, count, padded);
    if (std::is_same_v<F, VTrace>) {
      const int64_t behind = std::min(count, steps - begin - 1);
      tile.later_values = sources.later_values.piece(row, begin + 1, behind, padded); // 0 after the last step
    }
    read_later_live(sources, row, begin, count, padded, period);
    const A before = carry;
    const bool is_whole = sources.call.operands[kMask].data == nullptr && count == padded;
    if (!(is_whole ? walk_along<F, false>(tile, padded, carry) : walk_along<F, true>(tile, padded, carry))) {
      carry = before;
      for (int64_t i = 0; i < count; ++i) {
        one_step<F>(tile, F::kAdjoint ? i : count - 1 - i, carry);
      }
    }
    sources.write(row, begin, count);
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
    case Formula::lambda_returns:
      return either(LambdaReturns(), LambdaReturnsAdjoint());
    case Formula::generalized_advantages:
      return either(GeneralizedAdvantages(), GeneralizedAdvantagesAdjoint());
    case Formula::vtrace:
      return either(VTrace(), VTraceAdjoint());
    case Formula::retrace:
      return either(Retrace(), RetraceAdjoint());
    case Formula::n_step_returns:
    case Formula::n_step_transitions:
      return;
  }
}

void along_steps(const ReturnsCall& call, int64_t begin, int64_t end) {
  ReturnsCall one;
  const bool is_joined = joined(call, begin, end, one);
  dispatch_call(call, [&](auto number, auto formula) {
    Sources<decltype(number)> sources(is_joined ? one : call, kStep);
    for (int64_t row = is_joined ? end - 1 : begin; row < end; ++row) {
      along_row<decltype(formula)>(sources, is_joined ? 0 : row, call.steps);
    }
  });
}

// ---- Across rows ---------------------------------------------------------------------------------------------------

template <class F, class A>
void across_tile(Sources<A>& sources, int64_t begin, int64_t count) {
  const int64_t steps = sources.call.steps;
  const int64_t padded = (count + Vectors<A>::kCount - 1) / Vectors<A>::kCount * Vectors<A>::kCount;
  const uint8_t ended[kRowsOfTile] = {};
  const A zeros[kRowsOfTile] = {};
  Tile<A>& tile = sources.tile;
  Carries<A> carry;
  for (int64_t n = 0; n < steps; ++n) {
    const int64_t t = F::kAdjoint ? n : steps - 1 - n;
    const bool has_later = t + 1 < steps;
    sources.read(t, begin, count, padded);
    tile.later_live = has_later ? sources.later_mask.piece(t + 1, begin, count, padded) : Piece<uint8_t>{ended, 1};
    if (std::is_same_v<F, VTrace>) {
      tile.later_values = has_later ? sources.later_values.piece(t + 1, begin, count, padded) : Piece<A>{zeros, 1};
    }
    const Carries<A> before = carry;
    if (!walk_across<F>(tile, padded, carry)) {
      carry = before;
      for (int64_t i = 0; i < count; ++i) {
        one_step<F>(tile, i, carry.y[i]);
      }
    }
    sources.write(t, begin, count);
  }
}

void across_rows(const ReturnsCall& call, int64_t begin, int64_t end) {
  dispatch_call(call, [&](auto number, auto formula) {
    Sources<decltype(number)> sources(call, kRow);
    for (int64_t row = begin; row < end; row += kRowsOfTile) {
      across_tile<decltype(formula)>(sources, row, std::min(kRowsOfTile, end - row));
    }
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
