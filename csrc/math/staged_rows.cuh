// Short rows of a warp in shared memory: 32 rows come from and go to device memory in windows of 16 bytes, by all lanes
// together, and each lane reads and writes one row.
#pragma once

#include "rows.cuh"
#include "thread_row.h"
#include "words.cuh"

namespace gradscale {

// Up to 32 rows in device memory, `stride` elements apart.
template <class T>
struct RowsOfWarp {
  T* data;
  int64_t stride;
  int32_t count;

  // Whether the rows are 32 that lie one after the other, from a multiple of 16 bytes on.
  GRADSCALE_DEVICE bool are_windows(int width) const {
    return count == 32 && stride == width && aligned(data);
  }
};

// Rows first .. first + count, which a warp has.
struct WarpOfRows {
  int64_t first;
  int32_t count; // up to 32; none or less: there is nothing to do
  int lane;

  // The rows of this thread's warp among all rows, 32 a warp.
  GRADSCALE_DEVICE static WarpOfRows in_block(int64_t block, int64_t rows) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t first = (block * (kRowThreads / 32) + warp) * 32;
    const int64_t left = rows - first;
    return {first, static_cast<int32_t>(left < 32 ? left : 32), static_cast<int>(threadIdx.x) % 32};
  }

  // The row of this lane; lanes beyond the last row have that one.
  GRADSCALE_DEVICE int64_t own() const {
    return first + (is_active() ? lane : count - 1);
  }
  GRADSCALE_DEVICE bool is_active() const {
    return lane < count;
  }
  template <class T>
  GRADSCALE_DEVICE RowsOfWarp<T> of(T* data, int64_t stride) const {
    return {data + first * stride, stride, count};
  }
};

template <class T, int width>
class StagedRows {
  static constexpr int kRowBytes = width * static_cast<int>(sizeof(T));
  // What a lane reads or writes at once: the largest power of two that divides a row, up to a window.
  static constexpr int kUnitBytes = kRowBytes % 16 == 0 ? 16 : (kRowBytes % 8 == 0 ? 8 : (kRowBytes % 4 == 0 ? 4 : 2));
  static constexpr int kPitch = pitch_of_thread(width, static_cast<int>(sizeof(T)));
  static constexpr int kWindows = 2 * kRowBytes; // of 32 rows
  static constexpr int kWindowsOfLane = (kWindows + 31) / 32;
  static constexpr int kAtOnce = 8; // windows that a lane asks for before it waits

 public:
  static constexpr int kBytes = 32 * kPitch;
  static constexpr int kUnit = kUnitBytes / static_cast<int>(sizeof(T)); // elements
  static constexpr int kBatches = (kWindowsOfLane + kAtOnce - 1) / kAtOnce;

  GRADSCALE_DEVICE StagedRows(char* shared, int lane) : shared_(shared), lane_(lane) {
  }

  // Asks for a batch of the windows of this lane; put() places them in shared memory. What is computed between these
  // does not wait for them.
  GRADSCALE_DEVICE void ask(const RowsOfWarp<const T>& rows, int batch) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (has_window(batch * kAtOnce + i)) {
        asked_[i] = load16<Words16>(reinterpret_cast<const Words16*>(rows.data) + window(batch * kAtOnce + i));
      }
    }
  }
  GRADSCALE_DEVICE void put(int batch) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (has_window(batch * kAtOnce + i)) {
        put16(place_of(window(batch * kAtOnce + i)), asked_[i]);
      }
    }
  }

  // The same for all windows from the given batch on.
  GRADSCALE_DEVICE void bring(const RowsOfWarp<const T>& rows, int first_batch) {
#pragma unroll
    for (int batch = first_batch; batch < kBatches; ++batch) {
      ask(rows, batch);
      put(batch);
    }
  }

  // Places rows that are no windows, element by element. Neighbouring lanes read neighbouring elements.
  GRADSCALE_DEVICE void put_elements(const RowsOfWarp<const T>& rows) const {
#pragma unroll 8
    for (int i = lane_; i < rows.count * width; i += 32) {
      const int row = i / width;
      element(row, i % width) = rows.data[row * rows.stride + i % width];
    }
  }

  // Brings the rows of all lanes to device memory.
  GRADSCALE_DEVICE void write(const RowsOfWarp<T>& rows) const {
    if (rows.are_windows(width)) {
#pragma unroll
      for (int i = 0; i < kWindowsOfLane; ++i) {
        if (has_window(i)) {
          put16(reinterpret_cast<Words16*>(rows.data) + window(i), *place_of(window(i)));
        }
      }
      return;
    }
#pragma unroll 8
    for (int i = lane_; i < rows.count * width; i += 32) {
      const int row = i / width;
      rows.data[row * rows.stride + i % width] = element(row, i % width);
    }
  }

  // Reads or writes elements first .. first + size of this lane's row; both are multiples of kUnit.
  template <int size>
  GRADSCALE_DEVICE void get(int first, float (&values)[size]) const {
    static_assert(size % kUnit == 0);
#pragma unroll
    for (int k = 0; k < size; k += kUnit) {
      unpack(*unit(first + k), values + k);
    }
  }
  template <int size>
  GRADSCALE_DEVICE void set(int first, const float (&values)[size]) const {
    static_assert(size % kUnit == 0);
#pragma unroll
    for (int k = 0; k < size; k += kUnit) {
      *unit(first + k) = packed<T, kUnit>(values + k);
    }
  }

  // Sets this lane's row to 0.
  GRADSCALE_DEVICE void clear() const {
#pragma unroll
    for (int first = 0; first < width; first += kUnit) {
      *unit(first) = Packed<T, kUnit>{};
    }
  }

  // An element of this lane's row that is not known before.
  GRADSCALE_DEVICE T& operator[](int k) const {
    return element(lane_, k);
  }

 private:
  GRADSCALE_DEVICE int window(int index) const {
    return 32 * index + lane_;
  }
  GRADSCALE_DEVICE bool has_window(int index) const {
    return 32 * index + 32 <= kWindows || window(index) < kWindows;
  }
  GRADSCALE_DEVICE Words16* place_of(int window) const {
    const int gaps = kPitch == kRowBytes ? 0 : window / (kRowBytes / 16); // one behind each row
    return reinterpret_cast<Words16*>(shared_) + window + gaps;
  }
  GRADSCALE_DEVICE T& element(int row, int k) const {
    return reinterpret_cast<T*>(shared_ + row * kPitch)[k];
  }
  GRADSCALE_DEVICE Packed<T, kUnit>* unit(int first) const {
    return reinterpret_cast<Packed<T, kUnit>*>(shared_ + lane_ * kPitch + first * static_cast<int>(sizeof(T)));
  }

  char* shared_; // kBytes, at a multiple of 16
  int lane_;
  Words16 asked_[kAtOnce];
};

} // namespace gradscale
