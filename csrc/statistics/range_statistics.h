// The CPU kernels that look at many tensors, a range of elements at a time.
#pragma once

#include "../cpu/range.h"
#include "../formulas/statistics.h"

namespace gradscale {

// The range has real numbers, and at most 2^31 - 1 of them.
using StatisticsOfRange = void (*)(const Range&, double p, ChunkStatistics& out);
extern const CpuKernel<StatisticsOfRange> statistics_kernel;

// Squared norms of real numbers, and of what has been added to them since, which are stored at `after`. Sums of squares
// of double may overflow.
struct UpdateSquares {
  double before;
  double update;
};

using UpdateOfRange = UpdateSquares (*)(const Range& before, const void* after);
extern const CpuKernel<UpdateOfRange> update_kernel;

} // namespace gradscale
