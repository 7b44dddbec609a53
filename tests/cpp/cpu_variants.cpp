// The CPU kernels, for each of the instruction sets that this machine has.
#include "cases.h"

namespace gradscale::test {

namespace {

Variant variant_of(const char* name, InstructionSet set) {
  return {
      name,
      {run_rows_kernel.compiled_for(set),
       decode_rows_kernel.compiled_for(set),
       power_sum_kernel.compiled_for(set),
       statistics_kernel.compiled_for(set),
       update_kernel.compiled_for(set),
       scale_range_kernel.compiled_for(set),
       multiply_kernel.compiled_for(set),
       multiply_negated_kernel.compiled_for(set),
       clamp_kernel.compiled_for(set)}};
}

std::vector<Variant> variants() {
  std::vector<Variant> all = {variant_of("default", InstructionSet::baseline)};
#if GRADSCALE_X86_VARIANTS
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    all.push_back(variant_of("avx2", InstructionSet::avx2));
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    all.push_back(variant_of("avx512", InstructionSet::avx512));
  }
#endif
  return all;
}

} // namespace

Selection everything() {
  return {variants(), {std::begin(kLayouts), std::end(kLayouts)}, {1, 2, 15, 16, 17, 31, 33, 601, 1025}};
}

} // namespace gradscale::test
