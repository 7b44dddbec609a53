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

// Of tensors of one device, without waiting for it: dense, sparse (what is not stored is zeros), or complex (of which
// the moduli are meant).
TensorStatistics tensor_statistics(const std::vector<std::optional<at::Tensor>>& tensors, double p);

} // namespace gradscale
