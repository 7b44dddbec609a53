#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradscale {

// Computes from the values and counts of statistics three numbers in float64: the norm of all tensors together, the
// factor that they are multiplied by, and whether that changes them.
at::Tensor clipping_of(
    const at::Tensor& values, const at::Tensor& counts, double p, double max_norm, bool skip_nonfinite);

// Multiplies tensors of one device by the second number of `clipping`, in place. A factor of 0 leaves zeros where
// `skip_nonfinite`, whatever the elements were.
void clip_tensors(const std::vector<at::Tensor>& tensors, const at::Tensor& clipping, bool skip_nonfinite);

} // namespace gradscale
