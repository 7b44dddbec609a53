// Pieces of about the same size, which threads take one after the other, of many ranges of elements.
#pragma once

#include "../cpu/range.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

namespace gradscale {

constexpr int64_t kChunk = 255 * 64; // elements that a thread takes at a time: as many as bytes can count

// Cuts ranges into chunks, in their order; an empty range has none.
inline std::vector<Range> chunks_of(const std::vector<Range>& ranges) {
  std::vector<Range> chunks;
  chunks.reserve(ranges.size());
  for (const Range& range : ranges) {
    const int64_t size_of_element = element_size(range.element) * (range.is_complex ? 2 : 1);
    for (int64_t begin = 0; begin < range.size; begin += kChunk) {
      chunks.push_back(
          {static_cast<const char*>(range.data) + begin * size_of_element,
           std::min(kChunk, range.size - begin),
           range.element,
           range.is_complex});
    }
  }
  return chunks;
}

// Calls function(index) for each chunk, on all threads where there are many elements.
template <class Function>
void for_each_chunk(const std::vector<Range>& chunks, Function function) {
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), /*grain_size=*/8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      function(i);
    }
  });
}

} // namespace gradscale
