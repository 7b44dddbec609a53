// Ranges of contiguous elements, and the kernels over them that several operators share.
#pragma once

#include "../formulas/element.h"
#include "../formulas/norms.h"

namespace gradscale {

// Elements in memory. A complex element is a pair of numbers, and `size` is the number of pairs.
struct Range {
  const void* data;
  int64_t size;
  Element element;
  bool is_complex;
};

using PowerSumOfRange = PowerSum (*)(const Range&, double p);
extern const PowerSumOfRange power_sum_kernel;

// Writes from / root^2 * factor to `to`, which may be `from.data`.
using ScaleRange = void (*)(const Range& from, void* to, double root, double factor);
extern const ScaleRange scale_range_kernel;

} // namespace gradscale
