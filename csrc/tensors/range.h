// Kernels over a range of elements that lie one after the other: its norm, its statistics, and multiplying it by a
// number.
#pragma once

#include "../math/element.h"
#include "../math/norms.h"
#include "../math/statistics.h"

namespace gradscale {

// Elements in memory; complex ones are counted as pairs.
struct Range {
  const void* data;
  int64_t size;
  Element element;
  bool is_complex;
};

using PowerSumOfRange = PowerSum (*)(const Range&, double p);

// Of a range of real numbers, of at most 2^31 - 1 elements.
using StatisticsOfRange = void (*)(const Range&, double p, ChunkStatistics& out);

// Squared norms of real numbers, and of what has been added to them since, which lie at `after`. Sums of squares of
// double may overflow.
struct UpdateSquares {
  double before;
  double update;
};

using UpdateOfRange = UpdateSquares (*)(const Range& before, const void* after);

// Writes from / root^2 * factor to `to`, which may be `from.data`.
using ScaleRange = void (*)(const Range& from, void* to, double root, double factor);

} // namespace gradscale
