// The kernels compiled for AVX2. Standard headers come first, compiled for the baseline: a function from them that the
// linker shares between object files must run on every CPU.
#include "kernels.h"

#include "../math/exponential.h"

#include <array>
#include <type_traits>
#include <utility>

#if GRADSCALE_X86_VARIANTS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define GRADSCALE_VARIANT avx2
#include "all.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

gradscale::Kernels gradscale::kernels_avx2() {
  return avx2::all_kernels();
}
#endif
