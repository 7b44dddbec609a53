// The weighted sum of the multi-step loss, for CPU and GPU. With l_t, the loss of a sample at a step of a head, and
// w_t, the weight of the step, the head adds to the sample's loss L_b
//
//   weight * head_weight * sum_t w_t l_t
//
// and to the loss of the call its share,
//
//   importance_weight * factor * head_weight * sum_t w_t l_t
//
// where `factor` is the head's weight divided by the divisor of the reduction. Masked steps add nothing. A sample
// without unmasked steps adds 0, also if a weight is not finite.
#pragma once

#include "port.h"

namespace gradscale {

// A sample of a head, summed over its unmasked steps.
struct StepSums {
  double losses;
  double weighted;
  double unmasked; // the number of steps

  GRADSCALE_HOST_DEVICE void add(bool is_unmasked, double loss, double weight) {
    losses += is_unmasked ? loss : 0;
    weighted += is_unmasked ? weight * loss : 0;
    unmasked += is_unmasked ? 1 : 0;
  }
  // What the head adds to the loss of the sample.
  GRADSCALE_HOST_DEVICE double loss(double weight, double head_weight) const {
    return unmasked == 0 ? 0 : weight * head_weight * weighted;
  }
  // What the sample adds to the loss of the call, without the head weight.
  GRADSCALE_HOST_DEVICE double share(double importance_weight, double factor) const {
    return unmasked == 0 ? 0 : importance_weight * (factor * weighted);
  }
  // The same with the head weight.
  GRADSCALE_HOST_DEVICE double weighted_share(double share, double head_weight) const {
    return unmasked == 0 ? 0 : head_weight * share;
  }
};

} // namespace gradscale
