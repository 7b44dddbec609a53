// The macros and functions that kernels (.cuh files) use in addition to formulas. In a kernel
//
// - the only argument is a plain struct with raw pointers, declared with GRADSCALE_ARGUMENT (see OnDevice::launch());
// - shared memory is declared with GRADSCALE_SHARED;
// - the threads of a warp exchange data with _sync collectives of the whole warp, or through shared memory and
//   __syncwarp(); every thread reaches every barrier.
#pragma once

#include "../formulas/port.h"
#include "threads.h"

#define GRADSCALE_DEVICE __device__ __forceinline__
// Registers are limited so that `blocks` blocks fit on a multiprocessor.
#define GRADSCALE_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define GRADSCALE_ARGUMENT(T) const __grid_constant__ T
#define GRADSCALE_SHARED(T, name, count) __shared__ T name[count]

namespace gradscale {

// The lanes that take part in a collective of a whole warp.
constexpr unsigned kWholeWarp = 0xffffffffu;

// Returns a pointer to which the compiler adds constants, instead of computing an address for each access. The compiler
// no longer knows what memory it points to. load_vector and store_vector state that it is global. Kernel arguments are
// then read by ordinary loads, not from the constant cache, which serves one address of a warp at a time.
template <class T>
GRADSCALE_DEVICE T* kept(T* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

template <class Vector>
GRADSCALE_DEVICE Vector load16(const void* from) {
  static_assert(sizeof(Vector) == 16);
  return *static_cast<const Vector*>(from);
}

// Reads 16 bytes that no thread of the launch writes.
template <class Vector>
GRADSCALE_DEVICE Vector read16(const void* from) {
  static_assert(sizeof(Vector) == 16);
  uint4 words;
  asm("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(__cvta_generic_to_global(from)));
  return bit_cast<Vector>(words);
}

// Adds 1 to a counter in device memory, and returns its previous value. The thread, and after a barrier its block, then
// sees everything that other blocks stored before a barrier that preceded their calls.
GRADSCALE_DEVICE unsigned count_in_order(unsigned* counter) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
}

// Written in PTX, because from C++ the compiler makes a store for each element.
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
