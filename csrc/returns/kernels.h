// The kernels of the CPU, by rows or by blocks of a call.
#pragma once

#include "../cpu/cpu_kernel.h"
#include "call.h"

namespace gradscale {

// Computes rows begin .. end of a recurrence, or of n-step returns.
using ReturnsRows = void (*)(const ReturnsCall& call, int64_t begin, int64_t end);

extern const CpuKernel<ReturnsRows> along_steps_kernel; // lanes along the steps of a row
extern const CpuKernel<ReturnsRows> across_rows_kernel; // lanes across rows
extern const CpuKernel<ReturnsRows> n_step_kernel;

using MuZeroRows = void (*)(const MuZeroCall& call, int64_t begin, int64_t end);

extern const CpuKernel<MuZeroRows> muzero_kernel;

} // namespace gradscale
