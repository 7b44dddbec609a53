// Shared by the GPU kernels of trajectories: reading and writing the row of a thread, and composing maps. The map of a
// step, y -> a + b y, gives y of the step, given y of the step before in the walk (formulas.h).
#pragma once

#include "../cuda/device.h"
#include "formulas.h"

namespace gradscale {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;

// How a call's tensors are stored. `runs`: numbers have the kernel's type, and the stride between steps is 1.
// `columns`: numbers have the kernel's type, and the stride between steps equals the first output's. `any`: any types
// and strides.
enum class Layout { any, runs, columns };

// The tensors that a call has are the bits of the template argument `given`: bit k is set for operand k, and the bits
// from kFirstOutput on for the outputs. The other operands are constants. With Layout::any all bits are set, and an
// operand is a constant if its data is null.
constexpr unsigned kFirstOutput = 1u << kOperands;

// True for formulas whose results read y of the step before in the walk.
template <class F>
constexpr bool kReadsEarlier = F::kAdjoint || std::is_same_v<F, VTrace> || std::is_same_v<F, Retrace>;

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
    for (int k = 0; k < 3; ++k) {
      s.limits[k] = static_cast<A>(call.limits[k]);
    }
    return s;
  }

  // Reads the numbers of step t + 1 that transition t needs.
  GRADSCALE_DEVICE Later<A> read_later(Index t) const {
    Later<A> later;
    if (t >= -1 && t + 1 < steps) {
      later.live = flag(kMask, t + 1);
      if constexpr (std::is_same_v<F, VTrace>) {
        later.value = element<A>(kValues, t + 1);
      }
    }
    return later;
  }

  // The same numbers, taken from the next lane, which has step t + 1. The last lane uses `beyond`.
  GRADSCALE_DEVICE Later<A> later_in_lanes(const Transition<L>& s, const Later<A>& beyond, Index t, int lane) const {
    const bool is_last = lane == kWarpSize - 1;
    Later<A> later{t + 1 < steps, A(0)};
    if constexpr ((given & 1u << kMask) != 0) {
      const unsigned live = __ballot_sync(kAllLanes, s.live);
      later.live = is_last ? beyond.live : (live >> (lane + 1) & 1) != 0;
    }
    if constexpr (std::is_same_v<F, VTrace>) {
      const A value = __shfl_down_sync(kAllLanes, s.value, 1);
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

template <class A>
using Map = Affine<OneLane<A>>;

template <class A>
GRADSCALE_DEVICE bool is_finite(A x) {
  return x - x == 0;
}

template <class A>
GRADSCALE_DEVICE A applied(const Map<A>& map, A y) {
  return map.a + OneLane<A>::times(map.b, y);
}

// The map that applies `before`, then `map`. A coefficient of 0 gives 0 also for inf and NaN, and a product of nonzero
// coefficients is never 0.
template <class A>
GRADSCALE_DEVICE Map<A> composed(const Map<A>& map, const Map<A>& before) {
  return {applied(map, before.a), OneLane<A>::product(map.b, before.b)};
}

// Returns x of the lane that is `distance` lanes earlier in the walk, or this lane's x if there is no such lane.
template <class F, class A>
GRADSCALE_DEVICE A shifted(A x, int distance) {
  return F::kAdjoint ? __shfl_up_sync(kAllLanes, x, distance) : __shfl_down_sync(kAllLanes, x, distance);
}

// The position of a lane in the walk, from 0. The function is its own inverse: turn_of(position) is the lane.
template <class F>
GRADSCALE_DEVICE int turn_of(int lane) {
  return F::kAdjoint ? lane : kWarpSize - 1 - lane;
}

// Returns x of the lane before this one in the walk; `first` for the first lane of the walk.
template <class F, class A>
GRADSCALE_DEVICE A earlier(A x, int lane, A first) {
  const A other = shifted<F>(x, 1);
  return turn_of<F>(lane) == 0 ? first : other;
}

} // namespace gradscale
