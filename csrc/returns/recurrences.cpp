#include "kernels.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#define GRADSCALE_KERNELS "../returns/recurrences.h"
#include "../cpu/each_instruction_set.h"

namespace gradscale {

const CpuKernel<ReturnsRows> along_steps_kernel = GRADSCALE_CPU_KERNEL(along_steps);
const CpuKernel<ReturnsRows> across_rows_kernel = GRADSCALE_CPU_KERNEL(across_rows);

} // namespace gradscale
