// The mass of a normal between edges, from its tails, which lose no digits.
#pragma once

#include "words.cuh"

namespace gradscale {

// Twice the mass beyond an edge, with the edge's sign. It is given in sqrt(2) standard deviations from the middle.
GRADSCALE_DEVICE float signed_tail(float edge) {
  return std::copysign(approximate_erfc(std::abs(edge)), edge);
}

// Twice the mass between two edges, from their tails.
GRADSCALE_DEVICE float mass_between(float low_tail, float high_tail) {
  const bool has_middle = bit_cast<int32_t>(low_tail) < 0 && bit_cast<int32_t>(high_tail) >= 0;
  return low_tail - high_tail + (has_middle ? 2.0f : 0.0f);
}

} // namespace gradscale
