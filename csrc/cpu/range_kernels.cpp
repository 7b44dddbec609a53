#include "range.h"

#define GRADSCALE_KERNELS "range_kernels.h"
#include "each_instruction_set.h"

namespace gradscale {

const CpuKernel<PowerSumOfRange> power_sum_kernel = GRADSCALE_CPU_KERNEL(power_sum_of_range);
const CpuKernel<ScaleRange> scale_range_kernel = GRADSCALE_CPU_KERNEL(scale_range);

} // namespace gradscale
