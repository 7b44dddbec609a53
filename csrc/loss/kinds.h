// Maps each kind of head to the function that computes its rows, for CPU and GPU.
#pragma once

#include "../formulas/targets.h"
#include "own_heads.h"
#include "policy_heads.h"
#include "regression_heads.h"

namespace gradscale {

template <class RowHead>
struct RowOf {
  using Head = RowHead;
};

// Calls one of these functions: categorical(encode), where encode(scalar) returns the target over the bins; policy();
// vector(RowOf<head>()), for rows of any number of elements; scalar(RowOf<head>()), for rows of one element,
// whose targets have no transform; own(RowOf<head>()), for a head with a row function of its own; or
// scored(RowOf<head>()), for the heads of policy_heads.h. A is the type of sums.
template <Kind kind, class A, class Categorical, class Policy, class Vector, class Scalar, class Own, class Scored>
GRADSCALE_HOST_DEVICE void kind_rows(
    const Head& head, Categorical categorical, Policy policy, Vector vector, Scalar scalar, Own own, Scored scored) {
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
  } else if constexpr (kind == Kind::quantile_huber) {
    own(RowOf<QuantileHuber<A>>());
  } else if constexpr (kind == Kind::categorical_kl) {
    own(RowOf<CategoricalKL<A>>());
  } else if constexpr (kind == Kind::policy_gradient) {
    scored(RowOf<PolicyGradient<A>>());
  } else if constexpr (kind == Kind::gaussian_policy_gradient) {
    scored(RowOf<GaussianPolicyGradient<A>>());
  } else if constexpr (kind == Kind::clipped_squared_error) {
    scored(RowOf<ClippedSquaredError<A>>());
  } else {
    static_assert(kind == Kind::per_step_loss, "add the new kind of head to kind_rows");
    scalar(RowOf<PerStepLoss<A>>());
  }
}

// The same for a kind that is known only at run time.
template <class A, class Categorical, class Policy, class Vector, class Scalar, class Own, class Scored>
void dispatch_kind(
    const Head& head, Categorical categorical, Policy policy, Vector vector, Scalar scalar, Own own, Scored scored) {
  switch (head.kind) {
#define GRADSCALE_CASE(name, ...) \
  case Kind::name:                \
    return kind_rows<Kind::name, A>(head, categorical, policy, vector, scalar, own, scored);
    GRADSCALE_KINDS(GRADSCALE_CASE)
#undef GRADSCALE_CASE
  }
}

} // namespace gradscale
