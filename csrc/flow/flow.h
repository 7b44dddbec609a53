// The gradient-flow operators: identity forward without a copy, changed gradient backward. Each is in the file of
// its name; reverse_gradient is in the file of scale_gradient.
#pragma once

#include "group_norm.h"
#include "value.h"

namespace gradscale {

// The gradient, and in forward mode the tangent, times `scale`, which broadcasts to x. A scale of 0 gives exact zeros,
// also where the gradient is inf or NaN.
at::Tensor scale_gradient(const at::Tensor& x, const Value& scale);

// The gradient is multiplied by -scale.
at::Tensor reverse_gradient(const at::Tensor& x, const Value& scale);

// g * min(1, max_norm / |g|), one norm per group. `counts`, where defined, is int64 [2]: norms seen, and norms clipped.
at::Tensor clip_gradient_norm(
    const at::Tensor& x, const Value& max_norm, const NormGroups& groups, const at::Tensor& counts);

// g * norm / |g|, one norm per group.
at::Tensor normalize_gradient(const at::Tensor& x, const Value& norm, const NormGroups& groups);

// clamp(g, min, max), where the bounds broadcast to x.
at::Tensor clip_gradient_value(const at::Tensor& x, const Value& min, const Value& max);

} // namespace gradscale
