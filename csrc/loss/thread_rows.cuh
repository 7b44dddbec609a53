// What all short rows of loss_rows share, where a thread has a row.
//
// Logits and targets are read once, gradients written once, all in windows of 16 bytes where rows are contiguous; a
// block has 32 rows a warp.
#pragma once

#include "../math/losses.h"
#include "../math/thread_row.cuh"
#include "block_of_rows.cuh"

namespace gradscale {

// A kind of rows that Computation computes, a warp's in kSharedBytes of shared memory.
template <class Computation>
struct RowsByThreads {
  static constexpr int kBlocks = Computation::kBlocks;
  static constexpr bool kHasHalves = Computation::kHasHalves;
  static constexpr int kSharedBytes = kRowThreads / 32 * Computation::kSharedBytes;

  GRADSCALE_DEVICE static int32_t rows_of_block(const BlockOfRows& /*block*/) {
    return kRowThreads;
  }

  GRADSCALE_DEVICE static void run(const BlockOfRows& block) {
    const WarpOfRows rows = WarpOfRows::in_block(block.index, block.arguments.batch);
    if (rows.count > 0) {
      const int warp = static_cast<int>(threadIdx.x) / 32;
      Computation(block, rows, block.shared + warp * Computation::kSharedBytes).compute();
    }
  }
};

} // namespace gradscale
