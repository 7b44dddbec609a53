// The CPU kernels, compiled once for each instruction set; the best that the machine has is chosen when the program
// runs, so that a build made on one machine runs on any other of its architecture.
#pragma once

#include "../flow/element_loop.h"
#include "../loss/segment.h"
#include "../tensors/range.h"

namespace gradscale {

struct Kernels {
  RunRows run_rows;
  DecodeRows decode_rows;
  PowerSumOfRange power_sum;
  StatisticsOfRange statistics;
  UpdateOfRange update;
  ScaleRange scale_range;
  ElementLoops element_loops;
};

Kernels kernels_default();
Kernels kernels_avx2();
Kernels kernels_avx512();

// The kernels for this machine: the best of those compiled that ATEN_CPU_CAPABILITY allows.
const Kernels& kernels();

} // namespace gradscale
