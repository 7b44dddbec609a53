#include "segment.h"

#define GRADSCALE_KERNELS "../loss/project.h"
#include "../port/each_instruction_set.h"

namespace gradscale {

const CpuKernel<ProjectRows> project_rows_kernel = GRADSCALE_CPU_KERNEL(project_rows);

} // namespace gradscale
