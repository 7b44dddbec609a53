// The gradient function of the loss in eager mode. The registered operator has its own: see operator.cpp.
#pragma once

#include "python.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace gradscale {

// Makes the loss of a call part of the graph. The call stays with its node, without its outputs.
void record_call(Call call, const at::Tensor& loss, std::shared_ptr<Plan> plan);

// grad_output as it multiplies a gradient: itself, or [B] along the batch dimension.
at::Tensor factor_for(const at::Tensor& gradient, const at::Tensor& grad_output, int64_t batch_dim);

// The Python function that gives the gradients as a differentiable graph, for second derivatives:
// (heads, predictions, targets, options, grad_output, create_graph) -> list of gradients in the order of the prediction
// tensors.
void set_differentiable_gradients(py::function function);

} // namespace gradscale
