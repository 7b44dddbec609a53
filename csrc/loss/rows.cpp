#include "segment.h"

#define GRADSCALE_KERNELS "../loss/rows.h"
#include "../port/each_instruction_set.h"

namespace gradscale {

const CpuKernel<RunRows> run_rows_kernel = GRADSCALE_CPU_KERNEL(run_rows);
const CpuKernel<DecodeRows> decode_rows_kernel = GRADSCALE_CPU_KERNEL(decode_rows);

} // namespace gradscale
