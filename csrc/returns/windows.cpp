#include "kernels.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#define GRADSCALE_KERNELS "../returns/windows.h"
#include "../cpu/each_instruction_set.h"

namespace gradscale {

const CpuKernel<ReturnsRows> n_step_kernel = GRADSCALE_CPU_KERNEL(n_step_rows);
const CpuKernel<MuZeroRows> muzero_kernel = GRADSCALE_CPU_KERNEL(muzero_rows);

} // namespace gradscale
