#pragma once

#include "owned_support.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace gradscale {

// Takes softmax, expectation and inverse transform over the last dimension of [..., num_bins] logits, with a gradient
// function. `python_support` is the dataclass, for second derivatives.
at::Tensor decode(
    const std::shared_ptr<OwnedSupport>& support, const py::object& python_support, const at::Tensor& logits);

// The Python function that gives the gradient in plain PyTorch: (logits, support, grad_output, create_graph) ->
// gradient.
void set_decode_gradient(py::function function);

// Turns scalars [...] into distributions [..., num_bins] in their dtype, without a gradient: two-hot where sigma_ratio
// is 0, and otherwise histograms of a normal.
at::Tensor encode(const Support& support, double sigma_ratio, const at::Tensor& scalars);

// Spreads the mass of [..., num_bins] probabilities at rewards + discounts * raw centres over the bins next to them,
// without a gradient: float64 if one of the tensors is, else float32.
at::Tensor project(
    const Support& support, const at::Tensor& probabilities, const at::Tensor& rewards, const at::Tensor& discounts);

} // namespace gradscale
