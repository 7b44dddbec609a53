// The functions of gradient-flow operators on one element of a gradient.
#pragma once

#include "port.h"

namespace gradscale {

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

} // namespace gradscale
