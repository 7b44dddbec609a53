// The elements of a row of logits that one lane owns, in device memory or in a tile in shared memory.
#pragma once

#include "lanes.cuh"

namespace gradscale {

// ---- Short rows in shared memory ------------------------------------------------------------------------------------

// Up to 32 short rows of a warp in shared memory. All lanes together copy them from and to device memory, 16 bytes per
// lane if the rows are contiguous. Between the copies, each lane reads and writes elements of its own row.

// Rows in device memory or in a tile, `stride` elements apart.
template <class T>
struct RowsInMemory {
  T* data;
  int64_t stride;

  GRADSCALE_DEVICE T* row(int64_t index) const {
    return data + index * stride;
  }
};

template <class T, int width>
class Tile {
  static constexpr int kRowBytes = width * static_cast<int>(sizeof(T));
  static constexpr int kPitch = tile_pitch(width, static_cast<int>(sizeof(T)));
  static constexpr int kVectors = 2 * kRowBytes; // 16 bytes each, in 32 rows
  static constexpr int kVectorsPerLane = (kVectors + 31) / 32;
  static constexpr int kPending = 8; // loads that a lane issues before it waits for the first

 public:
  static constexpr int kBytes = 32 * kPitch;

  // `shared`: kBytes of shared memory, aligned to 16 bytes.
  GRADSCALE_DEVICE Tile(char* shared, int lane) : shared_(shared), lane_(lane) {
  }

  GRADSCALE_DEVICE RowsInMemory<T> rows() const {
    return {reinterpret_cast<T*>(shared_), kPitch / static_cast<int>(sizeof(T))};
  }

  GRADSCALE_DEVICE void load(const RowsInMemory<const T>& from, int count) const {
    if (!is_contiguous(from, count)) {
      copy_elements(from, rows(), count);
      return;
    }
#pragma unroll
    for (int first = 0; first < kVectorsPerLane; first += kPending) {
      uint4 vectors[kPending];
#pragma unroll
      for (int i = 0; i < kPending; ++i) {
        vectors[i] = {}; // otherwise, its registers would be kept for a value from before
        if (exists(first + i)) {
          vectors[i] = load16<uint4>(reinterpret_cast<const uint4*>(from.data) + vector(first + i));
        }
      }
#pragma unroll
      for (int i = 0; i < kPending; ++i) {
        if (exists(first + i)) {
          *in_tile(vector(first + i)) = vectors[i];
        }
      }
    }
  }

  GRADSCALE_DEVICE void store(const RowsInMemory<T>& to, int count) const {
    if (!is_contiguous(to, count)) {
      copy_elements(rows(), to, count);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      if (exists(i)) {
        reinterpret_cast<uint4*>(to.data)[vector(i)] = *in_tile(vector(i));
      }
    }
  }

 private:
  template <class U>
  GRADSCALE_DEVICE static bool is_contiguous(const RowsInMemory<U>& rows, int count) {
    return count == 32 && rows.stride == width && aligned(rows.data);
  }
  // Neighbouring lanes copy neighbouring elements.
  template <class From>
  GRADSCALE_DEVICE void copy_elements(const RowsInMemory<From>& from, const RowsInMemory<T>& to, int count) const {
#pragma unroll 8
    for (int i = lane_; i < count * width; i += 32) {
      to.row(i / width)[i % width] = from.row(i / width)[i % width];
    }
  }
  GRADSCALE_DEVICE int vector(int index) const {
    return 32 * index + lane_;
  }
  GRADSCALE_DEVICE bool exists(int index) const {
    return 32 * index + 32 <= kVectors || vector(index) < kVectors;
  }
  GRADSCALE_DEVICE uint4* in_tile(int vector) const {
    const int gaps = kPitch == kRowBytes ? 0 : vector / (kRowBytes / 16); // 16 bytes after each row
    return reinterpret_cast<uint4*>(shared_) + vector + gaps;
  }

  char* shared_;
  int lane_;
};

// ---- The elements of a row that one lane owns -----------------------------------------------------------------------

// `lanes_per_row` lanes of a warp own a row together. Its elements are grouped into vectors of `vector_size` elements,
// and a lane owns every lanes_per_row-th vector. If `at_once` is true, vectors are aligned to their size, and a lane
// accesses one at once; otherwise its elements are accessed one by one. If the width is odd, a row may begin at an odd
// element: its first and last aligned vectors may be partly outside of the row. The lanes of a row access lanes_per_row
// vectors at once, from the beginning of a sector of memory (32 bytes) on. If these vectors are less than a sector,
// rows are copied through a tile in shared memory.
//
// A sum over a row has the same bits wherever the row begins, although that decides which lane owns which elements:
//
// - elements whose indices are equal modulo kStep belong to one lane, which adds them in the order of their indices;
// - if a row may begin at an odd element, the lane has a sum for each element of a vector, a chain, and joined() adds
//   the chains of elements 2 i and 2 i + 1, although their lane may be the next one;
// - lane_sum() adds the lanes at half of the distance around the row, then at a quarter, and so on, so that rotating
//   the lanes does not change it;
// - terms do not depend on where the row begins, and elements outside of it add 0.

constexpr int log2_of(int power) {
  return power == 1 ? 0 : 1 + log2_of(power / 2);
}

template <class T, int width, int lanes_per_row, int vector_size, bool at_once>
struct LaneVectors {
  static constexpr int kElementsPerSector = 32 / static_cast<int>(sizeof(T));
  static constexpr int kWidth = width, kLanes = lanes_per_row, kVectorSize = vector_size;
  static constexpr int kStep = lanes_per_row * vector_size; // elements from one vector of a lane to its next
  static constexpr bool kTiled = kStep < kElementsPerSector;
  static constexpr bool kSplits = width % vector_size != 0; // vectors may be partly outside of the row
  static constexpr int kMostBefore =
      kTiled ? 0 : kElementsPerSector - (kSplits ? 1 : vector_size);         // elements before the row
  static constexpr int kVectors = (width + kMostBefore + kStep - 1) / kStep; // of a lane
  static constexpr int kElements = kVectors * vector_size;
  static constexpr int kMiddle = kVectors / 2;
  static constexpr int kChains = kSplits ? vector_size : 1;
  static_assert(vector_size <= 2);
  using Values = float[kElements];
  using Mask = std::conditional_t<(kElements >= 32), uint64_t, uint32_t>; // a bit for each element
  template <class U>
  using Words = Vector<U, vector_size>[kVectors];

  int32_t first; // the index of this lane's first element; negative: before the row

  GRADSCALE_DEVICE static LaneVectors from_row(const T* row, int lane) {
    const int32_t first = vector_size * (lane % lanes_per_row);
    if constexpr (kTiled) {
      return {first};
    } else {
      const auto before = static_cast<int32_t>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kElementsPerSector);
      return {first - (at_once ? before : before & -vector_size)};
    }
  }

  // The chain of element n.
  GRADSCALE_DEVICE static constexpr int chain(int n) {
    return n % kChains;
  }

  // The sum of two chains of the row: of elements 2 i and 2 i + 1.
  GRADSCALE_DEVICE float joined(const float (&chains)[kChains]) const {
    if constexpr (kChains == 1) {
      return chains[0];
    } else {
      const float next = __shfl_sync(kWholeWarp, chains[0], static_cast<int>(threadIdx.x) + 1, lanes_per_row);
      return chains[1] + ((first & 1) == 0 ? chains[0] : next);
    }
  }

  // The number of this lane among the lanes of the row, counted from the lane whose joined() has element 0.
  GRADSCALE_DEVICE int rank() const {
    return ((first + vector_size - 1) >> log2_of(vector_size)) & (lanes_per_row - 1);
  }

  // True if element n is inside the row. The result is a compile-time constant for most elements.
  GRADSCALE_DEVICE bool exists(int n) const {
    return is_inside(n) || static_cast<uint32_t>(first + compared(n)) < static_cast<uint32_t>(width);
  }

  // True if element n is inside, wherever the row begins.
  GRADSCALE_DEVICE static constexpr bool is_inside(int n) {
    return compared(n) >= kMostBefore && compared(n) + kStep - vector_size < width;
  }

  // True if all of vector c is inside, wherever the row begins.
  GRADSCALE_DEVICE static constexpr bool is_whole(int c) {
    return is_inside(vector_size * c) && is_inside(vector_size * c + vector_size - 1);
  }

  // A bit for each of this lane's elements that are among `count` elements of the row from `begin` on.
  GRADSCALE_DEVICE Mask mask(int32_t begin, int32_t count) const {
    using Few = std::conditional_t<lanes_per_row == 1, Mask, uint32_t>; // wide enough for the bins with mass of a row
    const int32_t low = elements_before(begin);
    return static_cast<Mask>((Few(1) << (elements_before(begin + count) - low)) - 1) << low;
  }
  GRADSCALE_DEVICE int32_t elements_before(int32_t index) const {
    int32_t count = 0;
#pragma unroll
    for (int k = 0; k < vector_size; ++k) {
      count += (index - first + kStep - 1 - k) >> log2_of(kStep);
    }
    return count;
  }

  // The index of element n of this lane is first + index(n). Its distance from the middle of the row, in elements, is
  // distance(n) + middle(), where distance(n) is a constant whole number, so that sums over it are exact.
  GRADSCALE_DEVICE static constexpr int index(int n) {
    return kStep * (n / vector_size) + n % vector_size;
  }
  GRADSCALE_DEVICE static constexpr float distance(int n) {
    return static_cast<float>(index(n) - kStep * kMiddle);
  }
  GRADSCALE_DEVICE float middle() const {
    return static_cast<float>(first + kStep * kMiddle) - 0.5f * (width - 1);
  }

  template <class U>
  GRADSCALE_DEVICE void load(const U* row, float outside, Words<U>& vectors) const {
    const U* const from = kTiled ? row + first : kept(row + first);
    float values[vector_size];
#pragma unroll
    for (int k = 0; k < vector_size; ++k) {
      values[k] = outside;
    }
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      vectors[c] = packed<U, vector_size>(values);
      if (is_split(c)) {
#pragma unroll
        for (int k = 0; k < vector_size; ++k) {
          if (exists(vector_size * c + k)) {
            set(vectors[c], k, load_vector<U, 1>(from + kStep * c + k));
          }
        }
      } else if (exists(vector_size * c)) {
        if constexpr (kTiled) {
          vectors[c] = *reinterpret_cast<const Vector<U, vector_size>*>(from + kStep * c);
        } else {
          vectors[c] = load_vector<U, vector_size>(from + kStep * c);
        }
      }
    }
  }

  template <class U>
  GRADSCALE_DEVICE void store(U* row, const Values& values) const {
    U* const to = kTiled ? row + first : kept(row + first);
    const LaneVectors again{opaque(first)}; // comparisons are repeated: keeping their results costs more
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      if (is_split(c)) {
#pragma unroll
        for (int k = 0; k < vector_size; ++k) {
          if (again.exists(vector_size * c + k)) {
            store_vector(to + kStep * c + k, packed<U, 1>(values + vector_size * c + k));
          }
        }
      } else if (again.exists(vector_size * c)) {
        const auto words = packed<U, vector_size>(values + vector_size * c);
        if constexpr (kTiled) {
          *reinterpret_cast<Vector<U, vector_size>*>(to + kStep * c) = words;
        } else {
          store_vector(to + kStep * c, words);
        }
      }
    }
  }

 private:
  // The index that is compared with the row's bounds for element n: of its vector's first element, if no vector is
  // split.
  GRADSCALE_DEVICE static constexpr int compared(int n) {
    return index(kSplits ? n : n - n % vector_size);
  }
  // True if the elements of vector c are accessed one by one.
  GRADSCALE_DEVICE static constexpr bool is_split(int c) {
    return !at_once || (kSplits && !is_whole(c));
  }
};

} // namespace gradscale
