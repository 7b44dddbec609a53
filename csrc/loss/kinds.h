// The row of each kind of head, for CPU and GPU: the one switch over the kinds.
#pragma once

#include "regression_heads.h"

namespace gradscale {

template <class RowHead>
struct RowOf {
  using Head = RowHead;
};

// Calls one of four functions: categorical(encode), where encode(scalar) gives the target over the bins; policy();
// vector(RowOf<head>()), for rows of numbers of any width; or scalar(RowOf<head>()), for rows of one number. A is the
// type of sums.
template <class A, class Categorical, class Policy, class Vector, class Scalar>
GRADSCALE_HOST_DEVICE void dispatch_kind(
    const Head& head, Categorical categorical, Policy policy, Vector vector, Scalar scalar) {
  switch (head.kind) {
    case Kind::two_hot:
      return categorical([&](double target) { return two_hot(target, head.support); });
    case Kind::hl_gauss:
      return categorical([&](double target) { return hl_gauss(target, head.support, head.sigma_ratio); });
    case Kind::soft_cross_entropy:
      return policy();
    case Kind::mean_squared_error:
      return vector(RowOf<MeanSquaredError<A>>());
    case Kind::negative_cosine:
      return vector(RowOf<NegativeCosine<A>>());
    case Kind::binary_cross_entropy:
      return scalar(RowOf<BinaryCrossEntropy<A>>());
    case Kind::per_step_loss:
      return scalar(RowOf<PerStepLoss<A>>());
  }
}

} // namespace gradscale
