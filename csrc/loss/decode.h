#pragma once

#include "../math/support.h"

#include <ATen/core/Tensor.h>

namespace gradscale {

// Softmax, expectation and inverse transform over the last dimension of [..., num_bins] logits, without a gradient.
at::Tensor decode(const at::Tensor& logits, const Support& support);

} // namespace gradscale
