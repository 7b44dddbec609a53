// The builder of a Table on the host.
#pragma once

#include "launch.h"
#include "table.h"

#include <vector>

namespace gradscale {

class TableBuilder {
 public:
  // Adds structs, and returns their offset in the table.
  template <class T>
  int64_t add(const T* items, int64_t count) {
    static_assert(alignof(T) <= 8);
    const auto offset = static_cast<int64_t>(bytes_.size());
    const auto size = static_cast<int64_t>(sizeof(T)) * count;
    bytes_.resize(offset + (size + 7) / 8 * 8);
    memcpy(bytes_.data() + offset, items, size);
    return offset;
  }

  // The bytes of device memory that build() needs, from a multiple of 8 on; 0 where the table fits into the arguments.
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
