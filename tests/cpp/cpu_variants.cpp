// The CPU kernels, for each of the instruction sets that this machine has.
#include "cases.h"

namespace gradscale::test {

namespace {

std::vector<Variant> variants() {
  std::vector<Variant> all = {{"default", kernels_default()}};
#if GRADSCALE_X86_VARIANTS
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    all.push_back({"avx2", kernels_avx2()});
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    all.push_back({"avx512", kernels_avx512()});
  }
#endif
  return all;
}

} // namespace

Selection everything() {
  return {variants(), {std::begin(kLayouts), std::end(kLayouts)}, {1, 2, 15, 16, 17, 31, 33, 601, 1025}};
}

} // namespace gradscale::test
