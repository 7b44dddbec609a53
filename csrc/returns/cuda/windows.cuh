// The kernels of n-step returns, of n-step transitions and of MuZero's targets, on GPUs.
#pragma once

#include "../../cuda/device.h"
#include "../formulas.h"
#include "../window_rows.h"

namespace gradscale {

// ---- n-step returns and n-step transitions -------------------------------------------------------------------------

template <class A>
struct StepsInMemory {
  const ReturnsCall& call;
  int64_t row;

  GRADSCALE_DEVICE StepOfRow<A> operator[](int64_t t) const {
    StepOfRow<A> s;
    // Numbers are loaded before the flags that decide whether they count, so that the loads overlap.
    const A reward = element_at<A>(call.operands[kRewards], row, t);
    const A next_value = element_at<A>(call.operands[kNextValues], row, t);
    s.discount = element_at<A>(call.operands[kDiscount], row, t);
    const auto flag = [&](int k, int64_t step) { return element_at<uint8_t>(call.operands[k], row, step) != 0; };
    s.live = flag(kMask, t);
    s.terminated = flag(kTerminated, t);
    s.cut = s.terminated || flag(kTruncated, t) || t + 1 >= call.steps || !flag(kMask, t + 1);
    s.reward = s.live ? reward : A(0);
    s.bootstrap = s.terminated ? A(0) : next_value;
    return s;
  }
};

// One thread per block of a row. Neighbouring threads have neighbouring rows, or the next block of the same row if not
// `across`. `workspace` has twice as many numbers as the blocks have steps.
template <class A, NStep kind, bool across>
GRADSCALE_KERNEL(kThreads, kind == NStep::adjoint ? 2 : 3)
n_step_blocks(GRADSCALE_ARGUMENT(ReturnsCall) call) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t blocks = n_step_blocks_of_row(call);
  if (index >= call.rows * blocks) {
    return;
  }
  const int64_t row = across ? index % call.rows : index / blocks;
  const int64_t block = across ? index / call.rows : index % blocks;
  A* scratch = static_cast<A*>(call.workspace) + index * 2 * n_step_block_size(call);
  n_step_results<kind, A>(call, StepsInMemory<A>{call, row}, row, block, scratch);
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
  const ElementsInMemory<A> rewards{call.rewards, row}, root_values{call.root_values, row};
  MuZeroRow<A>(call, row).write(j, rewards, root_values);
}

} // namespace gradscale
