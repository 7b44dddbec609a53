// Kernels of the CPU are compiled once for each instruction set, and the best that the machine has is chosen when the
// program runs, so that a build made on one machine runs on any other of its architecture.
//
// A family declares a kernel in one of its headers, and defines it in a .cpp file that includes itself:
//
//   extern const CpuKernel<Function> name_kernel;
//
//   #ifndef GRADSCALE_VARIANT
//   #define GRADSCALE_KERNELS "../family/kernels.cpp"
//   #include "each_instruction_set.h"
//   const CpuKernel<Function> name_kernel = GRADSCALE_CPU_KERNEL(name);
//   #else // the code, in the namespace that GRADSCALE_VARIANT names
//   #endif
#pragma once

#include "../formulas/port.h"

namespace gradscale {

enum class InstructionSet : int32_t { baseline = 0, avx2 = 1, avx512 = 2 };

template <class Function>
struct CpuKernel {
  Function functions[3]; // by instruction set; null where there is no code for it

  Function compiled_for(InstructionSet set) const {
    return functions[static_cast<int32_t>(set)];
  }
};

#if GRADSCALE_X86_VARIANTS
#define GRADSCALE_CPU_KERNEL(name) {baseline::name, avx2::name, avx512::name}
#else
#define GRADSCALE_CPU_KERNEL(name) {baseline::name}
#endif

// The best of the instruction sets compiled for that this machine has and ATEN_CPU_CAPABILITY allows.
InstructionSet instruction_set();

template <class Function>
Function for_this_machine(const CpuKernel<Function>& kernel) {
  return kernel.compiled_for(instruction_set());
}

} // namespace gradscale
