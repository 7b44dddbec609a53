// The kernel that copies tables from its arguments to device memory.
#pragma once

#include "device.h"
#include "table.h"

namespace gradscale {

// One block copies the bytes that the arguments hold, 8 bytes per thread at a time.
GRADSCALE_KERNEL(kThreads, 2) copy_table(GRADSCALE_ARGUMENT(CopyOfTable) copy) {
  const auto* from = copy.table.at<uint64_t>(0);
  for (int64_t i = threadIdx.x; i < copy.bytes / 8; i += kThreads) {
    reinterpret_cast<uint64_t*>(copy.to)[i] = from[i];
  }
}

} // namespace gradscale
