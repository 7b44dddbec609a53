// The memory that kernels read and write, as plain pointers: scalars of the type of losses, and rows of elements of any
// type.
#pragma once

#include "element.h"

namespace gradscale {

// A [B] or [B, n] slab of scalars in the type that losses are given in.
struct Slab {
  void* data = nullptr; // null: not wanted
  int64_t stride = 0;
  bool is_double = false;

  // The slab without its first elements.
  GRADSCALE_HOST_DEVICE Slab from(int64_t element) const {
    return {static_cast<char*>(data) + element * (is_double ? 8 : 4), stride, is_double};
  }
  GRADSCALE_HOST_DEVICE void store(int64_t row, double value) const {
    if (is_double) {
      static_cast<double*>(data)[row * stride] = value;
    } else {
      static_cast<float*>(data)[row * stride] = static_cast<float>(value);
    }
  }
  // Stores rows first..first + count.
  template <class A>
  void store(int64_t first, int64_t count, const A* values) const {
    if (is_double) {
      for (int64_t i = 0; i < count; ++i) {
        static_cast<double*>(data)[(first + i) * stride] = static_cast<double>(values[i]);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        static_cast<float*>(data)[(first + i) * stride] = static_cast<float>(values[i]);
      }
    }
  }
  GRADSCALE_HOST_DEVICE double load(int64_t row) const {
    return is_double ? static_cast<const double*>(data)[row * stride] : static_cast<const float*>(data)[row * stride];
  }
};

// Rows of `width` elements, one a sample, whose elements are contiguous; rows may be any distance apart.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0; // elements from one sample to the next
  Element element = Element::float32;
};

} // namespace gradscale
