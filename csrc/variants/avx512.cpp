// The kernels compiled for AVX-512. Standard headers come first, compiled for the baseline: a function from them that
// the linker shares between object files must run on every CPU.
#include "kernels.h"

#include "../math/exponential.h"

#if GRADSCALE_X86_VARIANTS
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

#define GRADSCALE_VARIANT avx512
#include "all.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

gradscale::Kernels gradscale::kernels_avx512() {
  return avx512::all_kernels();
}
#endif
