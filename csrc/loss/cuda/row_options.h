// Properties of rows that kernels are compiled for. Known to kernels and to the host code that launches them.
#pragma once

#include "../../formulas/port.h"

namespace gradscale {

// What a head of logits adds to its cross-entropy, as bits.
enum RowOptions : int32_t {
  kSmoothing = 1,        // label_smoothing
  kEntropy = 2,          // entropy_weight
  kSubtractsEntropy = 4, // subtract_target_entropy
};

// HLGauss targets with a sigma_ratio in this range have few bins with mass, whose sums are accurate in float.
constexpr double kSmallestSigmaOfLanes = 0.1;
constexpr double kLargestSigmaOfLanes = 2;

} // namespace gradscale
