// The kernels compiled for the compiler's baseline: any CPU of the architecture.
#include "kernels.h"

#include "../math/exponential.h"

#include <array>
#include <type_traits>
#include <utility>

#define GRADSCALE_VARIANT baseline
#include "all.h"

gradscale::Kernels gradscale::kernels_default() {
  return baseline::all_kernels();
}
