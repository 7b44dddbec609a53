// The kernels of n-step returns, and of MuZero's targets, on GPUs.
#pragma once

#include "steps.cuh"

#include "n_step.h"

namespace gradscale {

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
