// Kernels over the elements of a gradient and of arguments that broadcast to it, as a TensorIterator walks them: data
// pointers, and strides in bytes, of (result, gradient, arguments ...). Arguments are of the type that the gradient is
// computed in.
#pragma once

#include "../cpu/cpu_kernel.h"
#include "../formulas/element.h"

namespace gradscale {

using ElementLoop = void (*)(Element, char* const* data, const int64_t* strides, int64_t size);

extern const CpuKernel<ElementLoop> multiply_kernel;         // g * scale, exact zeros where scale is 0
extern const CpuKernel<ElementLoop> multiply_negated_kernel; // g * -scale, likewise
extern const CpuKernel<ElementLoop> clamp_kernel;            // clamp(g, min, max), NaN unless min <= max

} // namespace gradscale
