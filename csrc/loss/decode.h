#pragma once

#include "head_table.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace gradscale {

// Softmax, expectation and inverse transform over the last dimension of [..., num_bins] logits, with its gradient
// function. `python_support` is the dataclass, for second derivatives.
at::Tensor decode(
    const std::shared_ptr<OwnedSupport>& support, const py::object& python_support, const at::Tensor& logits);

// The Python function that gives the gradient as a differentiable graph: (logits, support, grad_output) -> gradient.
void set_differentiable_decode(py::function function);

} // namespace gradscale
