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

  // The bytes of device memory, aligned to 8, that build() needs. 0 if the table fits into the kernel's arguments.
  int64_t bytes_outside() const {
    const auto size = static_cast<int64_t>(bytes_.size());
    return size <= Table::kInside ? 0 : size;
  }

  // Returns the table for kernels on this stream. A table that is too large for arguments is copied to `device_memory`.
  Table build(char* device_memory, Stream stream) const;

 private:
  std::vector<char> bytes_;
};

inline Table TableBuilder::build(char* device_memory, Stream stream) const {
  static const Kernel<CopyOfTable> copy_table("cuda/table.cuh", "copy_table");
  CopyOfTable copy{};
  const auto size = static_cast<int64_t>(bytes_.size());
  if (bytes_outside() == 0) {
    memcpy(copy.table.inside, bytes_.data(), size);
    return copy.table;
  }
  for (int64_t begin = 0; begin < size; begin += Table::kInside) {
    copy.bytes = size - begin < Table::kInside ? size - begin : Table::kInside;
    copy.to = device_memory + begin;
    memcpy(copy.table.inside, bytes_.data() + begin, copy.bytes);
    launch(copy_table, 1, kThreads, stream, copy);
  }
  copy.table.outside = device_memory;
  return copy.table;
}

} // namespace gradscale
