// The kernels of trajectories on GPUs. Nothing is written but results, and each byte is read once.
//
// recur_along: a warp has a row, and its lanes 32 neighbouring steps, so that rows [B, T] are read in whole sectors;
// the maps of the lanes are composed in five rounds. A round with a number that is not finite is walked step by step.
// recur_across: a thread has a row, for trajectories [T, B], in which neighbouring threads read neighbouring numbers.
#pragma once

#include "../port/device.h"
#include "formulas.h"
#include "n_step.h"

namespace gradscale {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarpSize = 32;

template <class A>
GRADSCALE_DEVICE A number_at(const Operand& operand, int64_t row, int64_t step) {
  if (operand.data == nullptr) {
    return static_cast<A>(operand.constant);
  }
  const int64_t index = row * operand.strides[kRow] + step * operand.strides[kStep];
  A result = A(0);
  dispatch_element(operand.element, [&](auto type) {
    result = static_cast<A>(to_accumulate(static_cast<const decltype(type)*>(operand.data)[index]));
  });
  return result;
}

GRADSCALE_DEVICE bool flag_at(const FlagOperand& operand, int64_t row, int64_t step) {
  return operand.data == nullptr ? operand.constant
                                 : operand.data[row * operand.strides[kRow] + step * operand.strides[kStep]] != 0;
}

// Steps behind the window are masked.
template <class A, class F>
GRADSCALE_DEVICE Transition<OneLane<A>> transition_at(const ReturnsCall& call, int64_t row, int64_t t) {
  Transition<OneLane<A>> s{};
  for (int k = 0; k < 3; ++k) {
    s.limits[k] = static_cast<A>(call.limits[k]);
  }
  s.cut = true;
  s.live = t < call.steps && flag_at(call.mask, row, t);
  if (!s.live) {
    return s;
  }
  const bool has_later = t + 1 < call.steps;
  s.reward = number_at<A>(call.rewards, row, t);
  s.value = number_at<A>(call.values, row, t);
  if constexpr (std::is_same_v<F, VTrace>) {
    s.later_value = has_later ? number_at<A>(call.values, row, t + 1) : A(0);
  }
  s.next_value = number_at<A>(call.next_values, row, t);
  s.discount = number_at<A>(call.discount, row, t);
  s.lambda = number_at<A>(call.lambda, row, t);
  s.ratio = number_at<A>(call.ratios, row, t);
  s.terminated = flag_at(call.terminated, row, t);
  s.cut = s.terminated || flag_at(call.truncated, row, t) || !has_later || !flag_at(call.mask, row, t + 1);
  return s;
}

template <class A, class F>
GRADSCALE_DEVICE void write_results(const ReturnsCall& call, int64_t row, int64_t t, const A* out) {
#pragma unroll
  for (int k = 0; k < F::kResults; ++k) {
    if (call.outputs[k].data != nullptr) {
      const int64_t index = row * call.outputs[k].strides[kRow] + t * call.outputs[k].strides[kStep];
      static_cast<A*>(call.outputs[k].data)[index] = out[k];
    }
  }
}

template <class A, class F>
GRADSCALE_DEVICE A extra_at(const Transition<OneLane<A>>& s) {
  if constexpr (std::is_same_v<F, VTraceAdjoint>) {
    return F::template extra<OneLane<A>>(s);
  } else {
    return A(0);
  }
}

// The value of the lane that is `distance` earlier in the walk, or `fill`.
template <class F, class A>
GRADSCALE_DEVICE A earlier(A x, int distance, int lane, A fill) {
  const int from = F::kAdjoint ? lane - distance : lane + distance;
  const A other = __shfl_sync(kAllLanes, x, from & (kWarpSize - 1));
  return from >= 0 && from < kWarpSize ? other : fill;
}

template <class A, class F>
GRADSCALE_KERNEL(kThreads, 2)
recur_along(GRADSCALE_ARGUMENT(ReturnsCall) call) {
  using L = OneLane<A>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (row >= call.rows) {
    return;
  }
  const int last = F::kAdjoint ? kWarpSize - 1 : 0; // in the order of the walk
  const int64_t rounds = (call.steps + kWarpSize - 1) / kWarpSize;
  A carry = A(0), extra_carry = A(0);
  for (int64_t n = 0; n < rounds; ++n) {
    const int64_t t = (F::kAdjoint ? n : rounds - 1 - n) * kWarpSize + lane;
    const Transition<L> s = transition_at<A, F>(call, row, t);
    const Affine<L> map = F::template map<L>(s);
    A a = map.a, b = map.b;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      a += b * earlier<F>(a, distance, lane, A(0));
      b *= earlier<F>(b, distance, lane, A(1));
    }
    A y = a + b * carry;
    if (__any_sync(kAllLanes, y - y != 0)) {
      A walked = carry;
      for (int k = 0; k < kWarpSize; ++k) {
        const int turn = F::kAdjoint ? k : kWarpSize - 1 - k;
        if (lane == turn) {
          y = map.a + L::times(map.b, walked);
        }
        walked = __shfl_sync(kAllLanes, y, turn);
      }
    }
    const A extra = extra_at<A, F>(s);
    A out[kOutputs];
    F::template results<L>(s, y, earlier<F>(y, 1, lane, carry), earlier<F>(extra, 1, lane, extra_carry), out);
    if (t < call.steps) {
      write_results<A, F>(call, row, t, out);
    }
    carry = __shfl_sync(kAllLanes, y, last);
    extra_carry = __shfl_sync(kAllLanes, extra, last);
  }
}

template <class A, class F>
GRADSCALE_KERNEL(kThreads, 2)
recur_across(GRADSCALE_ARGUMENT(ReturnsCall) call) {
  using L = OneLane<A>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= call.rows) {
    return;
  }
  A carry = A(0), extra = A(0);
  for (int64_t n = 0; n < call.steps; ++n) {
    const int64_t t = F::kAdjoint ? n : call.steps - 1 - n;
    const Transition<L> s = transition_at<A, F>(call, row, t);
    const Affine<L> map = F::template map<L>(s);
    const A y = map.a + L::times(map.b, carry);
    A out[kOutputs];
    F::template results<L>(s, y, carry, extra, out);
    write_results<A, F>(call, row, t, out);
    carry = y;
    extra = extra_at<A, F>(s);
  }
}

// ---- n-step returns ------------------------------------------------------------------------------------------------

template <class A>
struct StepsInMemory {
  const ReturnsCall& call;
  int64_t row;

  GRADSCALE_DEVICE StepOfRow<A> operator[](int64_t t) const {
    StepOfRow<A> s;
    s.live = flag_at(call.mask, row, t);
    s.terminated = flag_at(call.terminated, row, t);
    s.cut = s.terminated || flag_at(call.truncated, row, t) || t + 1 >= call.steps || !flag_at(call.mask, row, t + 1);
    s.reward = s.live ? number_at<A>(call.rewards, row, t) : A(0);
    s.discount = number_at<A>(call.discount, row, t);
    s.bootstrap = s.terminated ? A(0) : number_at<A>(call.next_values, row, t);
    return s;
  }
};

// A thread has a row. `workspace` has 2 min(n, T) numbers for each.
template <class A>
GRADSCALE_KERNEL(kThreads, 2)
n_step_rows(GRADSCALE_ARGUMENT(ReturnsCall) call) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= call.rows) {
    return;
  }
  const int64_t n = call.n < call.steps ? call.n : call.steps;
  const StepsInMemory<A> steps{call, row};
  A* scratch = static_cast<A*>(call.workspace) + row * 2 * n;
  if (call.formula == Formula::n_step) {
    n_step_row<A>(steps, call.steps, n, scratch, Result<A>(call.outputs[0], row));
  } else {
    n_step_adjoint_row<A>(
        steps, call.steps, n, scratch, scratch + n, Result<A>(call.outputs[0], row), Result<A>(call.outputs[2], row));
  }
}

// ---- MuZero --------------------------------------------------------------------------------------------------------

// A thread has a row and an unroll step. Steps of a row are neighbours, and read the same numbers.
template <class A>
GRADSCALE_KERNEL(kThreads, 2)
muzero_rows(GRADSCALE_ARGUMENT(MuZeroCall) call) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / (call.unroll_steps + 1), j = index % (call.unroll_steps + 1);
  if (row >= call.rows) {
    return;
  }
  const int64_t recorded = call.lengths == nullptr ? call.moves : call.lengths[row * call.lengths_stride];
  const int64_t length = recorded < 0 ? 0 : recorded < call.moves ? recorded : call.moves;
  const bool is_over = flag_at(call.terminated, row, 0);
  const auto is_other = [&](int64_t i) {
    if (call.to_play == nullptr) {
      return false;
    }
    const int64_t* players = call.to_play + row * call.to_play_strides[kRow];
    return players[i * call.to_play_strides[kStep]] != players[j * call.to_play_strides[kStep]];
  };
  const auto seen = [&](const Operand& operand, int64_t i) {
    const A x = number_at<A>(operand, row, i);
    return is_other(i) ? -x : x;
  };
  A z = A(0);
  if (j <= length) {
    const A discount = number_at<A>(call.discount, row, 0);
    const int64_t last = j + call.td_steps < length ? j + call.td_steps : length;
    z = is_over && last == length ? A(0) : seen(call.root_values, last);
    for (int64_t i = last - 1; i >= j; --i) {
      z = seen(call.rewards, i) + OneLane<A>::times(discount, z);
    }
  }
  static_cast<A*>(call.values)[row * call.values_strides[kRow] + j * call.values_strides[kStep]] = z;
  const int64_t at = row * call.masks_strides[kRow] + j * call.masks_strides[kStep];
  call.mask[at] = j <= length || is_over;
  call.policy_mask[at] = j < length;
  // Step j has the reward of move j - 1; there is one of the root if it is given.
  A* targets = static_cast<A*>(call.targets) + row * call.targets_strides[kRow];
  const bool has_root = call.root_reward.data != nullptr;
  if (j == 0) {
    if (has_root) {
      *targets = number_at<A>(call.root_reward, row, 0);
    }
    return;
  }
  A sum = A(0);
  const int64_t first = call.prefix_horizon == 0 ? j - 1 : (j - 1) / call.prefix_horizon * call.prefix_horizon;
  for (int64_t i = first; i < j && i < length; ++i) {
    sum += number_at<A>(call.rewards, row, i);
  }
  targets[(has_root ? j : j - 1) * call.targets_strides[kStep]] = sum;
}

} // namespace gradscale
