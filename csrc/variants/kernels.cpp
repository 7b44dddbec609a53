#include "kernels.h"

#include <ATen/Version.h>

#include <string>

namespace gradscale {

const Kernels& kernels() {
  static const Kernels chosen = [] {
#if GRADSCALE_X86_VARIANTS
    const std::string capability = at::get_cpu_capability();
    if (capability.rfind("AVX512", 0) == 0) {
      return kernels_avx512();
    }
    if (capability == "AVX2") {
      return kernels_avx2();
    }
#endif
    return kernels_default();
  }();
  return chosen;
}

} // namespace gradscale
