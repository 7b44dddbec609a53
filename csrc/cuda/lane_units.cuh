// The elements of a row that one lane owns.
//
// `lanes_per_row` lanes of a warp own a row together. Its elements are grouped into units of `unit` elements, which a
// lane accesses at once, and a lane owns every lanes_per_row-th unit. A unit divides the width and the beginning of
// each row, so that none is partly outside of a row: it has one element where widths are odd. What the lanes of a row
// access together starts at a multiple of 32 bytes, a sector of memory; if it is less than a sector, rows pass through
// a tile in shared memory.
#pragma once

#include "lanes.cuh"
#include "tile.cuh"

namespace gradscale {

template <class T, int width, int lanes_per_row, int unit>
struct LaneUnits {
  static constexpr int kElementsPerSector = 32 / static_cast<int>(sizeof(T));
  static constexpr int kUnit = unit;
  static constexpr int kStep = lanes_per_row * unit; // elements from one unit of a lane to its next
  static constexpr bool kTiled = kStep < kElementsPerSector;
  static constexpr int kMostBefore = kTiled ? 0 : kElementsPerSector - unit; // elements of the sector before the row
  static constexpr int kUnits = (width + kMostBefore + kStep - 1) / kStep;   // of a lane
  static constexpr int kElements = kUnits * unit;
  static constexpr int kMiddle = kUnits / 2;
  using Values = float[kElements];
  template <class U>
  using Words = Packed<U, unit>[kUnits];

  int32_t first; // the index of this lane's first element; negative: before the row

  GRADSCALE_DEVICE static LaneUnits of_row(const T* row, int lane) {
    const int32_t first = unit * (lane % lanes_per_row);
    if constexpr (kTiled) {
      return {first};
    } else {
      return {first - static_cast<int32_t>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kElementsPerSector)};
    }
  }

  // True if unit `c` is inside the row. Constant for most units.
  GRADSCALE_DEVICE bool exists(int c) const {
    if (kStep * (c + 1) > width) {
      return static_cast<uint32_t>(first + kStep * c) < static_cast<uint32_t>(width);
    }
    return kTiled || c > 0 || first >= 0;
  }

  // The index of element n of this lane is first + index(n). Its distance from the middle of the row, in elements, is
  // distance(n) + middle(), where distance(n) is a constant whole number, so that sums over it are exact.
  GRADSCALE_DEVICE static constexpr int index(int n) {
    return kStep * (n / unit) + n % unit;
  }
  GRADSCALE_DEVICE static constexpr float distance(int n) {
    return static_cast<float>(index(n) - kStep * kMiddle);
  }
  GRADSCALE_DEVICE float middle() const {
    return static_cast<float>(first + kStep * kMiddle) - 0.5f * (width - 1);
  }

  template <class U>
  GRADSCALE_DEVICE void load(const U* row, float outside, Words<U>& units) const {
    const U* const from = kTiled ? row + first : kept(row + first);
    float values[unit];
#pragma unroll
    for (int k = 0; k < unit; ++k) {
      values[k] = outside;
    }
#pragma unroll
    for (int c = 0; c < kUnits; ++c) {
      units[c] = packed<U, unit>(values);
      if (exists(c)) {
        if constexpr (kTiled) {
          units[c] = *reinterpret_cast<const Packed<U, unit>*>(from + kStep * c);
        } else {
          units[c] = load_packed<U, unit>(from + kStep * c);
        }
      }
    }
  }

  template <class U>
  GRADSCALE_DEVICE void store(U* row, const Values& values) const {
    U* const to = kTiled ? row + first : kept(row + first);
#pragma unroll
    for (int c = 0; c < kUnits; ++c) {
      if (exists(c)) {
        const auto words = packed<U, unit>(values + unit * c);
        if constexpr (kTiled) {
          *reinterpret_cast<Packed<U, unit>*>(to + kStep * c) = words;
        } else {
          store_packed(to + kStep * c, words);
        }
      }
    }
  }
};

} // namespace gradscale
