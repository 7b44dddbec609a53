// The heads whose gradient follows from a score of the row (formulas/policy.h), for CPU and GPU: PolicyGradient,
// GaussianPolicyGradient and ClippedSquaredError.
#pragma once

#include "../formulas/policy.h"
#include "kernels.h"

namespace gradscale {

// Logits of one or several choices, or the log-probability of an action.
template <class A>
struct PolicyGradient {};

// Means and logarithms of standard deviations.
template <class A>
struct GaussianPolicyGradient {};

// A value.
template <class A>
struct ClippedSquaredError {};

// The range of a choice in a row of logits.
struct Choice {
  int32_t begin, end;
};

GRADSCALE_HOST_DEVICE int32_t num_choices(const Head& head) {
  return head.num_choices == 0 ? 1 : head.num_choices;
}

GRADSCALE_HOST_DEVICE Choice choice_of(const Head& head, const int32_t* ends, int32_t index, int64_t width) {
  if (head.num_choices == 0) {
    return {0, static_cast<int32_t>(width)};
  }
  return {index == 0 ? 0 : ends[index - 1], ends[index]};
}

} // namespace gradscale
