#include "lanes_of_row.h"

#include "row_shape.h"

#include <algorithm>

namespace gradscale {

bool is_aligned(const Rows& rows, int64_t count) {
  return rows.data == nullptr || (reinterpret_cast<uintptr_t>(rows.data) % (count * element_size(rows.element)) == 0 &&
                                  rows.stride % count == 0);
}

namespace {

// The widest rows for a number of lanes. Fewer lanes exchange less; more lanes keep more of a row in registers, of
// which a row with targets over its logits takes twice as many. One lane has a row in shared memory.
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

// True if each row begins at an odd element in both or in neither, or if there are no others.
bool is_parallel(const Rows& rows, const Rows& others) {
  const auto place = [](const Rows& of) { return reinterpret_cast<uintptr_t>(of.data) / element_size(of.element); };
  return others.data == nullptr || ((place(rows) ^ place(others)) | (rows.stride ^ others.stride)) % 2 == 0;
}

// The lanes for rows of `width` logits, with gradients and targets over the logits if these have data.
template <size_t count>
Lanes lanes_of(
    const LanesOfWidth (&table)[count], int64_t width, const Rows& logits, const Rows& gradient, const Rows& target) {
  const auto all_aligned = [&](int64_t unit) {
    return is_aligned(logits, unit) && is_aligned(gradient, unit) && is_aligned(target, unit);
  };
  if (logits.element == Element::float64 || width < 2 || !all_aligned(1)) {
    return {0, 0};
  }
  // Where widths are odd, units of two need rows of the same parity.
  const bool has_pairs = width % 2 == 0 ? all_aligned(2) : is_parallel(logits, gradient) && is_parallel(logits, target);
  const int32_t unit = has_pairs ? 2 : 1;
  const int64_t tiles = std::max(bytes_in_tile(logits, width), bytes_in_tile(gradient, width));
  for (const LanesOfWidth& of : table) {
    if (width <= of.widest && of.lanes > 1 && of.lanes * unit * element_size(logits.element) >= kSector) {
      return {of.lanes, unit};
    }
    if (width <= of.widest && of.lanes == 1 &&
        kRowThreads * (tiles + bytes_in_tile(target, width)) <= kSharedBytesOfBlock) {
      return {1, width % 2 == 0 ? 2 : 1};
    }
  }
  return {0, 0};
}

} // namespace

Lanes lanes_of_bins(int64_t width, const Rows& logits, const Rows& gradient) {
  return lanes_of(kLanesOfBins, width, logits, gradient, {});
}

Lanes lanes_of_actions(int64_t width, const Rows& logits, const Rows& gradient, const Rows& target) {
  return lanes_of(kLanesOfActions, width, logits, gradient, target);
}

std::string instance(const std::string& of_template, const std::vector<std::string>& arguments) {
  std::string name = of_template;
  for (const std::string& argument : arguments) {
    name += (&argument == arguments.data() ? "<" : ", ") + argument;
  }
  return name + ">";
}

} // namespace gradscale
