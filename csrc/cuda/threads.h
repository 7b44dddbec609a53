// The threads of a block, for kernels and for the host code that launches them.
#pragma once

namespace gradscale {

// Threads per block in most kernels, threads per warp, and warps per block.
constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;

} // namespace gradscale
