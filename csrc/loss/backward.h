// The gradient function of the loss in eager mode. The registered operator has its own: see operator.cpp.
#pragma once

#include "python.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace gradscale {

// Makes the loss among the outputs of a call part of the graph. The call stays with its node.
void record_call(Call call, const Outputs& outputs, std::shared_ptr<Plan> plan);

// The gradient of a head weight, from the head's share of the loss before this weight.
at::Tensor gradient_of_head_weight(const at::Tensor& share, const at::Tensor& grad_output, at::ScalarType type);

// grad_output as it multiplies a gradient: itself, or [B] along the batch dimension.
at::Tensor factor_for(const at::Tensor& gradient, const at::Tensor& grad_output, int64_t batch_dim);

// The Python function that gives the gradients as a differentiable graph, for second derivatives:
// (heads, predictions, targets, options, grad_output, create_graph) -> list of gradients in the order of the prediction
// tensors, and then of the head weights.
void set_differentiable_gradients(py::function function);

} // namespace gradscale
