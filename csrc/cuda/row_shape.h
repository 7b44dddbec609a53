// How many threads of a GPU share a row, for kernels and for the host code that starts them.
#pragma once

#include "../formulas/port.h"

namespace gradscale {

// The threads of a block where a warp or a thread has rows: few, so that multiprocessors are full although rows take
// many registers.
constexpr int kRowThreads = kThreads < 128 ? kThreads : 128;

// The distance in bytes between rows of a tile in shared memory: an odd number of what a lane accesses at once, so that
// lanes find their rows in different banks.
constexpr int32_t tile_pitch(int32_t width, int32_t element_bytes) {
  const int32_t bytes = width * element_bytes;
  return bytes % 32 == 0 ? bytes + 16 : bytes;
}

// The largest number of windows of a row, wherever it begins.
GRADSCALE_HOST_DEVICE int64_t windows_at_most(int64_t width, int64_t element_bytes) {
  return width * element_bytes / 16 + 2;
}

// The number of threads for a row of `width` elements of `element_bytes` bytes: one for each window, up to a warp; a
// block for rows of which each lane of a warp would have more than 8 windows.
GRADSCALE_HOST_DEVICE int32_t threads_for_row(int64_t width, int64_t element_bytes, int32_t block = kThreads) {
  const int64_t windows = windows_at_most(width, element_bytes);
  if (width == 1) {
    return 1;
  }
  if (windows > 32 * 8) {
    return block;
  }
  int32_t threads = 2;
  while (threads < 32 && threads < windows) {
    threads *= 2;
  }
  return threads;
}

constexpr int kWindowsOfThread = 8; // that it keeps unconverted in registers: 128 bytes

// The number of threads that keep a row of `windows` windows unconverted in registers: as few as possible, except for
// the shortest rows, which neighbours read together; 0 if a warp has too few registers for the row.
inline int32_t threads_that_keep(int64_t windows) {
  if (windows > 32 * kWindowsOfThread) {
    return 0;
  }
  int32_t threads = 2;
  while (windows > threads * (threads < 4 ? 2 : kWindowsOfThread)) {
    threads *= 2;
  }
  return threads;
}

GRADSCALE_HOST_DEVICE int64_t blocks_for_rows(int64_t rows, int32_t threads_per_row, int32_t block = kThreads) {
  const int64_t rows_of_block = block / threads_per_row;
  return (rows + rows_of_block - 1) / rows_of_block;
}

// The rows of each warp where all warps that `multiprocessors` hold at once share `rows`: 24 warps per multiprocessor.
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
