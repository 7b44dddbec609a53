#include "../segment.h"

#define GRADSCALE_KERNELS "../loss/cpu/rows.h"
#include "../../cpu/each_instruction_set.h"

namespace gradscale {

const CpuKernel<RunRows> run_rows_kernel = GRADSCALE_CPU_KERNEL(run_rows);

} // namespace gradscale
