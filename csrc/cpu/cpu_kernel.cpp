#include "cpu_kernel.h"

#include <ATen/Version.h>

#include <string>

namespace gradscale {

int32_t vector_bytes() {
  const std::string capability = at::get_cpu_capability();
  return capability.rfind("AVX512", 0) == 0 ? 64 : (capability == "AVX2" ? 32 : 16);
}

} // namespace gradscale
