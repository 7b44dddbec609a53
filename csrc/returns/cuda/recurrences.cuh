// GPU kernels of recurrences. One launch reads or writes each byte once.
//
// recur_along, for trajectories [B, T]: a warp owns a row, and its lanes own 32 neighbouring steps, so that whole
// sectors are read. The map of a step is y -> a + b y, and the maps of the lanes are composed in five shuffles. A warp
// loads kAhead x 32 steps before it uses the first.
//
// recur_short, for trajectories [B, T] of at most 32 steps: 8, 16 or 32 lanes own a row, so that a warp has 4, 2 or 1
// rows side by side. It takes up to kAhead turns, and loads the rows of all turns before it uses the first.
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

#include "../../cuda/device.h"
#include "../formulas.h"

namespace gradscale {

// ---- Rows ----------------------------------------------------------------------------------------------------------

// How a call's tensors are stored. `runs`: numbers have the kernel's type, and the stride between steps is 1.
// `columns`: numbers have the kernel's type, and the stride between steps equals the first output's. `any`: any types
// and strides.
enum class Layout { any, runs, columns };

// The tensors that a call has are the bits of the template argument `given`: bit k is set for operand k, and the bits
// from kFirstOutput on for the outputs, and from kFirstClip on for the clips. The other operands are constants. With
// Layout::any all bits are set, and an operand is a constant if its data is null.
constexpr unsigned kFirstOutput = 1u << kOperands;
constexpr unsigned kFirstClip = kFirstOutput << kOutputs;

// The numbers of step t + 1 that transition t reads.
template <class A>
struct Later {
  bool live = false;
  A value = A(0);
};

// A row, as a thread reads and writes it.
template <class A, class F, Layout layout, unsigned given>
class Row {
 public:
  using L = OneLane<A>;
  using Index = std::conditional_t<layout == Layout::any, int64_t, int32_t>;
  const ReturnsCall& call;
  const Index steps;

  GRADSCALE_DEVICE Row(const ReturnsCall& call, int64_t row)
      : call(call), steps(static_cast<Index>(call.steps)), row_(row) {
  }

  // Reads transition t. A transition outside of the row is not read, and is masked. `is_inside`: t is known to be in
  // the row. Until link() completes it, `cut` is only the flag of truncation.
  template <bool is_inside>
  GRADSCALE_DEVICE Transition<L> read(Index t) const {
    Transition<L> s{};
    if (is_inside || (t >= 0 && t < steps)) {
      s.live = flag(kMask, t);
      s.reward = element<A>(kRewards, t);
      s.value = element<A>(kValues, t);
      s.next_value = element<A>(kNextValues, t);
      s.discount = element<A>(kDiscount, t);
      s.lambda = element<A>(kLambda, t);
      s.ratio = element<A>(kRatios, t);
      s.terminated = flag(kTerminated, t);
      s.cut = flag(kTruncated, t);
    }
#pragma unroll
    for (int k = 0; k < kClips; ++k) {
      s.limits[k] = limit(k);
    }
    return s;
  }

  // Reads the numbers of step t + 1 that transition t needs.
  GRADSCALE_DEVICE Later<A> read_later(Index t) const {
    Later<A> later;
    if (t >= -1 && t + 1 < steps) {
      later.live = flag(kMask, t + 1);
      if constexpr (F::kReadsLaterValue) {
        later.value = element<A>(kValues, t + 1);
      }
    }
    return later;
  }

  // The same numbers, taken from the next lane, which has step t + 1. The last lane of the row uses `beyond`.
  template <int lanes = kWarpSize>
  GRADSCALE_DEVICE Later<A> later_in_lanes(const Transition<L>& s, const Later<A>& beyond, Index t, int lane) const {
    const bool is_last = lane % lanes == lanes - 1;
    Later<A> later{t + 1 < steps, A(0)};
    if constexpr ((given & 1u << kMask) != 0) {
      const unsigned live = __ballot_sync(kWholeWarp, s.live);
      later.live = is_last ? beyond.live : (live >> (lane + 1) & 1) != 0;
    }
    if constexpr (F::kReadsLaterValue) {
      const A value = __shfl_down_sync(kWholeWarp, s.value, 1);
      later.value = is_last ? beyond.value : value;
    }
    return later;
  }

  GRADSCALE_DEVICE void write(Index t, const A* out) const {
#pragma unroll
    for (int k = 0; k < F::kResults; ++k) {
      const ReturnsOutput& output = call.outputs[k];
      if (has(kFirstOutput << k, output)) {
        (static_cast<A*>(output.data) + row_ * output.strides[kRow])[offset(output, t)] = out[k];
      }
    }
  }

 private:
  template <class Tensor>
  GRADSCALE_DEVICE static bool has(unsigned bit, const Tensor& tensor) {
    return (given & bit) != 0 && (layout != Layout::any || tensor.data != nullptr);
  }

  template <class Tensor>
  GRADSCALE_DEVICE Index offset(const Tensor& tensor, Index t) const {
    return layout == Layout::runs ? t : t * static_cast<Index>(tensor.strides[kStep]);
  }

  // The element of operand k at step t: a number, or a flag if T is uint8_t. Without a mask all steps are live. The
  // other flags are 0 if they are not given.
  template <class T>
  GRADSCALE_DEVICE T element(int k, Index t) const {
    const Operand& operand = call.operands[k];
    if (!has(1u << k, operand)) {
      return k == kMask ? T(1) : k >= kNumbers ? T(0) : static_cast<T>(operand.constant);
    }
    if constexpr (layout == Layout::any) {
      return element_at<T>(operand, row_, t);
    } else {
      return (
          static_cast<const T*>(operand.data) + row_ * operand.strides[kRow])[offset(call.outputs[first_output()], t)];
    }
  }

  GRADSCALE_DEVICE bool flag(int k, Index t) const {
    return element<uint8_t>(k, t) != 0;
  }

  GRADSCALE_DEVICE A limit(int k) const {
    const Operand& clip = call.clips[k];
    if (!has(kFirstClip << k, clip)) {
      return static_cast<A>(clip.constant);
    }
    if constexpr (layout == Layout::any) {
      return element_at<A>(clip, 0, 0);
    } else {
      return *static_cast<const A*>(clip.data);
    }
  }

  static constexpr int first_output() {
    return (given & kFirstOutput) != 0 ? 0 : (given & kFirstOutput << 1) != 0 ? 1 : 2;
  }

  int64_t row_;
};

template <class A>
GRADSCALE_DEVICE void link(Transition<OneLane<A>>& s, const Later<A>& later) {
  s.cut = static_cast<int>(s.terminated) | static_cast<int>(s.cut) | static_cast<int>(!later.live);
  s.later_value = later.value;
}

// ---- Maps ----------------------------------------------------------------------------------------------------------

// Gives y of a step from y of the step before in the walk (formulas.h).
template <class A>
using Map = Affine<OneLane<A>>;

template <class A>
GRADSCALE_DEVICE bool is_finite(A x) {
  return x - x == 0;
}

// The map that applies `before`, then `map`. A coefficient of 0 gives 0 also for inf and NaN, and a product of nonzero
// coefficients is never 0.
template <class A>
GRADSCALE_DEVICE Map<A> composed(const Map<A>& map, const Map<A>& before) {
  return {applied(map, before.a), OneLane<A>::product(map.b, before.b)};
}

// y of a step with this map, given y of the step before in the walk. A map that is not a + b y by itself is not used,
// because the products in it may overflow where y does not.
template <class F, class A>
GRADSCALE_DEVICE A walked(const Transition<OneLane<A>>& s, const Map<A>& map, A before) {
  const auto step = F::step(s);
  if constexpr (std::is_same_v<decltype(step.outer), One>) {
    return applied(map, before);
  } else {
    return step.walked(before);
  }
}

// `lanes` neighbours own a row, each a step of it. All lanes of the warp call these functions.

// Returns x of the lane that is `distance` lanes earlier in the walk, or this lane's x if the row has no such lane.
template <class F, int lanes = kWarpSize, class A>
GRADSCALE_DEVICE A shifted(A x, int distance) {
  return F::kAdjoint ? __shfl_up_sync(kWholeWarp, x, distance, lanes)
                     : __shfl_down_sync(kWholeWarp, x, distance, lanes);
}

// The position of a lane in the walk over its row, from 0. The function is its own inverse: it also gives the lane,
// from 0 in the row, at a position.
template <class F, int lanes = kWarpSize>
GRADSCALE_DEVICE int turn_of(int lane) {
  return F::kAdjoint ? lane % lanes : lanes - 1 - lane % lanes;
}

// Returns x of the lane before this one in the walk; `first` for the first lane of the walk.
template <class F, int lanes = kWarpSize, class A>
GRADSCALE_DEVICE A earlier(A x, int lane, A first) {
  const A other = shifted<F, lanes>(x, 1);
  return turn_of<F, lanes>(lane) == 0 ? first : other;
}

// The composed map of this lane's step and the steps of all lanes before it. It is not finite if a product is not.
template <class F, int lanes = kWarpSize, class A>
GRADSCALE_DEVICE Map<A> composed_lanes(const Map<A>& map, int lane) {
  A a = map.a, b = map.b;
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) {
    const A other_a = shifted<F, lanes>(a, distance), other_b = shifted<F, lanes>(b, distance);
    if (turn_of<F, lanes>(lane) >= distance) {
      a += b * other_a;
      b *= other_b;
    }
  }
  return {a, b};
}

// Returns y of each lane, given its step, the step's map, the map that composed_lanes() returns, and y of the step
// before the first. If a y is not finite, the maps are composed again with selection, so that y is right where only
// other episodes have numbers that are not finite. Lanes whose y is still not finite walk their steps, one after the
// other. A finite y keeps its bits, whatever other rows contain.
template <class F, int lanes = kWarpSize, class A>
GRADSCALE_DEVICE A
walk_lanes(const Transition<OneLane<A>>& s, const Map<A>& map, const Map<A>& prefix, A carry, int lane) {
  A y = prefix.a + prefix.b * carry;
  if (__any_sync(kWholeWarp, !is_finite(y))) {
    A a = map.a, b = map.b;
    int is_cut = map.b == 0; // b is 0 by itself, and not because a product underflows
#pragma unroll 1
    for (int distance = 1; distance < lanes; distance *= 2) {
      const A other_a = shifted<F, lanes>(a, distance), other_b = shifted<F, lanes>(b, distance);
      const int other_is_cut = shifted<F, lanes>(is_cut, distance);
      if (turn_of<F, lanes>(lane) >= distance && is_cut == 0) {
        a += b * other_a;
        b *= other_b;
        is_cut = other_is_cut;
      }
    }
    if (!is_finite(y)) {
      y = is_cut != 0 ? a : a + b * carry;
    }
#pragma unroll 1
    for (int turn = 0; turn < lanes; ++turn) {
      if (turn_of<F, lanes>(lane) == turn && !is_finite(y)) {
        y = walked<F>(s, map, carry);
      }
      carry = __shfl_sync(kWholeWarp, y, turn_of<F, lanes>(turn), lanes);
    }
  }
  return y;
}

// Writes the results of this lane's step t, given its y, and y of the step before the first. `is_inside`: t is known to
// be in the row.
template <bool is_inside, int lanes = kWarpSize, class A, class F, Layout layout, unsigned given>
GRADSCALE_DEVICE void write_results(
    const Row<A, F, layout, given>& row,
    typename Row<A, F, layout, given>::Index t,
    const Transition<OneLane<A>>& s,
    A y,
    A carry,
    int lane) {
  A before = A(0);
  if constexpr (F::kReadsEarlier) {
    before = earlier<F, lanes>(y, lane, carry);
  }
  A out[kOutputs];
  F::results(s, y, before, out);
  if (is_inside || t < row.steps) {
    row.write(t, out);
  }
}

// The warps of a block apply their maps one after the other. `before` is y before this thread's steps, and `last` is y
// after the steps of the last warp.
template <class F, class A, int count>
GRADSCALE_DEVICE void walk_warps(const Transition<OneLane<A>> (&steps)[count], A* shared, A carry, A& before, A& last) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) {
      before = w == 0 ? carry : shared[threadIdx.x - kWarpSize];
      A y = before;
#pragma unroll
      for (int k = 0; k < count; ++k) {
        y = F::step(steps[k]).walked(y);
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
      const Map<A> map = F::step(s).map();
      const A y = walk_lanes<F>(s, map, composed_lanes<F>(map, lane), carry, lane);
      write_results<whole>(row, t, s, y, carry, lane);
      carry = __shfl_sync(kWholeWarp, y, kLast<F>);
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

template <class A, class F, Layout layout, unsigned given, int lanes>
GRADSCALE_KERNEL(kThreads, 2)
recur_short(GRADSCALE_ARGUMENT(ReturnsCall) call) {
  using L = OneLane<A>;
  using OwnRow = Row<A, F, layout, given>;
  using Index = typename OwnRow::Index;
  constexpr int rows = kWarpSize / lanes; // of a warp in a turn
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize) * rows;
  const int64_t next = static_cast<int64_t>(gridDim.x) * kWarps * rows; // rows from a turn to the next
  // The step of this lane in a turn. A lane without a row has a step behind the last, which is not read.
  const auto step = [&](int turn) {
    return first + turn * next + lane / lanes < call.rows ? static_cast<Index>(lane % lanes)
                                                          : static_cast<Index>(call.steps);
  };
  Transition<L> steps[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    if (first + k * next < call.rows) { // the same for all of the warp
      steps[k] = OwnRow(call, first + k * next + lane / lanes).template read<false>(step(k));
    }
  }
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    if (first + k * next < call.rows) {
      const OwnRow row(call, first + k * next + lane / lanes);
      const Index t = step(k);
      Transition<L>& s = steps[k];
      link(s, row.template later_in_lanes<lanes>(s, Later<A>(), t, lane));
      const Map<A> map = F::step(s).map();
      const A y = walk_lanes<F, lanes>(s, map, composed_lanes<F, lanes>(map, lane), A(0), lane);
      write_results<false, lanes>(row, t, s, y, A(0), lane);
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
    const Map<A> map = F::step(steps[k]).map();
    all = {map.a + map.b * all.a, map.b * all.b};
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
  if (__any_sync(kWholeWarp, !is_finite(next))) { // the same in all warps; finite only if y of every warp is
    walk_warps<F>(steps, shared_a, carry, y, next);
  }
  carry = next;
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const Transition<L>& s = steps[k];
    const A own = F::step(s).walked(y);
    A out[kOutputs];
    F::results(s, own, y, out);
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
