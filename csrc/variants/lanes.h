// Sums kept apart by lane: a loop over lanes vectorises whatever the instruction set, and the order of additions is the
// same for all of them. Included once for each instruction set.
#pragma once

#include "../port/port.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

template <class A>
struct LaneSum {
  alignas(64) A lanes[kLanes] = {};

  // By halves: a chain of 16 additions would wait longer than the rest of a short row takes.
  A total() const {
    A sums[8];
    for (int k = 0; k < 8; ++k) {
      sums[k] = lanes[k] + lanes[k + 8];
    }
    for (int k = 0; k < 4; ++k) {
      sums[k] += sums[k + 4];
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
  }
};

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
