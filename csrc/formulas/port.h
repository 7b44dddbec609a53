// The macros with which one formula compiles for the GPU and for the CPU.
#pragma once

#if defined(__CUDACC_RTC__)
#include "rtc.h"
#else
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#endif

#if defined(__CUDACC__)
#define GRADSCALE_HOST_DEVICE __host__ __device__ __forceinline__
#define GRADSCALE_DISPATCH GRADSCALE_HOST_DEVICE
#elif defined(__GNUC__)
#define GRADSCALE_HOST_DEVICE inline __attribute__((always_inline))
#else
#define GRADSCALE_HOST_DEVICE inline
#endif

#ifndef GRADSCALE_DISPATCH // on a CPU the code for each type may be large: inlining is the compiler's choice
#define GRADSCALE_DISPATCH
#endif

// Variants for newer x86-64 instruction sets are compiled in addition to the baseline, and chosen when the program
// runs.
#if defined(__x86_64__) && defined(__GNUC__)
#define GRADSCALE_X86_VARIANTS 1
#else
#define GRADSCALE_X86_VARIANTS 0
#endif

namespace gradscale {

// The number of lanes of the CPU kernels' vectors: 64 bytes of float.
constexpr int64_t kLanes = 16;

// The threads of a block of most kernels.
constexpr int kThreads = 256;

template <class To, class From>
GRADSCALE_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

} // namespace gradscale
