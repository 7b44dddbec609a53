// What rows of a thread each are for: known to kernels and to those who start them.
#pragma once

#include "../port/port.h"

namespace gradscale {

// The widest rows that a thread has: all of a warp's lie in shared memory, beside their targets and gradients.
constexpr int32_t kMostOfThread = 64;

// The shared memory for the warps of a block.
constexpr int32_t kSharedBytesOfThreads = 48 * 1024;

// The distance between rows in shared memory: an odd number of what a lane reads or writes at once, which is the
// largest power of two of bytes that divides a row, up to 16, so that lanes find their rows in different banks.
constexpr int32_t pitch_of_thread(int32_t width, int32_t element_bytes) {
  const int32_t bytes = width * element_bytes;
  return bytes % 32 == 0 ? bytes + 16 : bytes;
}

} // namespace gradscale
