// Where rows begin in memory, as it decides which kernels may read and write them.
#pragma once

#include "slab.h"

namespace gradscale {

// Whether rows begin at multiples of the size of their elements. Where there are none, they do.
inline bool is_at_elements(const Rows& rows) {
  return reinterpret_cast<uintptr_t>(rows.data) % element_size(rows.element) == 0;
}

// Whether each row of logits begins at the same place in its window of four elements as its gradient does; windows
// begin at multiples of their size.
inline bool begin_alike(const Rows& logits, const Rows& gradient) {
  const auto phase = [](const Rows& rows) {
    return reinterpret_cast<uintptr_t>(rows.data) / element_size(rows.element) % 4;
  };
  return phase(logits) == phase(gradient) && (logits.stride - gradient.stride) % 4 == 0;
}

} // namespace gradscale
