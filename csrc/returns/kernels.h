// One call of a function over trajectories, as plain numbers and pointers: what the kernels of the CPU and of GPUs
// read.
#pragma once

#include "../cuda/threads.h"
#include "../formulas/element.h"

namespace gradscale {

// The functions over trajectories: name, name of the types of kernels and autograd nodes, number of results, what is
// read of values, and whether there are ratios. The decorators of gradscale_ext/reference/returns.py say the same for
// Python.
//
// A recurrence is y_t = a_t + b_t y_{t+1}. Its adjoint is the transposed function, y_t = a_t + b_t y_{t-1}. The adjoint
// turns the gradients of the results into the gradients of rewards, values and next values.
// clang-format off
#define GRADSCALE_RECURRENCES(function)                                            \
  function(lambda_returns, LambdaReturns, 1, Values::successors, false)            \
  function(generalized_advantages, GeneralizedAdvantages, 2, Values::states, false) \
  function(vtrace, VTrace, 2, Values::states, true)                                \
  function(retrace, Retrace, 1, Values::actions, true)
#define GRADSCALE_FUNCTIONS(function)                                  \
  GRADSCALE_RECURRENCES(function)                                      \
  function(n_step_returns, NStepReturns, 1, Values::successors, false) \
  function(n_step_transitions, NStepTransitions, 3, Values::none, false)
// clang-format on

#define GRADSCALE_ENUMERATOR(name, ...) name,
enum class Formula : int32_t { GRADSCALE_FUNCTIONS(GRADSCALE_ENUMERATOR) };
#undef GRADSCALE_ENUMERATOR

// The values that a function reads: V of the successors; V of the states too; or Q of the actions and V of the
// successors, which are two inputs; none: neither V nor Q.
enum class Values { none, successors, states, actions };

// The dimensions of strides.
constexpr int kRow = 0;
constexpr int kStep = 1;

// Numbers or flags by row and step, with any strides; one constant if `data` is null.
struct Operand {
  const void* data;
  int64_t strides[2]; // in elements; 0 for a constant
  Element element;    // of numbers; flags are bytes
  double constant;
};

// Calls function(T()) with the type of an operand's elements in memory. `A` is uint8_t for flags, and the type in which
// the call computes for numbers.
template <class A, class Function>
GRADSCALE_DISPATCH void dispatch_operand(const Operand& operand, Function function) {
  if constexpr (std::is_same_v<A, uint8_t>) {
    function(uint8_t());
  } else {
    dispatch_element(operand.element, function);
  }
}

// The element of an operand at a row and a step, as an A.
template <class A>
GRADSCALE_DISPATCH A element_at(const Operand& operand, int64_t row, int64_t step) {
  if (operand.data == nullptr) {
    return static_cast<A>(operand.constant);
  }
  const int64_t index = row * operand.strides[kRow] + step * operand.strides[kStep];
  A result = A(0);
  dispatch_operand<A>(operand, [&](auto type) {
    result = static_cast<A>(to_accumulate(static_cast<const decltype(type)*>(operand.data)[index]));
  });
  return result;
}

// The same, for an operand of int64 that is given.
GRADSCALE_HOST_DEVICE int64_t integer_at(const Operand& operand, int64_t row, int64_t step) {
  return static_cast<const int64_t*>(operand.data)[row * operand.strides[kRow] + step * operand.strides[kStep]];
}

// An output in the type that the call computes in, float or double; not computed if `data` is null.
struct ReturnsOutput {
  void* data;
  int64_t strides[2];
};

constexpr int kOutputs = 4;

// The operands of a call: numbers, then flags. In an adjoint, kRewards and kValues are the gradients of the results.
enum OperandIndex {
  kRewards,
  kValues,
  kNextValues,
  kDiscount,
  kLambda,
  kRatios,
  kTerminated,
  kTruncated,
  kMask,
  kOperands,
};

constexpr int kNumbers = kTerminated;
constexpr int kClips = 3;

// A thread of a GPU reads kAhead steps before it uses the first. Long rows are divided into chunks of a block's steps.
constexpr int kAhead = 4;
constexpr int kChunkSteps = kAhead * kThreads;

struct ReturnsCall {
  Formula formula;
  bool is_adjoint;
  Element element; // the type of the computation and the results: float64 or float32
  int64_t rows;
  int64_t steps;
  int64_t n; // at most `steps`
  Operand operands[kOperands];
  Operand clips[kClips]; // numbers for all steps. V-trace: clip_rho, clip_c, clip_pg_rho; Retrace: clip_c
  // In an adjoint: the gradients of rewards, values and next values. The gradient of a value of V-trace is the sum of
  // the second output and the fourth output of the step before. The third output of n-step transitions is int64.
  ReturnsOutput outputs[kOutputs];
  void* workspace; // set by launch_returns()
};

// n-step returns and n-step transitions are sums over windows, which are computed in blocks of steps of a row.
GRADSCALE_HOST_DEVICE bool has_n(Formula formula) {
  return formula == Formula::n_step_returns || formula == Formula::n_step_transitions;
}
GRADSCALE_HOST_DEVICE int64_t n_step_block_size(const ReturnsCall& call) {
  return !call.is_adjoint || call.n == 1 ? call.n : call.n - 1;
}
GRADSCALE_HOST_DEVICE int64_t n_step_blocks_of_row(const ReturnsCall& call) {
  return (call.steps - 1) / n_step_block_size(call) + 1;
}

// Windows of games, one per row.
struct MuZeroCall {
  Element element; // as in ReturnsCall
  int64_t rows;
  int64_t moves;          // L
  int64_t unroll_steps;   // K
  int64_t td_steps;       // at most L
  int64_t prefix_horizon; // 0: rewards are not summed
  Operand rewards;
  Operand root_values;
  Operand discount;
  Operand root_reward; // by row; null data: there is none, and `constant` is not used
  Operand terminated;  // by row
  // Of int64, each of them optional:
  Operand lengths;  // by row; L if absent
  Operand to_play;  // one player if absent
  Operand horizons; // td_steps by row, or by row and unroll step
  ReturnsOutput values;
  ReturnsOutput targets; // of rewards
  bool* mask;            // both masks have the strides of `values`
  bool* policy_mask;
};

// The number of moves of a row that were recorded, as it is given.
GRADSCALE_HOST_DEVICE int64_t length_at(const MuZeroCall& call, int64_t row) {
  return call.lengths.data == nullptr ? call.moves : integer_at(call.lengths, row, 0);
}

// td_steps of unroll step j of a row: at least 1, and at most L, so that sums cannot overflow.
GRADSCALE_HOST_DEVICE int64_t horizon_at(const MuZeroCall& call, int64_t row, int64_t j) {
  if (call.horizons.data == nullptr) {
    return call.td_steps;
  }
  const int64_t horizon = integer_at(call.horizons, row, j);
  return horizon < 1 ? 1 : horizon < call.td_steps ? horizon : call.td_steps;
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

// Computes rows begin to end - 1 of a recurrence, or of a function of n steps.
using ReturnsRows = void (*)(const ReturnsCall& call, int64_t begin, int64_t end);

extern const ReturnsRows along_steps_kernel; // lanes along the steps of a row
extern const ReturnsRows across_rows_kernel; // lanes across rows
extern const ReturnsRows n_step_kernel;

using MuZeroRows = void (*)(const MuZeroCall& call, int64_t begin, int64_t end);

extern const MuZeroRows muzero_kernel;

} // namespace gradscale
