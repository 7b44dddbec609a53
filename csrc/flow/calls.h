// The arguments of the gradient operators' kernels, on a CPU and on a device: plain numbers and pointers.
#pragma once

#include "../formulas/element.h"
#include "../formulas/norms.h"

namespace gradscale {

// The functions of gradient-flow operators on one element of a gradient.

template <class A>
struct Multiply {
  static constexpr int kArguments = 1;

  GRADSCALE_HOST_DEVICE A operator()(A gradient, A scale) const {
    return scale == 0 ? A(0) : gradient * scale; // exact zeros where the scale is 0
  }
};

template <class A>
struct MultiplyNegated {
  static constexpr int kArguments = 1;

  GRADSCALE_HOST_DEVICE A operator()(A gradient, A scale) const {
    return scale == 0 ? A(0) : gradient * -scale;
  }
};

template <class A>
struct Clamp {
  static constexpr int kArguments = 2;

  GRADSCALE_HOST_DEVICE A operator()(A gradient, A min, A max) const {
    const A above = gradient < min ? min : gradient;
    const A clamped = above > max ? max : above;
    return min <= max ? clamped : static_cast<A>(NAN);
  }
};

// The functions by name.
enum class ElementFunction : int32_t { multiply, multiply_negated, clamp };

// Kernels over the elements of a gradient and of arguments that broadcast to it, called by a TensorIterator. `data` has
// the pointers to the result, the gradient and the arguments, and `strides` has their strides in bytes. Arguments have
// the type that the gradient is computed in.
using ElementLoop = void (*)(Element, char* const* data, const int64_t* strides, int64_t size);

extern const ElementLoop multiply_kernel;         // g * scale, exact zeros where scale is 0
extern const ElementLoop multiply_negated_kernel; // g * -scale, with the same zeros
extern const ElementLoop clamp_kernel;            // clamp(g, min, max), NaN unless min <= max

// ---- On a device ----------------------------------------------------------------------------------------------------

// out = function(gradient, arguments ...), broadcast. Complex gradients are pairs.
struct ElementwiseCall {
  static constexpr int kMaxDims = 8;
  static constexpr int kMaxOperands = 4;

  ElementFunction function;
  Element element; // of out and gradient; arguments are of the type of sums
  int32_t dims;
  int64_t count;
  int64_t sizes[kMaxDims];                 // the fastest dimension first
  int64_t strides[kMaxOperands][kMaxDims]; // in bytes
  void* data[kMaxOperands];                // out, gradient, arguments; null: a constant argument
  double constants[kMaxOperands];
  bool is_double[kMaxOperands]; // the argument in memory is double, even if sums are float
};

constexpr int64_t kElementsOfBlock = 4096; // of contiguous tensors: 2, 4 or 8 windows of 16 bytes per thread

// Groups of contiguous elements, rescaled by their norms, on a CPU or a device. Complex elements are pairs of numbers;
// p must be 2 for them.
struct RescaleCall {
  const void* from;
  void* to; // may be `from`
  Element element;
  int64_t groups;
  int64_t size; // numbers in a group
  double p;
  Rule rule;
  double limit;
  const double* limits;  // by group; null: `limit` for all
  int64_t limits_stride; // 0: one for all
  int64_t* counts;       // the numbers of norms and of norms beyond the limit are added; or null
  PowerSum* sums;        // on a device: of the chunks of long groups, set by launch_rescale()
};

GRADSCALE_HOST_DEVICE double limit_of(const RescaleCall& call, int64_t group) {
  return call.limits == nullptr ? call.limit : call.limits[group * call.limits_stride];
}

constexpr int64_t kShortGroup = 8192; // elements; the groups that are processed at a time fit into the cache

// The chunks of a long group: so few that reading their sums takes little time compared with reading the elements.
struct Chunks {
  int64_t size;
  int64_t count;
};

GRADSCALE_HOST_DEVICE Chunks chunks_of(const RescaleCall& call) {
  const int64_t size = call.size / 1024 > 32768 ? (call.size / 1024 + 31) / 32 * 32 : 32768;
  return {size, (call.size + size - 1) / size};
}

class OnDevice;

void launch_elementwise(const ElementwiseCall& call, const OnDevice& device);
void launch_rescale(RescaleCall call, const OnDevice& device);

} // namespace gradscale
