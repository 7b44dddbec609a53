#include "table_builder.h"

namespace gradscale {

Table TableBuilder::build(char* device_memory, Stream stream) const {
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
