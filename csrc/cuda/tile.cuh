// Up to 32 short rows of a warp in shared memory. All lanes together copy them from and to device memory, 16 bytes a
// lane where the rows are contiguous; then each lane reads and writes its own row.
#pragma once

#include "rows.cuh"
#include "words.cuh"

namespace gradscale {

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

  // `shared` is kBytes at a multiple of 16.
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
      Words16 vectors[kPending];
#pragma unroll
      for (int i = 0; i < kPending; ++i) {
        if (exists(first + i)) {
          vectors[i] = load16<Words16>(reinterpret_cast<const Words16*>(from.data) + vector(first + i));
        }
      }
#pragma unroll
      for (int i = 0; i < kPending; ++i) {
        if (exists(first + i)) {
          put16(in_tile(vector(first + i)), vectors[i]);
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
        put16(reinterpret_cast<Words16*>(to.data) + vector(i), *in_tile(vector(i)));
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
  GRADSCALE_DEVICE Words16* in_tile(int vector) const {
    const int gaps = kPitch == kRowBytes ? 0 : vector / (kRowBytes / 16); // 16 bytes after each row
    return reinterpret_cast<Words16*>(shared_) + vector + gaps;
  }

  char* shared_;
  int lane_;
};

} // namespace gradscale
