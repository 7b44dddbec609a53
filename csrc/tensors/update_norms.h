#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradscale {

// [2, N] float64: the norms of tensors of the CPU, and of what has been added to them since; undefined where two of a
// pair differ in form, or in ways that sums of squares in double do not take.
at::Tensor update_norms(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after);

} // namespace gradscale
