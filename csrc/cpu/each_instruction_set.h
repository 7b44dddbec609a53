// Includes the file that GRADSCALE_KERNELS names once for each instruction set, with GRADSCALE_VARIANT naming the
// namespace and GRADSCALE_AVX512 saying whether it may use these instructions. The baseline comes first: whatever other
// headers the file includes are compiled for it, so that a function from them that the linker shares between object
// files runs on every CPU.
#include "cpu_kernel.h"

#if GRADSCALE_X86_VARIANTS
#include <immintrin.h>
#endif

#define GRADSCALE_VARIANT baseline
#define GRADSCALE_AVX512 0
#include GRADSCALE_KERNELS
#undef GRADSCALE_VARIANT

#if GRADSCALE_X86_VARIANTS

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define GRADSCALE_VARIANT avx2
#include GRADSCALE_KERNELS
#undef GRADSCALE_VARIANT
#undef GRADSCALE_AVX512
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
#define GRADSCALE_AVX512 1
#include GRADSCALE_KERNELS
#undef GRADSCALE_VARIANT
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
