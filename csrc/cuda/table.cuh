// The kernel that copies tables from its arguments to device memory.
#pragma once

#include "device.h"
#include "table.h"

namespace gradscale {

// Each thread copies 8 of the bytes that the arguments hold.
GRADSCALE_KERNEL(kThreads, 2) copy_table(GRADSCALE_ARGUMENT(CopyOfTable) copy) {
  const auto i = static_cast<int64_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i < copy.bytes / 8) {
    reinterpret_cast<uint64_t*>(copy.to)[i] = kept(reinterpret_cast<const uint64_t*>(copy.part))[i];
  }
}

} // namespace gradscale
