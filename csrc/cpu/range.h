// Ranges of contiguous elements, and the kernels that sum and scale elements.
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

// Writes the scaled elements to `to`, which may be `from.data`.
using ScaleRange = void (*)(const Range& from, void* to, const Scaling& by);
extern const ScaleRange scale_range_kernel;

// Scales the elements of a gradient by a tensor that broadcasts to it, called by a TensorIterator. `data` has the
// pointers to the result, the gradient and the scale, and `strides` has their strides in bytes. The scale has the type
// that the gradient is computed in.
using ScaleLoop = void (*)(Element, char* const* data, const int64_t* strides, int64_t size);
extern const ScaleLoop scale_kernel;

} // namespace gradscale
