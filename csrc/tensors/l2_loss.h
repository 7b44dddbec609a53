#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradscale {

// Computes weight * sum over tensors of |p|^2 / 2 in one pass; the gradient of p is weight * p.
at::Tensor l2_loss(std::vector<at::Tensor> parameters, double weight);

} // namespace gradscale
