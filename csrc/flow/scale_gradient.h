#pragma once

#include <ATen/core/Tensor.h>

namespace gradscale {

// Identity forward without a copy; the gradient (and, in forward mode, the tangent) is multiplied by `scale`.
at::Tensor scale_gradient(const at::Tensor& x, double scale);

} // namespace gradscale
