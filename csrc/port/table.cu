#include "table_builder.h"

namespace gradscale {

namespace {

// Copies the bytes that the arguments hold, 8 bytes a thread at a time.
GRADSCALE_KERNEL(kThreads, 2) copy_arguments(GRADSCALE_ARGUMENT(Table) table, char* to, int64_t bytes) {
  const auto* from = table.at<uint64_t>(0);
  for (int64_t i = threadIdx.x; i < bytes / 8; i += kThreads) {
    reinterpret_cast<uint64_t*>(to)[i] = from[i];
  }
}

} // namespace

Table TableBuilder::build(char* device_memory, Stream stream) const {
  Table table{};
  const auto size = static_cast<int64_t>(bytes_.size());
  if (bytes_outside() == 0) {
    memcpy(table.inside, bytes_.data(), size);
    return table;
  }
  for (int64_t begin = 0; begin < size; begin += Table::kInside) {
    const int64_t part = size - begin < Table::kInside ? size - begin : Table::kInside;
    memcpy(table.inside, bytes_.data() + begin, part);
    launch("copy_arguments", copy_arguments, 1, kThreads, stream, table, device_memory + begin, part);
  }
  table.outside = device_memory;
  return table;
}

} // namespace gradscale
