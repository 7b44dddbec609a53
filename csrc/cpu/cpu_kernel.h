// CPU kernels are compiled once for each instruction set. The best one that the machine supports is selected at run
// time, so that a build runs on every machine of the same architecture.
//
// A kernel is declared in a header, and defined in a .cpp file that includes itself:
//
//   extern const CpuKernel<Function> name_kernel;
//
//   #ifndef GRADSCALE_VARIANT
//   #define GRADSCALE_KERNELS "../folder/kernels.cpp"
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
  Function functions[3]; // indexed by InstructionSet; null if not compiled

  Function compiled_for(InstructionSet set) const {
    return functions[static_cast<int32_t>(set)];
  }
};

#if GRADSCALE_X86_VARIANTS
#define GRADSCALE_CPU_KERNEL(name) {baseline::name, avx2::name, avx512::name}
#else
#define GRADSCALE_CPU_KERNEL(name) {baseline::name}
#endif

// The best compiled instruction set that this machine supports and ATEN_CPU_CAPABILITY allows.
InstructionSet instruction_set();

template <class Function>
Function for_this_machine(const CpuKernel<Function>& kernel) {
  return kernel.compiled_for(instruction_set());
}

} // namespace gradscale
