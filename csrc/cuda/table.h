// Lookup tables of kernels. A table that fits is stored in the kernel's arguments, so that nothing is copied and the
// launch can be captured in a CUDA graph. A larger table is stored in device memory; launches of copy_table copy it
// there, in parts, from their own arguments.
#pragma once

#include "../formulas/port.h"

namespace gradscale {

// The table: concatenated structs, at offsets that are multiples of 8.
struct Table {
  static constexpr int64_t kInside = 8000; // bytes

  const char* outside; // the table in device memory; null if it is `inside`
  alignas(8) char inside[kInside];

  template <class T>
  GRADSCALE_HOST_DEVICE const T* at(int64_t offset) const {
    return reinterpret_cast<const T*>((outside != nullptr ? outside : inside) + offset);
  }

  // The beginning of the table. With `is_inside`, the compiler knows that reads are from the kernel's arguments.
  template <bool is_inside>
  GRADSCALE_HOST_DEVICE const char* begin() const {
    return is_inside ? inside : outside;
  }
};

// The argument of copy_table: a part of a table, and where it is copied to. The arguments of a kernel are at most 32764
// bytes.
struct CopyOfTable {
  static constexpr int64_t kMost = 32000; // bytes

  char* to;
  int64_t bytes;
  alignas(8) char part[kMost];
};

} // namespace gradscale
