// The builder of a Table on the host.
#pragma once

#include "driver.h"
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
    const auto* bytes = reinterpret_cast<const char*>(items);
    bytes_.insert(bytes_.end(), bytes, bytes + static_cast<int64_t>(sizeof(T)) * count);
    bytes_.resize((bytes_.size() + 7) / 8 * 8);
    return offset;
  }

  // Returns the table for kernels on this device. A table that is too large for arguments is copied to memory that
  // this object owns.
  Table build(const OnDevice& device) {
    CopyOfTable copy{};
    const auto size = static_cast<int64_t>(bytes_.size());
    if (size <= Table::kInside) {
      memcpy(copy.table.inside, bytes_.data(), size);
      return copy.table;
    }
    memory_ = device.memory(size);
    char* const memory = static_cast<char*>(memory_.mutable_data_ptr());
    for (int64_t begin = 0; begin < size; begin += Table::kInside) {
      copy.bytes = size - begin < Table::kInside ? size - begin : Table::kInside;
      copy.to = memory + begin;
      memcpy(copy.table.inside, bytes_.data() + begin, copy.bytes);
      device.launch("cuda/table.cuh", "copy_table", 1, kThreads, copy);
    }
    copy.table.outside = memory;
    return copy.table;
  }

 private:
  std::vector<char> bytes_;
  at::Tensor memory_;
};

} // namespace gradscale
