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

#include <string>

namespace gradscale {

namespace {

template <class Kernels>
const void* table_for(const std::string& family) {
  static const Kernels kernels{};
  return family == Kernels::kFamily ? &kernels : nullptr;
}

const void* find_kernels(const char* family) {
  for (const auto table : {table_for<FlowKernels>, table_for<LossKernels>, table_for<TensorsKernels>}) {
    if (const void* kernels = table(family)) {
      return kernels;
    }
  }
  return nullptr;
}

} // namespace

} // namespace gradscale

// The address for gradscale_ext._C.use_device_kernels_for_cpu.
extern "C" __attribute__((visibility("default"))) const void* simulated_device_kernels() {
  return reinterpret_cast<const void*>(&gradscale::find_kernels);
}
