#include "support_calls.h"

#define GRADSCALE_KERNELS "../support/kernels.h"
#include "../cpu/each_instruction_set.h"

namespace gradscale {

const CpuKernel<DecodeRows> decode_rows_kernel = GRADSCALE_CPU_KERNEL(decode_rows);
const CpuKernel<ProjectRows> project_rows_kernel = GRADSCALE_CPU_KERNEL(project_rows);

} // namespace gradscale
