// The row of each kind of head, for CPU and GPU: the one place that distinguishes the kinds.
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
template <Kind kind, class A, class Categorical, class Policy, class Vector, class Scalar>
GRADSCALE_HOST_DEVICE void rows_of_kind(
    const Head& head, Categorical categorical, Policy policy, Vector vector, Scalar scalar) {
  if constexpr (kind == Kind::two_hot) {
    categorical([&](double target) { return two_hot(target, head.support); });
  } else if constexpr (kind == Kind::hl_gauss) {
    categorical([&](double target) { return hl_gauss(target, head.support, head.sigma_ratio); });
  } else if constexpr (kind == Kind::soft_cross_entropy) {
    policy();
  } else if constexpr (kind == Kind::mean_squared_error) {
    vector(RowOf<MeanSquaredError<A>>());
  } else if constexpr (kind == Kind::huber) {
    vector(RowOf<Huber<A>>());
  } else if constexpr (kind == Kind::negative_cosine) {
    vector(RowOf<NegativeCosine<A>>());
  } else if constexpr (kind == Kind::binary_cross_entropy) {
    scalar(RowOf<BinaryCrossEntropy<A>>());
  } else {
    static_assert(kind == Kind::per_step_loss, "a kind of head has no row here");
    scalar(RowOf<PerStepLoss<A>>());
  }
}

// The same where the kind is known when it runs.
template <class A, class Categorical, class Policy, class Vector, class Scalar>
void dispatch_kind(const Head& head, Categorical categorical, Policy policy, Vector vector, Scalar scalar) {
  switch (head.kind) {
#define GRADSCALE_CASE(name, ...) \
  case Kind::name:                \
    return rows_of_kind<Kind::name, A>(head, categorical, policy, vector, scalar);
    GRADSCALE_KINDS(GRADSCALE_CASE)
#undef GRADSCALE_CASE
  }
}

} // namespace gradscale
