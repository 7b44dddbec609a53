// The operators on many tensors.
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

struct UnitStatistics {
  TensorStatistics statistics;
  at::Tensor norms; // [2, U] float64: of the units of all gradients, and of their weights
};

// Computes the statistics of gradients of one device, and the norms of the units of gradients and of weights. A unit is
// a row or a whole tensor. A gradient without weights has no units; other gradients are strided, with the shapes of
// their weights.
UnitStatistics unit_statistics(
    const std::vector<std::optional<at::Tensor>>& gradients,
    const std::vector<std::optional<at::Tensor>>& weights,
    bool rows);

// Computes from the values and counts of statistics three numbers in float64: the norm of all tensors together, the
// factor that they are multiplied by, and whether that changes them.
at::Tensor clipping_of(
    const at::Tensor& values, const at::Tensor& counts, double p, double max_norm, bool skip_nonfinite);

// Multiplies tensors of one device by the second number of `clipping`, in place. A factor of 0 leaves zeros where
// `skip_nonfinite`, whatever the elements were.
void clip_tensors(const std::vector<at::Tensor>& tensors, const at::Tensor& clipping, bool skip_nonfinite);

struct UnitFactors {
  at::Tensor factors;  // [U] float64
  at::Tensor clipping; // [3] float64: the norm of all tensors together, the smallest factor, whether any changes a unit
};

// Computes the factors of units on a CPU from their norms, and from the result of clipping_of() without a limit, whose
// factor is 0 where all gradients are to become 0. With `skip_nonfinite`, a limit that is NaN makes them 0 too.
UnitFactors unit_factors(
    const at::Tensor& norms, const at::Tensor& clipping, double adaptive, double eps, bool skip_nonfinite);

// Multiplies each unit of tensors of one device by its factor, in place. A factor of 1 leaves a unit as it is; a factor
// of 0 leaves zeros where `skip_nonfinite`, whatever the elements were.
void clip_units(const std::vector<at::Tensor>& tensors, const at::Tensor& factors, bool rows, bool skip_nonfinite);

// Computes weight * sum over tensors of |p|^2 / 2 in one pass; the gradient of p is weight * p.
at::Tensor l2_loss(std::vector<at::Tensor> parameters, double weight);

// Computes [2, N] in float64: the norms of tensors of the CPU, and of what has been added to them since. Undefined
// where two of a pair differ in form, or sums of squares in double may overflow.
at::Tensor update_norms(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after);

} // namespace gradscale
