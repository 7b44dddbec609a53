#pragma once

#include "heads.h"

#include <ATen/core/Tensor.h>

namespace gradscale {

// Turns scalars [...] into distributions [..., num_bins] in their dtype, without a gradient: two-hot where sigma_ratio
// is 0, and otherwise histograms of a normal.
at::Tensor encode(const Support& support, double sigma_ratio, const at::Tensor& scalars);

} // namespace gradscale
