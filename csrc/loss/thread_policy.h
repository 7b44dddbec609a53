// What rows of policies are computed for: known to kernels and to those who start them.
#pragma once

#include "../port/port.h"

namespace gradscale {

// What SoftCrossEntropy takes beside logits and targets, as bits.
enum ThreadPolicyOptions : int32_t {
  kSmoothsPolicy = 1,    // label_smoothing
  kWithEntropy = 2,      // entropy_weight
  kSubtractsEntropy = 4, // subtract_target_entropy
};

} // namespace gradscale
