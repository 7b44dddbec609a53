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
//
// This header includes GRADSCALE_KERNELS once for each instruction set. GRADSCALE_VARIANT is the name of the namespace,
// and GRADSCALE_VECTOR_BYTES the size of the vectors: 16 for the baseline, 32 for AVX2, 64 for AVX-512. The baseline
// comes first, so that the headers that the file includes are compiled for the baseline: the linker may share functions
// of these headers between object files, and they must run on every CPU.
#include <cstdint>

// On x86-64, variants for newer instruction sets are compiled in addition to the baseline, unless -D says otherwise.
#if !defined(GRADSCALE_X86_VARIANTS) && defined(__x86_64__)
#define GRADSCALE_X86_VARIANTS 1
#elif !defined(GRADSCALE_X86_VARIANTS)
#define GRADSCALE_X86_VARIANTS 0
#endif

#if GRADSCALE_X86_VARIANTS
#include <immintrin.h>
#endif

namespace gradscale {

// The bytes of the widest vectors that this machine supports and ATEN_CPU_CAPABILITY allows: 16, 32 or 64. Defined in
// module.cpp, because ATen's header of this name must not be compiled for newer instruction sets.
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

#if GRADSCALE_X86_VARIANTS && !defined(__clang__)
#pragma GCC push_options
#endif
#define GRADSCALE_VARIANT baseline
#define GRADSCALE_VECTOR_BYTES 16
#include GRADSCALE_KERNELS
#undef GRADSCALE_VARIANT
#undef GRADSCALE_VECTOR_BYTES
#if GRADSCALE_X86_VARIANTS && !defined(__clang__)
#pragma GCC pop_options
#endif

#if GRADSCALE_X86_VARIANTS

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define GRADSCALE_VARIANT avx2
#define GRADSCALE_VECTOR_BYTES 32
#include GRADSCALE_KERNELS
#undef GRADSCALE_VARIANT
#undef GRADSCALE_VECTOR_BYTES
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
// GCC's own header leaves the unused operand of an intrinsic undefined, which causes a warning.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define GRADSCALE_VARIANT avx512
#define GRADSCALE_VECTOR_BYTES 64
#include GRADSCALE_KERNELS
#undef GRADSCALE_VARIANT
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
