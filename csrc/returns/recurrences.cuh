// GPU kernels of recurrences. One launch reads or writes each byte once.
//
// recur_along, for trajectories [B, T]: a warp owns a row, and its lanes own 32 neighbouring steps, so that whole
// sectors are read. The map of a step is y -> a + b y, and the maps of the lanes are composed in five shuffles. A warp
// loads kAhead x 32 steps before it uses the first.
//
// recur_across, for trajectories [T, B]: neighbouring threads own neighbouring rows. A block owns 32 rows, and each of
// its warps owns kAhead steps of them at a time. The maps of the warps are composed through shared memory.
//
// GAE reads 14 bytes per step and writes 8. A load takes about a microsecond, in which a multiprocessor of an H200 can
// move 36 KB. With kAhead steps of 14 bytes per lane, 20 warps keep 36 KB of loads in flight.
//
// Formulas select 0 where a coefficient is 0, but composed maps multiply: 0 * inf is NaN. If a composed result is not
// finite, the steps are walked one by one.
#pragma once

#include "steps.cuh"

namespace gradscale {

constexpr int kAhead = 4;

// Returns y of each lane. If any given y is not finite, the lanes compute theirs again, one after the other.
template <class F, class A>
GRADSCALE_DEVICE A checked_lanes(A y, const Map<A>& map, A carry, int lane) {
  if (__any_sync(kAllLanes, !is_finite(y))) {
#pragma unroll 1
    for (int turn = 0; turn < kWarpSize; ++turn) {
      if (turn_of<F>(lane) == turn) {
        y = applied(map, carry);
      }
      carry = __shfl_sync(kAllLanes, y, turn_of<F>(turn));
    }
  }
  return y;
}

// The composed map of this lane's step and the steps of all lanes before it. It is not finite if a product is not.
template <class F, class A>
GRADSCALE_DEVICE Map<A> composed_lanes(const Map<A>& map, int lane) {
  A a = map.a, b = map.b;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const A other_a = shifted<F>(a, distance), other_b = shifted<F>(b, distance);
    if (turn_of<F>(lane) >= distance) {
      a += b * other_a;
      b *= other_b;
    }
  }
  return {a, b};
}

// y of each lane, given its step's map, the map that composed_lanes() returns, and y of the step before the first.
template <class F, class A>
GRADSCALE_DEVICE A walk_lanes(const Map<A>& map, const Map<A>& prefix, A carry, int lane) {
  return checked_lanes<F>(prefix.a + prefix.b * carry, map, carry, lane);
}

// The warps of a block apply their maps one after the other. `before` is y before this thread's steps, and `last` is y
// after the steps of the last warp.
template <class A, int count>
GRADSCALE_DEVICE void walk_warps(const Map<A> (&maps)[count], A* shared, A carry, A& before, A& last) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) {
      before = w == 0 ? carry : shared[threadIdx.x - kWarpSize];
      A y = before;
#pragma unroll
      for (int k = 0; k < count; ++k) {
        y = applied(maps[k], y);
      }
      shared[threadIdx.x] = y;
    }
    __syncthreads();
  }
  last = shared[(kWarps - 1) * kWarpSize + lane];
  __syncthreads();
}

// A round of a warp is 32 neighbouring steps, one per lane. kRound is the distance from a lane's step in a round to its
// step in the next round of the walk, and kLast the lane that is last in the walk.
template <class F>
constexpr int kRound = F::kAdjoint ? kWarpSize : -kWarpSize;
template <class F>
constexpr int kLast = F::kAdjoint ? kWarpSize - 1 : 0;

// Reads this lane's steps in the next kAhead rounds, beginning at step `first`. Lane 31 also reads, for each of its
// steps t, the numbers of step t + 1 that transition t needs. `whole`: the row has all these steps.
template <bool whole, class A, class F, Layout layout, unsigned given>
GRADSCALE_DEVICE void read_along(
    const Row<A, F, layout, given>& row,
    typename Row<A, F, layout, given>::Index first,
    int lane,
    Transition<OneLane<A>> (&steps)[kAhead],
    Later<A> (&beyond)[kAhead]) {
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    steps[k] = row.template read<whole>(first + k * kRound<F>);
    if (lane == kWarpSize - 1) {
      beyond[k] = row.read_later(first + k * kRound<F>);
    }
  }
}

// Walks kAhead of the `rounds` rounds of a row, from round `begin` of the walk on. `whole`: the row has all
// these steps. `carry` is y of the last step that was walked.
template <bool whole, class A, class F, Layout layout, unsigned given>
GRADSCALE_DEVICE void walk_along(
    const Row<A, F, layout, given>& row, int64_t begin, int64_t rounds, int lane, A& carry) {
  using L = OneLane<A>;
  using Index = typename Row<A, F, layout, given>::Index;
  const auto first = static_cast<Index>((F::kAdjoint ? begin : rounds - 1 - begin) * kWarpSize + lane);
  Transition<L> steps[kAhead];
  Later<A> beyond[kAhead];
  read_along<whole>(row, first, lane, steps, beyond);
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    if (whole || begin + k < rounds) {
      const Index t = first + k * kRound<F>;
      Transition<L>& s = steps[k];
      link(s, row.later_in_lanes(s, beyond[k], t, lane));
      const Map<A> map = F::template map<L>(s);
      const A y = walk_lanes<F>(map, composed_lanes<F>(map, lane), carry, lane);
      A before = A(0);
      if constexpr (kReadsEarlier<F>) {
        before = earlier<F>(y, lane, carry);
      }
      A out[kOutputs];
      F::template results<L>(s, y, before, out);
      if (whole || t < row.steps) {
        row.write(t, out);
      }
      carry = __shfl_sync(kAllLanes, y, kLast<F>);
    }
  }
}

template <class A, class F, Layout layout, unsigned given>
GRADSCALE_KERNEL(kThreads, 2)
recur_along(GRADSCALE_ARGUMENT(ReturnsCall) call) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (index >= call.rows) {
    return;
  }
  const Row<A, F, layout, given> row(call, index);
  const int64_t rounds = (call.steps + kWarpSize - 1) / kWarpSize;
  A carry = A(0);
  for (int64_t begin = 0; begin < rounds; begin += kAhead) {
    const bool has_end = F::kAdjoint ? begin + kAhead >= rounds : begin == 0;
    if (begin + kAhead <= rounds && (!has_end || call.steps % kWarpSize == 0)) {
      walk_along<true>(row, begin, rounds, lane, carry);
    } else {
      walk_along<false>(row, begin, rounds, lane, carry);
    }
  }
}

// Walks kWarps x kAhead steps, from step `begin` of the walk on. `whole`: all lanes have rows, and the rows have all
// these steps.
template <bool whole, class A, class F, Layout layout, unsigned given>
GRADSCALE_DEVICE void walk_across(
    const Row<A, F, layout, given>& row, bool is_row, int64_t begin, A* shared, A& carry) {
  using L = OneLane<A>;
  using Index = typename Row<A, F, layout, given>::Index;
  A* const shared_a = shared;
  A* const shared_b = shared + kThreads;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const auto first = static_cast<Index>(begin + warp * kAhead); // in the order of the walk
  const auto step = [&](int k) { return F::kAdjoint ? first + k : row.steps - 1 - first - k; };
  Transition<L> steps[kAhead];
  Map<A> maps[kAhead];
  Map<A> all{A(0), A(1)};
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    steps[k] = row.template read<whole>(whole || is_row ? step(k) : -1);
  }
  Later<A> beyond; // for the step whose later step another warp owns
  if (whole || is_row) {
    beyond = row.read_later(step(F::kAdjoint ? kAhead - 1 : 0));
  }
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const int later = F::kAdjoint ? k + 1 : k - 1;
    const bool is_own = later >= 0 && later < kAhead;
    const Transition<L>& other = steps[is_own ? later : k];
    link(steps[k], is_own ? Later<A>{other.live, other.value} : beyond);
    maps[k] = F::template map<L>(steps[k]);
    all = {maps[k].a + maps[k].b * all.a, maps[k].b * all.b};
  }
  shared_a[threadIdx.x] = all.a;
  shared_b[threadIdx.x] = all.b;
  __syncthreads();
  A y = carry, next = carry;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    y = w == warp ? next : y;
    next = shared_a[w * kWarpSize + lane] + shared_b[w * kWarpSize + lane] * next;
  }
  __syncthreads();
  if (__any_sync(kAllLanes, !is_finite(next))) { // the same in all warps; finite only if y of every warp is
    walk_warps(maps, shared_a, carry, y, next);
  }
  carry = next;
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const Transition<L>& s = steps[k];
    const A own = applied(maps[k], y);
    A out[kOutputs];
    F::template results<L>(s, own, y, out);
    if (whole || (is_row && first + k < row.steps)) {
      row.write(step(k), out);
    }
    y = own;
  }
}

template <class A, class F, Layout layout, unsigned given>
GRADSCALE_KERNEL(kThreads, 2)
recur_across(GRADSCALE_ARGUMENT(ReturnsCall) call) {
  GRADSCALE_SHARED(A, shared, 2 * kThreads); // a and b of the threads' maps
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarpSize;
  const int64_t index = first + threadIdx.x % kWarpSize;
  const Row<A, F, layout, given> row(call, index);
  A carry = A(0);
  for (int64_t begin = 0; begin < call.steps; begin += kWarps * kAhead) {
    if (begin + kWarps * kAhead <= call.steps && first + kWarpSize <= call.rows) {
      walk_across<true>(row, true, begin, shared, carry);
    } else {
      walk_across<false>(row, index < call.rows, begin, shared, carry);
    }
  }
}

} // namespace gradscale
