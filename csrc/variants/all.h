// Every CPU kernel, in the namespace that GRADSCALE_VARIANT names. Included once for each instruction set.
#include "lanes.h"

#include "../flow/element_loops.h"
#include "../loss/rows.h"
#include "../tensors/range_kernels.h"
#include "../tensors/statistics_kernels.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

Kernels all_kernels() {
  return {run_rows, decode_rows, power_sum_of_range, statistics_of_range, update_of_range, scale_range, element_loops};
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
