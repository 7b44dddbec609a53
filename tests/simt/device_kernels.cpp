// The CUDA kernels and what launches them, compiled for the simulator.
#include "../../csrc/flow/elementwise.cu"
#include "../../csrc/flow/group_norm.cu"
#include "../../csrc/loss/decode.cu"
#include "../../csrc/loss/multi_step_loss.cu"
#include "../../csrc/port/table.cu"
#include "../../csrc/tensors/l2_loss.cu"

#include "../../csrc/device_kernels.h"

// For gradscale_ext._C.use_device_kernels_for_cpu.
extern "C" __attribute__((visibility("default"))) const gradscale::DeviceKernels* simulated_device_kernels() {
  static const gradscale::DeviceKernels kernels = gradscale::linked_device_kernels();
  return &kernels;
}
