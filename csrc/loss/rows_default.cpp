// The row kernels compiled for the compiler's baseline: any CPU of the architecture.
#define GRADSCALE_VARIANT baseline
#include "rows.h"

gradscale::RowKernels gradscale::row_kernels_default() {
  return {gradscale::baseline::run_rows, gradscale::baseline::decode_rows};
}
