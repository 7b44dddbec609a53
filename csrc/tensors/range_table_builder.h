// The builder of a RangeTable on the host.
#pragma once

#include "../port/table_builder.h"
#include "range_table.h"

namespace gradscale {

// Ranges get their blocks in their order, one for each chunk of so many bytes.
class RangeTableBuilder {
 public:
  RangeTableBuilder(const DeviceRange* ranges, int64_t count, int64_t chunk) {
    for (int64_t i = 0; i < count; ++i) {
      entries_.push_back({ranges[i], blocks_});
      blocks_ += blocks_of_range(ranges[i], chunk);
    }
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
  int64_t blocks_ = 0;
  std::vector<RangeEntry> entries_;
};

} // namespace gradscale
