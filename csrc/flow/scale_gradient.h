#pragma once

#include <ATen/core/Tensor.h>

namespace gradscale {

// Identity forward without a copy; the gradient (and, in forward mode, the tangent) is multiplied by `scale`, a number
// or a tensor that broadcasts to x. A scale of 0 gives exact zeros, also where the gradient is inf or NaN.
at::Tensor scale_gradient(const at::Tensor& x, double scale);
at::Tensor scale_gradient(const at::Tensor& x, const at::Tensor& scale);

} // namespace gradscale
