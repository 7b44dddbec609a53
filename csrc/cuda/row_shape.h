// How many GPU threads share a row, for kernels and for the host code that launches them.
#pragma once

#include "../formulas/element.h"
#include "threads.h"

namespace gradscale {

// Threads per block in kernels whose warps or threads own rows. The blocks are small so that they fill a multiprocessor
// although each thread needs many registers.
constexpr int kRowThreads = kThreads < 128 ? kThreads : 128;

// The distance in bytes between rows of a tile in shared memory. Rows whose size is a multiple of 32 bytes are padded,
// to reduce bank conflicts between lanes that each read their own row.
constexpr int32_t tile_pitch(int32_t width, int32_t element_bytes) {
  const int32_t bytes = width * element_bytes;
  return bytes % 32 == 0 ? bytes + 16 : bytes;
}

// The number of threads per row of `width` elements: one per vector, up to a warp, or a whole block if each lane of a
// warp would have more than 8 vectors.
GRADSCALE_HOST_DEVICE int32_t threads_for_row(int64_t width, int64_t element_bytes, int32_t block = kThreads) {
  const int64_t vectors = width * element_bytes / 16 + 2; // the most aligned vectors of 16 bytes that it can overlap
  if (width == 1) {
    return 1;
  }
  if (vectors > 32 * 8) {
    return block;
  }
  int32_t threads = 2;
  while (threads < 32 && threads < vectors) {
    threads *= 2;
  }
  return threads;
}

// The same where the work of a row that its threads repeat, such as the score of a policy, is larger than the work of
// its elements: at least two parts of 16 bytes for a thread, also if their loads coalesce less.
GRADSCALE_HOST_DEVICE int32_t threads_for_short_row(int64_t width, int64_t element_bytes, int32_t block) {
  const int64_t parts = (width * element_bytes + 15) / 16;
  if (parts > 32 * 8) {
    return block;
  }
  int32_t threads = 1;
  while (threads < 32 && 4 * threads <= parts) {
    threads *= 2;
  }
  return threads;
}

constexpr int kVectorsPerThread = 8; // kept unconverted in registers: 128 bytes

// The number of threads per row if they keep all of its vectors unconverted in registers; 0 if a warp has too few
// registers. As few threads as possible, but at least 4 for more than 4 vectors, so that loads coalesce.
inline int32_t threads_for_row_in_registers(int64_t vectors) {
  if (vectors > 32 * kVectorsPerThread) {
    return 0;
  }
  int32_t threads = 2;
  while (vectors > threads * (threads < 4 ? 2 : kVectorsPerThread)) {
    threads *= 2;
  }
  return threads;
}

GRADSCALE_HOST_DEVICE int64_t blocks_for_rows(int64_t rows, int32_t threads_per_row, int32_t block = kThreads) {
  const int64_t rows_per_block = block / threads_per_row;
  return (rows + rows_per_block - 1) / rows_per_block;
}

// Warps per multiprocessor among which rows are divided. tests/gpu/run.py says how to measure other numbers.
#ifndef GRADSCALE_WARPS
#define GRADSCALE_WARPS 24
#endif

// The number of rows per warp, 1 to 32, that divides `rows` among all resident warps. At least 2 if there are many
// rows, because the setup of a warp takes as many instructions as three rows.
inline int32_t balanced_rows_per_warp(int64_t rows, int64_t multiprocessors) {
  const int64_t warps = multiprocessors * GRADSCALE_WARPS;
  const int64_t each = warps == 0 ? rows : (rows + warps - 1) / warps;
  const int64_t least = rows > warps / 2 ? 2 : 1;
  return static_cast<int32_t>(each < least ? least : (each > 32 ? 32 : each));
}

// `rows_per_warp`, rounded up to a multiple of the rows that a warp computes at the same time.
GRADSCALE_HOST_DEVICE int32_t rounded_rows_per_warp(int32_t rows_per_warp, int32_t lanes_per_row) {
  const int32_t rows_at_a_time = 32 / lanes_per_row;
  return (rows_per_warp + rows_at_a_time - 1) / rows_at_a_time * rows_at_a_time;
}

// ---- Rows that lanes or a block own --------------------------------------------------------------------------------

struct RowLanes {
  int32_t per_row;     // 0: a group of threads owns the row (thread_group.cuh); kRowThreads: a block (WideRows)
  int32_t vector_size; // elements that a lane owns next to each other; depends only on the width and the types
  bool at_once;        // vectors are aligned, and a lane accesses one at once; otherwise element by element
};

// The lanes for rows of logits over bins or actions. Gradients and targets have the shape of the logits, or no data.
RowLanes bin_lanes(int64_t width, const Rows& logits, const Rows& gradient);
RowLanes action_lanes(int64_t width, const Rows& logits, const Rows& gradient, const Rows& target);

// The lanes for rows of groups of `classes` logits, with targets and gradients of the same shape.
RowLanes group_lanes(int64_t groups, int64_t classes, const Rows& logits, const Rows& gradient, const Rows& target);

// The number of lanes that own a group in vectors of `vector_size` classes: as few as have at most kMostClassesOfLane
// each.
constexpr int32_t kMostClassesOfLane = 8;
constexpr int32_t lanes_of_group(int32_t classes, int32_t vector_size) {
  int32_t lanes = 1;
  while (kMostClassesOfLane * lanes < (classes + vector_size - 1) / vector_size * vector_size) {
    lanes *= 2;
  }
  return lanes;
}

// A thread of a block that owns a row keeps at most this number of logits, and of 32-bit words of logits and targets.
constexpr int kMostWideLogits = 160, kMostWideWords = 128;

// True if rows begin at multiples of `count` elements, or have no data.
bool is_aligned(const Rows& rows, int64_t count);

} // namespace gradscale
