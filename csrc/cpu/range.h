// Ranges of contiguous elements, and the kernels over them that several operators share.
#pragma once

#include "../formulas/element.h"
#include "../formulas/norms.h"

namespace gradscale {

// Real numbers in memory. Complex elements are pairs of numbers.
struct Range {
  const void* data;
  int64_t size;
  Element element;

  Range part(int64_t begin, int64_t part_size) const {
    return {static_cast<const char*>(data) + begin * element_size(element), part_size, element};
  }
};

using PowerSumOfRange = PowerSum (*)(const Range&, double p);
extern const PowerSumOfRange power_sum_kernel;

// Writes from / root^2 * factor to `to`, which may be `from.data`.
using ScaleRange = void (*)(const Range& from, void* to, double root, double factor);
extern const ScaleRange scale_range_kernel;

} // namespace gradscale
