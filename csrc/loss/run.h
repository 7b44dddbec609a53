// One pass over the rows of all heads and steps.
#pragma once

#include "arguments.h"
#include "gradient_memory.h"
#include "head_table.h"

namespace gradscale {

// Loss and detached outputs of one call; everything in float, or double when a prediction is double.
struct Outputs {
  at::Tensor loss;                  // scalar, or [B] without reduction; the only output with a gradient
  at::Tensor per_sample;            // [B]
  std::vector<at::Tensor> per_step; // by head [B, T_h], or [T_h, B] without batch_first
  std::vector<at::Tensor> details;  // the same; undefined where the head has none
  at::Tensor head_means;            // [heads]
  at::Tensor head_losses;           // [heads]
  at::Tensor num_nonfinite;         // int64 scalar
};

// The forward pass as the backward pass on a device must know it.
struct DeviceState {
  at::Tensor skipped;  // a copy of per_sample, which is the user's to write to; undefined where none is skipped
  at::Tensor divisors; // float64 [heads]: what a head's sum is divided by; undefined where the host knows it
};

// Gradients by head for grad_output 1, in the layout of its predictions; undefined where none is wanted.
using Gradients = std::vector<std::vector<at::Tensor>>;

struct RunResult {
  Outputs outputs;
  Gradients gradients;
  DeviceState state;
};

// Computes the loss and, where wanted, the gradients in the same pass. Gradients are of the type of their predictions,
// or `wide`: of the type of sums, float for half types, so that they can be multiplied before they are rounded.
RunResult run_loss(const HeadTable& heads, const GradientMemory& memory, const Arguments& arguments, bool wide = false);

// Multiplies the gradients of run_loss by grad_output on a device, in place and without waiting; computes new ones
// where none are given.
Gradients multiplied_on_device(
    const HeadTable& heads,
    const GradientMemory& memory,
    const Arguments& arguments,
    Gradients gradients,
    const at::Tensor& grad_output,
    const DeviceState& state);

} // namespace gradscale
