#pragma once

#include "run.h"

#include <memory>

namespace gradscale {

// The loss with its gradient function: what run_loss gives, made part of autograd's graph.
Outputs multi_step_loss(const std::shared_ptr<Plan>& plan, Arguments arguments);

// The Python function that gives the gradients as a differentiable graph, for second derivatives:
// (heads, predictions, targets, masks, options, grad_output, create_graph) -> list of gradients in the order of the
// prediction tensors.
void set_differentiable_gradients(py::function function);

} // namespace gradscale
