// The tools with which one kernel compiles for the GPU and for the CPU simulator of tests/simt: .cuh files include
// these and formulas alone. A kernel takes raw pointers and plain structs. In it
//
// - shared memory is declared with GRADSCALE_SHARED;
// - 16 bytes at a time go through load16 and store16, which the simulator checks for alignment;
// - exchange in a warp is by _sync collectives of whole warps, and by __syncwarp(); every thread reaches every barrier;
// - large arguments are declared with GRADSCALE_ARGUMENT, and kernels are started with launch().
#pragma once

#include "port.h"

#ifndef GRADSCALE_THREADS // ThreadSanitizer knows fewer at a time: tests take 64
#define GRADSCALE_THREADS 256
#endif

namespace gradscale {

constexpr int kThreads = GRADSCALE_THREADS; // of a block

} // namespace gradscale

#if defined(__CUDACC__)

#define GRADSCALE_DEVICE __device__ __forceinline__
#define GRADSCALE_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks) // on a multiprocessor
#define GRADSCALE_ARGUMENT(T) const __grid_constant__ T
#define GRADSCALE_SHARED(T, name, count) __shared__ T name[count]

namespace gradscale {

template <class Vector>
GRADSCALE_DEVICE Vector load16(const void* from) {
  static_assert(sizeof(Vector) == 16);
  return *static_cast<const Vector*>(from);
}

// Written in PTX: from C++ the compiler makes a store for each element, as it finds them elsewhere too.
template <class Vector>
GRADSCALE_DEVICE void store16(void* to, Vector vector) {
  static_assert(sizeof(Vector) == 16);
  const uint4 words = bit_cast<uint4>(vector);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(to)), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

} // namespace gradscale

#if !defined(__CUDACC_RTC__)

#include <stdexcept>
#include <string>

namespace gradscale {

using Stream = cudaStream_t;

// Starts `kernel` for `blocks` blocks of `threads` threads; nothing is waited for.
template <class... Parameters, class... Arguments>
void launch(
    const char* name,
    void (*kernel)(Parameters...),
    int64_t blocks,
    int threads,
    Stream stream,
    const Arguments&... arguments) {
  if (blocks == 0) {
    return;
  }
  if (blocks > 2147483647) {
    throw std::runtime_error(std::string("gradscale_ext: ") + name + " would need more than 2^31 - 1 blocks");
  }
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(
        std::string("gradscale_ext: ") + name + " could not be launched: " + cudaGetErrorString(error) +
        " (`python -m gradscale_ext` says which GPUs it was compiled for)");
  }
}

} // namespace gradscale

#endif

#else

#include "simt.h" // of tests/simt

#define GRADSCALE_DEVICE inline
#define GRADSCALE_KERNEL(threads, blocks) void
#define GRADSCALE_ARGUMENT(T) const T& // threads read the same copy, as they do on a GPU
#define GRADSCALE_SHARED(T, name, count) \
  T(&name)[count] = simt::shared<T[count]>(__FILE__, __LINE__) // filled with NaN, between red zones

namespace gradscale {

using Stream = void*;

template <class Vector>
inline Vector load16(const void* from, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static_assert(sizeof(Vector) == 16);
  simt::check_aligned(from, 16, "load16", file, line);
  return *static_cast<const Vector*>(from);
}

template <class Vector>
inline void store16(void* to, Vector vector, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static_assert(sizeof(Vector) == 16);
  simt::check_aligned(to, 16, "store16", file, line);
  *static_cast<Vector*>(to) = vector;
}

template <class... Parameters, class... Arguments>
void launch(
    const char* name,
    void (*kernel)(Parameters...),
    int64_t blocks,
    int threads,
    Stream /*stream*/,
    const Arguments&... arguments) {
  if (blocks != 0) {
    simt::launch(name, blocks, threads, [&] { kernel(arguments...); });
  }
}

} // namespace gradscale

#endif
