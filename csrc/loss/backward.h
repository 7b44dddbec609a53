// The gradient function of the loss, of eager calls and of the registered operator.
#pragma once

#include "python.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace gradscale {

// Makes the loss of a call part of the graph. The call stays with its node, without its outputs. Without a plan it is a
// call of the registered operator, whose gradients are of the type of sums, and whose backward pass can be traced.
void record_call(Call call, const at::Tensor& loss, std::shared_ptr<Plan> plan);

// The Python function that gives the gradients as a differentiable graph, for second derivatives:
// (heads, predictions, targets, options, grad_output, create_graph) -> list of gradients in the order of the prediction
// tensors.
void set_differentiable_gradients(py::function function);

} // namespace gradscale
