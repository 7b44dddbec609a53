// The CUDA kernels and what launches them, compiled for the simulator.
#include "flow/elementwise.cu"
#include "flow/group_norm.cu"
#include "loss/decode.cu"
#include "loss/encode.cu"
#include "loss/multi_step_loss.cu"
#include "port/table.cu"
#include "tensors/clip_gradients.cu"
#include "tensors/l2_loss.cu"
#include "tensors/statistics.cu"

#include "device_kernels.h"

// For gradscale_ext._C.use_device_kernels_for_cpu.
extern "C" __attribute__((visibility("default"))) const gradscale::DeviceKernels* simulated_device_kernels() {
  static const gradscale::DeviceKernels kernels = gradscale::linked_device_kernels();
  return &kernels;
}
