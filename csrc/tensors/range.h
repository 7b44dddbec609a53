// Kernels over a range of elements that lie one after the other: its norm, and multiplying it by a number.
#pragma once

#include "../math/element.h"
#include "../math/norms.h"

namespace gradscale {

// Elements in memory; complex ones are counted as pairs.
struct Range {
  const void* data;
  int64_t size;
  Element element;
  bool is_complex;
};

using PowerSumOfRange = PowerSum (*)(const Range&, double p);

// Writes from / root^2 * factor to `to`, which may be `from.data`.
using ScaleRange = void (*)(const Range& from, void* to, double root, double factor);

} // namespace gradscale
