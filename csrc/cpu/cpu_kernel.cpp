#include "cpu_kernel.h"

#include <ATen/Version.h>

#include <string>

namespace gradscale {

InstructionSet instruction_set() {
  static const InstructionSet best = [] {
#if GRADSCALE_X86_VARIANTS
    const std::string capability = at::get_cpu_capability();
    if (capability.rfind("AVX512", 0) == 0) {
      return InstructionSet::avx512;
    }
    if (capability == "AVX2") {
      return InstructionSet::avx2;
    }
#endif
    return InstructionSet::baseline;
  }();
  return best;
}

} // namespace gradscale
