// What passes over many tensors ask of a device, as plain numbers and pointers into its memory.
#pragma once

#include "../loss/segment.h"

namespace gradscale {

// A tensor whose elements lie one after the other.
struct DeviceRange {
  const void* data;
  void* out; // of a result, of the same type
  int64_t size;
  Element element;
};

// loss = factor * sum of squares; or out = data * factor * grad_output.
struct SquaresCall {
  const DeviceRange* ranges; // on the host
  int64_t count;
  double factor;
  Slab loss;        // of the one pass
  Slab grad_output; // of the other
  char* workspace;  // bytes_for_squares() bytes, at a multiple of 8
};

} // namespace gradscale
