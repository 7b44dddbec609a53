#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradscale {

// [3] float64 from the values and counts of statistics: the norm of all tensors together, what becomes of them, and
// whether that changes them.
at::Tensor clipping_of(
    const at::Tensor& values, const at::Tensor& counts, double p, double max_norm, bool skip_nonfinite);

// Multiplies tensors of one device by the second number of `clipping`, in place. A factor of 0 leaves zeros where
// `skip_nonfinite`, whatever the elements were.
void clip_tensors(const std::vector<at::Tensor>& tensors, const at::Tensor& clipping, bool skip_nonfinite);

} // namespace gradscale
