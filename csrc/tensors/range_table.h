// The builder of a RangeTable on the host.
#pragma once

#include "../port/table_builder.h"
#include "range_table.cuh"

namespace gradscale {

inline int64_t chunks_in(int64_t size, int64_t chunk) {
  return (size + chunk - 1) / chunk;
}

// Ranges get their blocks in the order in which they are added.
class RangeTableBuilder {
 public:
  explicit RangeTableBuilder(int64_t chunk) : chunk_(chunk) {
  }

  void add(const DeviceRange& range) {
    entries_.push_back({range, blocks_});
    blocks_ += chunks_in(range.size, chunk_);
  }
  int64_t blocks() const {
    return blocks_;
  }
  int64_t bytes() const {
    return static_cast<int64_t>(entries_.size() * sizeof(RangeEntry));
  }
  // Builds the table. It may need `bytes()` of device memory, which begins at a multiple of 8.
  RangeTable build(char* device_memory, Stream stream) const {
    TableBuilder builder;
    builder.add(entries_.data(), static_cast<int64_t>(entries_.size()));
    return {builder.build(device_memory, stream), static_cast<int64_t>(entries_.size())};
  }

 private:
  int64_t chunk_;
  int64_t blocks_ = 0;
  std::vector<RangeEntry> entries_;
};

inline RangeTableBuilder table_of(const DeviceRange* ranges, int64_t count, int64_t chunk) {
  RangeTableBuilder table(chunk);
  for (int64_t i = 0; i < count; ++i) {
    table.add(ranges[i]);
  }
  return table;
}

} // namespace gradscale
