#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace gradscale {

struct TensorStatistics {
  at::Tensor values;    // [3, N] float64: norm, largest magnitude, mean
  at::Tensor counts;    // [5, N] int64: elements, zeros, NaN, inf, whether there is no tensor
  at::Tensor histogram; // [N, bins] int64
};

// Computes the statistics of tensors of one device, without waiting for it. A sparse tensor counts as dense, and a
// complex one as its moduli.
TensorStatistics tensor_statistics(const std::vector<std::optional<at::Tensor>>& tensors, double p);

} // namespace gradscale
