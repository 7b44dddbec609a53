// The choice among the CPU kernels.
#pragma once

#include "cpu_kernel.h"

namespace gradscale {

// The best of the instruction sets compiled for that this machine has and ATEN_CPU_CAPABILITY allows.
InstructionSet instruction_set();

template <class Function>
Function for_this_machine(const CpuKernel<Function>& kernel) {
  return kernel.compiled_for(instruction_set());
}

} // namespace gradscale
