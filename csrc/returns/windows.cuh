// The kernels of n-step returns, and of MuZero's targets, on GPUs. The window of a step is the steps that its return
// sums: at most n, from this step on.
#pragma once

#include "steps.cuh"
#include "windows.h"

namespace gradscale {

// ---- n-step returns ------------------------------------------------------------------------------------------------

template <class A>
struct StepsInMemory {
  const ReturnsCall& call;
  int64_t row;

  GRADSCALE_DEVICE StepOfRow<A> operator[](int64_t t) const {
    StepOfRow<A> s;
    const auto flag = [&](int k, int64_t step) { return element_at<uint8_t>(call.operands[k], row, step) != 0; };
    s.live = flag(kMask, t);
    s.terminated = flag(kTerminated, t);
    s.cut = s.terminated || flag(kTruncated, t) || t + 1 >= call.steps || !flag(kMask, t + 1);
    s.reward = s.live ? element_at<A>(call.operands[kRewards], row, t) : A(0);
    s.discount = element_at<A>(call.operands[kDiscount], row, t);
    s.bootstrap = s.terminated ? A(0) : element_at<A>(call.operands[kNextValues], row, t);
    return s;
  }
};

// One thread per row, for trajectories [T, B]. `workspace` has 2 T numbers per row.
template <class A>
GRADSCALE_KERNEL(kThreads, 2)
n_step_rows(GRADSCALE_ARGUMENT(ReturnsCall) call) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= call.rows) {
    return;
  }
  const int64_t n = call.n < call.steps ? call.n : call.steps;
  const StepsInMemory<A> steps{call, row};
  A* scratch = static_cast<A*>(call.workspace) + row * 2 * call.steps;
  if (call.formula == Formula::n_step) {
    n_step_row<A>(steps, call.steps, n, scratch, Result<A>(call.outputs[0], row));
  } else {
    n_step_adjoint_row<A>(
        steps, call.steps, n, scratch, scratch + n, Result<A>(call.outputs[0], row), Result<A>(call.outputs[2], row));
  }
}

// The map from the return of a window, counted from the next step on, to its return counted from this step on.
template <class A>
GRADSCALE_DEVICE Map<A> window_map(const StepOfRow<A>& s) {
  if (!s.live) {
    return {A(0), A(0)};
  }
  return s.cut ? Map<A>{s.last_return(), A(0)} : Map<A>{s.reward, s.discount};
}

// The steps of one round: 32 steps of a row, one per lane. The row is cut into blocks of n steps.
template <class A>
struct StepsOfWarp {
  int64_t t;
  bool is_inside;
  int64_t before; // the number of steps before t in the block of t
  int64_t after;  // the number of steps after t in the block of t
  StepOfRow<A> s{};

  GRADSCALE_DEVICE StepsOfWarp(const StepsInMemory<A>& steps, int64_t begin, int64_t n, int lane)
      : t(begin + lane), is_inside(t < steps.call.steps), before(t % n) {
    const int64_t end = t - before + n < steps.call.steps ? t - before + n : steps.call.steps;
    after = end - 1 - t;
    if (is_inside) {
      s = steps[t];
    }
  }

  // An inclusive scan over the steps of each block, in the direction of `shift`. function(x, y) joins the value x of a
  // step with the value y of the steps that precede it in the scan. `turn` is the position of this lane in the scan,
  // `count` the number of steps of its block that precede its step, and `carry` the last result of the previous round.
  template <class T, class Shift, class Function>
  GRADSCALE_DEVICE static T scanned(T own, T carry, int turn, int64_t count, Shift shift, Function function) {
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const T other = shift(own, distance);
      if (turn >= distance && count >= distance) {
        own = function(own, other);
      }
    }
    return count > turn ? function(own, carry) : own;
  }
};

template <class A>
GRADSCALE_DEVICE Map<A> shuffled(const Map<A>& map, int lane) {
  return {__shfl_sync(kAllLanes, map.a, lane), __shfl_sync(kAllLanes, map.b, lane)};
}

// `prefix[t]`: the return of a window that ends at t, from the first step of t's block on.
template <class A>
GRADSCALE_DEVICE void warp_n_step(const StepsInMemory<A>& steps, int64_t n, int lane, A* prefix) {
  const int64_t count = steps.call.steps, rounds = (count + kWarpSize - 1) / kWarpSize;
  const auto up = [](const Map<A>& x, int d) {
    return Map<A>{__shfl_up_sync(kAllLanes, x.a, d), __shfl_up_sync(kAllLanes, x.b, d)};
  };
  const auto down = [](const Map<A>& x, int d) {
    return Map<A>{__shfl_down_sync(kAllLanes, x.a, d), __shfl_down_sync(kAllLanes, x.b, d)};
  };
  using Steps = StepsOfWarp<A>;
  Map<A> carry{A(0), A(1)};
  for (int64_t round = 0; round < rounds; ++round) {
    const Steps own(steps, round * kWarpSize, n, lane);
    const Map<A> all =
        Steps::scanned(window_map(own.s), carry, lane, own.before, up, [](const Map<A>& x, const Map<A>& y) {
          return composed(y, x);
        });
    Map<A> before = up(all, 1);
    before = own.before == 0 ? Map<A>{A(0), A(1)} : (lane == 0 ? carry : before);
    if (own.is_inside) {
      prefix[own.t] = applied(before, own.s.live ? own.s.last_return() : A(0));
    }
    carry = shuffled(all, kWarpSize - 1);
  }
  __syncwarp();
  const Result<A> result(steps.call.outputs[0], steps.row);
  for (int64_t round = rounds - 1; round >= 0; --round) {
    const Steps own(steps, round * kWarpSize, n, lane);
    const Map<A> all = Steps::scanned(
        window_map(own.s), carry, kWarpSize - 1 - lane, own.after, down, [](const Map<A>& x, const Map<A>& y) {
          return composed(x, y);
        });
    if (own.is_inside) {
      A following = A(0);
      if (all.b != 0) {
        const int64_t last = own.t + n - 1 < count ? own.t + n - 1 : count - 1, end = own.t + own.after;
        following = all.b * (last <= end ? steps[end].bootstrap : prefix[last]);
      }
      result.put(own.t, all.a + following);
    }
    carry = shuffled(all, 0);
  }
}

// `parts[t]`: the gradient of the window that begins at t, times the discounts from t to the end of t's block.
// `sums[t]`: the sum of the parts from t to the end of the block.
template <class A>
GRADSCALE_DEVICE void warp_n_step_adjoint(const StepsInMemory<A>& steps, int64_t n, int lane, A* sums, A* parts) {
  const int64_t rounds = (steps.call.steps + kWarpSize - 1) / kWarpSize;
  const auto down = [](A x, int d) { return __shfl_down_sync(kAllLanes, x, d); };
  const auto passes = [](const StepOfRow<A>& s) { return s.live && !s.cut ? s.discount : A(0); };
  using Steps = StepsOfWarp<A>;
  A weight_carry = A(1), sum_carry = A(0);
  for (int64_t round = rounds - 1; round >= 0; --round) {
    const Steps own(steps, round * kWarpSize, n, lane);
    const int turn = kWarpSize - 1 - lane;
    const A weight = Steps::scanned(
        passes(own.s), weight_carry, turn, own.after, down, [](A x, A y) { return OneLane<A>::product(x, y); });
    const A part = OneLane<A>::times(weight, own.s.reward);
    const A sum = Steps::scanned(part, sum_carry, turn, own.after, down, [](A x, A y) { return x + y; });
    if (own.is_inside) {
      parts[own.t] = part;
      sums[own.t] = sum;
    }
    weight_carry = __shfl_sync(kAllLanes, weight, 0);
    sum_carry = __shfl_sync(kAllLanes, sum, 0);
  }
  __syncwarp();
  const Result<A> to_reward(steps.call.outputs[0], steps.row), to_next_value(steps.call.outputs[2], steps.row);
  const auto up = [](const Map<A>& x, int d) {
    return Map<A>{__shfl_up_sync(kAllLanes, x.a, d), __shfl_up_sync(kAllLanes, x.b, d)};
  };
  Map<A> carry{A(0), A(1)};
  A passed_carry = A(0);
  for (int64_t round = 0; round < rounds; ++round) {
    const Steps own(steps, round * kWarpSize, n, lane);
    const StepOfRow<A>& s = own.s;
    const A passed = passes(s);
    A coefficient = __shfl_up_sync(kAllLanes, passed, 1);
    coefficient = own.before == 0 ? A(1) : (lane == 0 ? passed_carry : coefficient);
    passed_carry = __shfl_sync(kAllLanes, passed, kWarpSize - 1);
    const Map<A> all = Steps::scanned(
        s.live ? Map<A>{s.reward, coefficient} : Map<A>{A(0), A(0)},
        carry,
        lane,
        own.before,
        up,
        [](const Map<A>& x, const Map<A>& y) { return composed(x, y); });
    if (own.is_inside) {
      const int64_t first = own.t - n + 1;
      const bool ends = all.b != 0 && first >= 0; // a window ends here because it has n steps
      A whole = all.a, one = A(0);                // `one`: the gradient of that window
      if (ends) {
        const bool is_own = own.before == n - 1;
        one = all.b * (is_own ? steps[first].reward : parts[first]);
        whole += is_own ? A(0) : all.b * sums[first];
      }
      to_reward.put(own.t, s.live ? whole : A(0));
      const bool reads_next_value = s.live && !s.terminated && (s.cut || ends);
      to_next_value.put(own.t, reads_next_value ? OneLane<A>::times(s.discount, s.cut ? whole : one) : A(0));
    }
    carry = shuffled(all, kWarpSize - 1);
  }
}

// One warp per row, for trajectories [B, T]; its lanes have 32 neighbouring steps. The warp passes over the row twice,
// and the second pass reads from the cache. A scan of 32 steps shuffles each number five times.
template <class A>
GRADSCALE_KERNEL(kThreads, 2)
n_step_along(GRADSCALE_ARGUMENT(ReturnsCall) call) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (row >= call.rows) {
    return;
  }
  const int64_t n = call.n < call.steps ? call.n : call.steps;
  A* scratch = static_cast<A*>(call.workspace) + row * 2 * call.steps;
  if (call.formula == Formula::n_step) {
    warp_n_step<A>({call, row}, n, lane, scratch);
  } else {
    warp_n_step_adjoint<A>({call, row}, n, lane, scratch, scratch + call.steps);
  }
}

// ---- MuZero --------------------------------------------------------------------------------------------------------

// The elements of a row of an operand.
template <class A>
struct ElementsInMemory {
  const Operand& operand;
  int64_t row;

  GRADSCALE_DEVICE A operator[](int64_t step) const {
    return element_at<A>(operand, row, step);
  }
};

// One thread per row and unroll step. Neighbouring threads have steps of the same row, and read the same numbers.
template <class A>
GRADSCALE_KERNEL(kThreads, 2)
muzero_rows(GRADSCALE_ARGUMENT(MuZeroCall) call) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / (call.unroll_steps + 1), j = index % (call.unroll_steps + 1);
  if (row >= call.rows) {
    return;
  }
  MuZeroRow<A>(call, row).write(j, ElementsInMemory<A>{call.rewards, row}, ElementsInMemory<A>{call.root_values, row});
}

} // namespace gradscale
