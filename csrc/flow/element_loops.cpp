#include "element_loop.h"

#define GRADSCALE_KERNELS "../flow/element_loops.h"
#include "../cpu/each_instruction_set.h"

namespace gradscale {

const CpuKernel<ElementLoop> multiply_kernel = GRADSCALE_CPU_KERNEL(loop<Multiply>);
const CpuKernel<ElementLoop> multiply_negated_kernel = GRADSCALE_CPU_KERNEL(loop<MultiplyNegated>);
const CpuKernel<ElementLoop> clamp_kernel = GRADSCALE_CPU_KERNEL(loop<Clamp>);

} // namespace gradscale
