// Properties of rows that kernels are compiled for. Known to kernels and to the host code that launches them.
#pragma once

#include "../port/port.h"

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

// The rows of each warp where all warps that `multiprocessors` hold at once share `rows`: 24 warps a multiprocessor.
// Two or more where there are many, because what a warp computes once takes as many instructions as three rows.
inline int32_t rows_of_warp(int64_t rows, int64_t multiprocessors) {
  const int64_t warps = multiprocessors * 24;
  const int64_t each = warps == 0 ? rows : (rows + warps - 1) / warps;
  const int64_t least = rows > warps / 2 ? 2 : 1;
  return static_cast<int32_t>(each < least ? least : (each > 32 ? 32 : each));
}

// The same as a multiple of the rows that a warp computes side by side.
GRADSCALE_HOST_DEVICE int32_t rows_per_warp(int32_t rows_of_warp, int32_t lanes_per_row) {
  const int32_t side_by_side = 32 / lanes_per_row;
  return (rows_of_warp + side_by_side - 1) / side_by_side * side_by_side;
}

} // namespace gradscale
