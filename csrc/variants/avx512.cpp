// The kernels compiled for AVX-512. Standard headers come first, compiled for the baseline: a function from them that
// the linker shares between object files must run on every CPU.
#define GRADSCALE_AVX512 1
#include "kernels.h"

#include "../math/exponential.h"

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#if GRADSCALE_X86_VARIANTS
#include <immintrin.h>

// GCC's own header leaves the unused operand of an intrinsic undefined, and warns of it.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

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
