// Kernels over a range of elements that lie one after the other: its norm, and multiplying it by a number.
#pragma once

#include "../math/element.h"

namespace gradscale {

// Elements in memory; complex ones are counted as pairs.
struct Range {
  const void* data;
  int64_t size;
  Element element;
  bool is_complex;
};

// Sum of |g / scale|^p over a range, or the largest |g| where p is inf (scale is 1 then). The scale is a power of two;
// it differs from 1 only where the plain sum would overflow or vanish. NaN and inf come through.
struct PowerSum {
  double sum;
  double scale;
};

using PowerSumOfRange = PowerSum (*)(const Range&, double p);

// Writes from * first * second to `to`, which may be `from.data`; `first` is a power of two.
using ScaleRange = void (*)(const Range& from, void* to, double first, double second);

} // namespace gradscale
