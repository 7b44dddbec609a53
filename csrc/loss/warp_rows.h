// What WarpRows are for: known to kernels and to those who start them.
#pragma once

#include "../port/port.h"

namespace gradscale {

// Widths of rows that a warp keeps in its registers, 8 windows of four elements a lane. Shorter rows leave lanes idle.
constexpr int32_t kFewestOfWarp = 33;
constexpr int32_t kMostOfWarp = 1021;

// HLGauss with a sigma_ratio between these: lanes have a bin of the target each, in sums that are precise in float.
constexpr double kSmallestSigmaOfWarp = 0.1;
constexpr double kLargestSigmaOfWarp = 2;

// What rows need beside their kind, as bits.
enum WarpOptions : int32_t {
  kSmoothing = 1,  // label_smoothing
  kOtherBegin = 2, // gradients begin at other places in their windows than logits
  kFewBins = 4,    // HLGauss: a target has so few bins with mass that half of a warp has one each
};

// The bins with mass of an HLGauss target, on each side of the one next to the target: erf is 1 from 5.93 on, in
// double.
GRADSCALE_HOST_DEVICE int32_t bins_beside_target(double sigma_ratio) {
  return static_cast<int32_t>(6 * 1.41421356237309504880 * sigma_ratio) + 1;
}
constexpr int32_t kFewBinsBeside = 7;

// Warps that a multiprocessor holds at once.
constexpr int64_t kWarpsAtOnce = 24;

// The number of rows that a warp walks over. One where a multiprocessor has few; two where it has more, since preparing
// a walk takes as many instructions as three rows; up to 32 where there are rows enough for all warps that it holds.
inline int32_t rows_of_warp(int64_t rows, int64_t multiprocessors) {
  const int64_t warps = multiprocessors * kWarpsAtOnce;
  const int64_t each = warps == 0 ? rows : (rows + warps - 1) / warps;
  const int64_t least = rows > warps / 2 ? 2 : 1;
  return static_cast<int32_t>(each < least ? least : (each > 32 ? 32 : each));
}

} // namespace gradscale
