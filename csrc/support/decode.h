#pragma once

#include "owned_support.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace gradscale {

// Decodes [..., num_bins] logits: softmax, expectation and inverse transform. Differentiable. `python_support` is the
// Python dataclass, which second derivatives use.
at::Tensor decode(
    const std::shared_ptr<OwnedSupport>& support, const py::object& python_support, const at::Tensor& logits);

// Encodes scalars [...] as distributions [..., num_bins] of the same dtype: two-hot if sigma_ratio is 0, HL-Gauss
// otherwise. Not differentiable.
at::Tensor encode(const Support& support, double sigma_ratio, const at::Tensor& scalars);

// Moves the mass of [..., num_bins] probabilities to rewards + discounts * raw centres, and splits it between the two
// neighbouring bins (C51). The result is float64 if an input is, else float32. Not differentiable.
at::Tensor project(
    const Support& support, const at::Tensor& probabilities, const at::Tensor& rewards, const at::Tensor& discounts);

} // namespace gradscale
