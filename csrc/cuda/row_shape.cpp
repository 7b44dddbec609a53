#include "row_shape.h"

#include <algorithm>
#include <iterator>

namespace gradscale {

bool is_aligned(const Rows& rows, int64_t count) {
  return rows.data == nullptr || (reinterpret_cast<uintptr_t>(rows.data) % (count * element_size(rows.element)) == 0 &&
                                  rows.stride % count == 0);
}

namespace {

// The widest row for a number of lanes. Fewer lanes exchange less data, and more lanes hold more of a row in registers.
// A row with targets over its logits needs twice as many registers. A row that one lane owns is in shared memory.
struct LanesOfWidth {
  int64_t widest;
  int32_t lanes;
};
constexpr LanesOfWidth kLanesOfBins[] = {{64, 1}, {256, 8}, {640, 16}, {1024, 32}};
constexpr LanesOfWidth kLanesOfActions[] = {{40, 1}, {112, 8}, {224, 16}, {448, 32}};
constexpr int64_t kSharedBytesOfBlock = 48 * 1024;
constexpr int64_t kSector = 32; // bytes

int64_t bytes_in_tile(const Rows& rows, int64_t width) {
  const auto bytes = static_cast<int32_t>(element_size(rows.element));
  return rows.data == nullptr ? 0 : tile_pitch(static_cast<int32_t>(width), bytes);
}

// True if `others` has no data, or if row i of both begins at elements of the same parity, for every i.
bool is_parallel(const Rows& rows, const Rows& others) {
  const auto place = [](const Rows& r) { return reinterpret_cast<uintptr_t>(r.data) / element_size(r.element); };
  return others.data == nullptr || ((place(rows) ^ place(others)) | (rows.stride ^ others.stride)) % 2 == 0;
}

// The lanes for rows of `width` logits. Gradients and targets over the logits may have no data.
template <size_t count>
RowLanes lanes_of(
    const LanesOfWidth (&table)[count], int64_t width, const Rows& logits, const Rows& gradient, const Rows& target) {
  const auto all_aligned = [&](int64_t vector_size) {
    return is_aligned(logits, vector_size) && is_aligned(gradient, vector_size) && is_aligned(target, vector_size);
  };
  if (logits.element == Element::float64 || width < 2 || !all_aligned(1)) {
    return {};
  }
  // If the width is odd, aligned vectors of two need rows of the same parity.
  const bool at_once = width % 2 == 0 ? all_aligned(2) : is_parallel(logits, gradient) && is_parallel(logits, target);
  constexpr int32_t vector_size = 2;
  const int64_t tiles = std::max(bytes_in_tile(logits, width), bytes_in_tile(gradient, width));
  for (const LanesOfWidth& entry : table) {
    if (width <= entry.widest && entry.lanes > 1 &&
        entry.lanes * vector_size * element_size(logits.element) >= kSector) {
      return {entry.lanes, vector_size, at_once};
    }
    if (width <= entry.widest && entry.lanes == 1 &&
        kRowThreads * (tiles + bytes_in_tile(target, width)) <= kSharedBytesOfBlock) {
      return {1, width % 2 == 0 ? vector_size : 1, true}; // from shared memory
    }
  }
  return {};
}

// The largest vector that divides `width`, and has at most 16 bytes of each of these rows. per_row is 0 if elements of
// rows are not aligned, or float64 logits.
RowLanes wide_vectors(int64_t width, const Rows& logits, const Rows& gradient, const Rows& target) {
  const auto bytes_of = [](const Rows& rows) { return rows.data == nullptr ? 0 : element_size(rows.element); };
  const int64_t largest = std::max<int64_t>({bytes_of(logits), bytes_of(gradient), bytes_of(target)});
  const auto all_aligned = [&](int64_t vector_size) {
    return is_aligned(logits, vector_size) && is_aligned(gradient, vector_size) && is_aligned(target, vector_size);
  };
  int32_t vector_size = 1;
  while (width % (2 * vector_size) == 0 && 2 * vector_size * largest <= 16) {
    vector_size *= 2;
  }
  const bool is_possible = logits.element != Element::float64 && all_aligned(1);
  return {is_possible ? 1 : 0, vector_size, all_aligned(vector_size)};
}

// The lanes for rows that are too wide for a warp: all of a block, if its registers are enough.
RowLanes block_lanes(int64_t width, const Rows& logits, const Rows& gradient, const Rows& target) {
  RowLanes lanes = wide_vectors(width, logits, gradient, target);
  const int64_t vectors = (width + lanes.vector_size * kRowThreads - 1) / (lanes.vector_size * kRowThreads);
  lanes.per_row = vectors * lanes.vector_size <= kMostWideLogits ? lanes.per_row * kRowThreads : 0;
  return lanes;
}

} // namespace

RowLanes bin_lanes(int64_t width, const Rows& logits, const Rows& gradient) {
  return lanes_of(kLanesOfBins, width, logits, gradient, {});
}

RowLanes action_lanes(int64_t width, const Rows& logits, const Rows& gradient, const Rows& target) {
  const RowLanes lanes = lanes_of(kLanesOfActions, width, logits, gradient, target);
  return lanes.per_row != 0 || width <= std::end(kLanesOfActions)[-1].widest
             ? lanes
             : block_lanes(width, logits, gradient, target);
}

RowLanes group_lanes(int64_t groups, int64_t classes, const Rows& logits, const Rows& gradient, const Rows& target) {
  RowLanes lanes = wide_vectors(classes, logits, gradient, target);
  if (lanes.per_row == 0 || classes > 32 * kMostClassesOfLane) {
    return {};
  }
  lanes.per_row = lanes_of_group(static_cast<int32_t>(classes), lanes.vector_size);
  for (int64_t side_by_side = 1; side_by_side < groups && lanes.per_row < 32; side_by_side *= 2) {
    lanes.per_row *= 2;
  }
  return lanes;
}

} // namespace gradscale
