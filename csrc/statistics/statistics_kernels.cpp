#include "range_statistics.h"

#define GRADSCALE_KERNELS "../statistics/statistics_kernels.h"
#include "../cpu/each_instruction_set.h"

namespace gradscale {

const CpuKernel<StatisticsOfRange> statistics_kernel = GRADSCALE_CPU_KERNEL(statistics_of_range);
const CpuKernel<UpdateOfRange> update_kernel = GRADSCALE_CPU_KERNEL(update_of_range);

} // namespace gradscale
