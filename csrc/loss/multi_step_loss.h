#pragma once

#include "arguments.h"

namespace gradscale {

// Loss and detached outputs of one call; everything in float, or double when a prediction is double.
struct Outputs {
  at::Tensor loss;                  // scalar, or [B] without reduction; the only output with a gradient
  at::Tensor per_sample;            // [B]
  std::vector<at::Tensor> per_step; // by head [B, T_h]
  std::vector<at::Tensor> expected; // by head [B, T_h]; undefined where the head decodes nothing
  at::Tensor head_means;            // [heads]
  at::Tensor num_nonfinite;         // int64 scalar
};

// Computes the loss and, where a prediction requires grad, the gradients in the same pass.
Outputs multi_step_loss(const Plan& plan, Arguments arguments);

// Softmax, expectation and inverse transform over the last dimension of [..., num_bins] logits, without a gradient.
at::Tensor decode(const at::Tensor& logits, const Support& support);

// The Python function that gives the gradients as a differentiable graph, for second derivatives:
// (heads, predictions, targets, options, grad_output) -> list of gradients in the order of the prediction tensors.
void set_differentiable_gradients(py::function function);

// The kernels for this machine: the best of those compiled that ATEN_CPU_CAPABILITY allows.
const RowKernels& row_kernels();

} // namespace gradscale
