#include "device.h"

namespace gradscale {

namespace {

const DeviceKernels* kernels_for_cpu = nullptr;

} // namespace

const DeviceKernels* device_kernels(c10::Device device) {
#if GRADSCALE_WITH_CUDA
  static const DeviceKernels kernels_for_cuda = linked_device_kernels();
  if (device.is_cuda()) {
    return &kernels_for_cuda;
  }
#endif
  return device.is_cpu() ? kernels_for_cpu : nullptr;
}

void use_device_kernels_for_cpu(const DeviceKernels* kernels) {
  kernels_for_cpu = kernels;
}

} // namespace gradscale
