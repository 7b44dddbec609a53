#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradscale {

// Computes [2, N] in float64: the norms of tensors of the CPU, and of what has been added to them since. Undefined
// where two of a pair differ in form, or sums of squares in double may overflow.
at::Tensor update_norms(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after);

} // namespace gradscale
