// CPU kernels are compiled once for each instruction set. The best one that the machine supports is selected when the
// library is loaded, so that a build runs on every machine of the same architecture.
//
// A kernel is declared in a header, and defined in a .cpp file that includes itself:
//
//   using Function = void (*)(...);
//   extern const Function name_kernel;
//
//   #ifndef GRADSCALE_VARIANT
//   #define GRADSCALE_KERNELS "../folder/kernels.cpp"
//   #include "each_instruction_set.h"
//   const Function name_kernel = GRADSCALE_CPU_KERNEL(name);
//   #else // the code, in the namespace that GRADSCALE_VARIANT names
//   #endif
#pragma once

#include "../formulas/port.h"

namespace gradscale {

// The bytes of the widest vectors that this machine supports and ATEN_CPU_CAPABILITY allows: 16, 32 or 64.
int32_t vector_bytes();

template <class Function>
Function best_variant(Function baseline, Function avx2, Function avx512) {
  const int32_t bytes = vector_bytes();
  return bytes == 64 ? avx512 : (bytes == 32 ? avx2 : baseline);
}

} // namespace gradscale

#if GRADSCALE_X86_VARIANTS
#define GRADSCALE_CPU_KERNEL(name) best_variant(baseline::name, avx2::name, avx512::name)
#else
#define GRADSCALE_CPU_KERNEL(name) baseline::name
#endif
