// Tables that a kernel looks things up in: in the kernel's arguments where they fit, so that nothing is copied and the
// launch can be captured in a CUDA graph; and otherwise in device memory, to where launches carry them in their own
// arguments.
#pragma once

#include "device.h"

#include <vector>

namespace gradscale {

// Structs one after the other, at offsets that are multiples of 8.
struct Table {
  static constexpr int64_t kInside = 8000; // bytes

  const char* outside; // null: inside
  alignas(8) char inside[kInside];

  template <class T>
  GRADSCALE_HOST_DEVICE const T* at(int64_t offset) const {
    return reinterpret_cast<const T*>((outside != nullptr ? outside : inside) + offset);
  }
};

class TableBuilder {
 public:
  // Where they are in the table.
  template <class T>
  int64_t add(const T* items, int64_t count) {
    static_assert(alignof(T) <= 8);
    const auto offset = static_cast<int64_t>(bytes_.size());
    const auto size = static_cast<int64_t>(sizeof(T)) * count;
    bytes_.resize(offset + (size + 7) / 8 * 8);
    memcpy(bytes_.data() + offset, items, size);
    return offset;
  }

  // Of device memory, which begins at a multiple of 8; 0 where the table fits into the arguments.
  int64_t bytes_outside() const {
    const auto size = static_cast<int64_t>(bytes_.size());
    return size <= Table::kInside ? 0 : size;
  }

  // The table as kernels on this stream may use it.
  Table build(char* device_memory, Stream stream) const;

 private:
  std::vector<char> bytes_;
};

} // namespace gradscale
