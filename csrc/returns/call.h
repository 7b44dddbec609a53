// One call of a function over trajectories, as plain numbers and pointers: what the kernels of the CPU and of GPUs
// read.
#pragma once

#include "../formulas/element.h"

namespace gradscale {

// A function, except n-step returns, computes a recurrence y_t = a_t + b_t y_{t+1}. Its adjoint is the transposed
// function, y_t = a_t + b_t y_{t-1}. The adjoint turns the gradients of the results into the gradients of rewards,
// values and next values.
enum class Formula : int32_t {
  lambda_returns = 0,
  advantages = 1,
  vtrace = 2,
  retrace = 3,
  n_step = 4,
  lambda_returns_adjoint = 5,
  advantages_adjoint = 6,
  vtrace_adjoint = 7,
  retrace_adjoint = 8,
  n_step_adjoint = 9,
};

constexpr int32_t kFirstAdjoint = 5;

// The dimensions of strides.
constexpr int kRow = 0;
constexpr int kStep = 1;

// Numbers by row and step, of any type and strides; one constant if `data` is null.
struct Operand {
  const void* data;
  int64_t strides[2]; // in elements
  Element element;
  double constant;
};

// Bool by row and step; `constant` if `data` is null.
struct FlagOperand {
  const uint8_t* data;
  int64_t strides[2];
  bool constant;
};

// An output in the type that the call computes in, float or double; not computed if `data` is null.
struct ReturnsOutput {
  void* data;
  int64_t strides[2];
};

constexpr int kOutputs = 3;

struct ReturnsCall {
  Formula formula;
  bool is_double;
  int64_t rows;
  int64_t steps;
  int64_t n;
  Operand rewards; // in an adjoint: the gradient of the first result
  Operand values;  // in an adjoint: the gradient of the second result
  Operand next_values;
  Operand discount;
  Operand lambda;
  Operand ratios;
  FlagOperand terminated;
  FlagOperand truncated;
  FlagOperand mask;
  double limits[3];                // V-trace: clip_rho, clip_c, clip_pg_rho; Retrace: clip_c
  ReturnsOutput outputs[kOutputs]; // in an adjoint: the gradients of rewards, values and next values
  void* workspace;                 // set by launch_returns()
  uint64_t launch;                 // set by launch_returns(): a number that identifies the launch
};

// Windows of games, one per row.
struct MuZeroCall {
  bool is_double;
  int64_t rows;
  int64_t moves;        // L
  int64_t unroll_steps; // K
  int64_t td_steps;
  int64_t prefix_horizon; // 0: rewards are not summed
  Operand rewards;
  Operand root_values;
  Operand discount;
  Operand root_reward;    // by row; null data: there is none, and `constant` is not used
  const int64_t* lengths; // null: L
  int64_t lengths_stride;
  FlagOperand terminated; // by row
  const int64_t* to_play; // null: one player
  int64_t to_play_strides[2];
  void* values; // float or double
  int64_t values_strides[2];
  void* targets; // the targets of rewards, float or double
  int64_t targets_strides[2];
  bool* mask;
  bool* policy_mask;
  int64_t masks_strides[2];
};

// ---- Kernels --------------------------------------------------------------------------------------------------------

// Computes rows begin to end - 1 of a recurrence, or of n-step returns.
using ReturnsRows = void (*)(const ReturnsCall& call, int64_t begin, int64_t end);

extern const ReturnsRows along_steps_kernel; // lanes along the steps of a row
extern const ReturnsRows across_rows_kernel; // lanes across rows
extern const ReturnsRows n_step_kernel;

using MuZeroRows = void (*)(const MuZeroCall& call, int64_t begin, int64_t end);

extern const MuZeroRows muzero_kernel;

class OnDevice;

// `across`: lanes run across rows, which are adjacent in memory, instead of along the steps of a row.
void launch_returns(ReturnsCall call, bool across, const OnDevice& device);
void launch_muzero(const MuZeroCall& call, const OnDevice& device);

} // namespace gradscale
