// Maps each kind of head to the function that computes its rows, for CPU and GPU.
#pragma once

#include "own_heads.h"
#include "regression_heads.h"

namespace gradscale {

// Calls one of these functions: categorical(encode), where encode(scalar) returns the target over the bins; policy();
// vector(head), for rows of any number of elements; scalar(head), for rows of one element; or own(head), for a head
// with a row function of its own. A is the type of sums.
template <Kind kind, class A, class Categorical, class Policy, class Vector, class Scalar, class Own>
GRADSCALE_HOST_DEVICE void kind_rows(
    const Head& head,
    const Segment& segment,
    Categorical categorical,
    Policy policy,
    Vector vector,
    Scalar scalar,
    Own own) {
  [[maybe_unused]] const MeanOverElements<A> row{static_cast<double>(segment.width), &head};
  if constexpr (kind == Kind::two_hot) {
    categorical([&](double target) { return two_hot(target, head.support); });
  } else if constexpr (kind == Kind::hl_gauss) {
    categorical([&](double target) { return hl_gauss(target, head.support, head.sigma_ratio); });
  } else if constexpr (kind == Kind::soft_cross_entropy) {
    policy();
  } else if constexpr (kind == Kind::mean_squared_error) {
    vector(MeanSquaredError<A>{row});
  } else if constexpr (kind == Kind::huber) {
    vector(Huber<A>{row});
  } else if constexpr (kind == Kind::negative_cosine) {
    vector(NegativeCosine<A>{row});
  } else if constexpr (kind == Kind::binary_cross_entropy) {
    scalar(BinaryCrossEntropy<A>{row});
  } else if constexpr (kind == Kind::quantile_huber) {
    own(QuantileHuber<A>(head, segment));
  } else if constexpr (kind == Kind::categorical_kl) {
    own(CategoricalKL<A>(head, segment));
  } else {
    static_assert(kind == Kind::per_step_loss, "add the new kind of head to kind_rows");
    scalar(PerStepLoss<A>{row});
  }
}

// The same for a kind that is known only at run time, on the CPU.
template <class A, class Categorical, class Policy, class Vector, class Scalar, class Own>
void dispatch_kind(
    const Segment& segment, Categorical categorical, Policy policy, Vector vector, Scalar scalar, Own own) {
  switch (segment.head->kind) {
#define GRADSCALE_CASE(name, ...) \
  case Kind::name:                \
    return kind_rows<Kind::name, A>(*segment.head, segment, categorical, policy, vector, scalar, own);
    GRADSCALE_KINDS(GRADSCALE_CASE)
#undef GRADSCALE_CASE
  }
}

} // namespace gradscale
