// How the threads of a GPU share rows: the group of threads that owns a row, and reading and writing the 16-byte
// vectors that contain the row.
#pragma once

#include "../formulas/element.h"
#include "../formulas/elementary.h"
#include "../formulas/support.h"
#include "device.h"
#include "row_shape.h"

namespace gradscale {

// The threads that own a row together: neighbours in a warp, their number a power of two, or all threads of a block.
// All threads of the warp (or block) take part in each reduction.
struct ThreadGroup {
  int size;
  int rank;
  double* shared; // [kWarps], of the block

  template <class T, class Combine>
  GRADSCALE_DEVICE T reduced(T value, Combine combine) const {
    for (int distance = (size < 32 ? size : 32) / 2; distance > 0; distance /= 2) {
      value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));
    }
    if (size > 32) {
      __syncthreads(); // what was in shared memory has been read
      if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = static_cast<double>(value);
      }
      __syncthreads();
      value = static_cast<T>(shared[0]);
      for (int warp = 1; warp < size / 32; ++warp) {
        value = combine(value, static_cast<T>(shared[warp]));
      }
    }
    return value;
  }

  template <class T>
  GRADSCALE_DEVICE T sum(T value) const {
    return reduced(value, [](T a, T b) { return a + b; });
  }

  // Waits for all threads of the warp, or of the block, which see what others have written.
  GRADSCALE_DEVICE void synchronize() const {
    if (size > 32) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  // Ignores NaN.
  template <class T>
  GRADSCALE_DEVICE T maximum(T value) const {
    return reduced(value, [](T a, T b) { return larger(a, b); });
  }
};

// The lanes of this warp.
GRADSCALE_DEVICE ThreadGroup warp_threads() {
  return {32, static_cast<int>(threadIdx.x) % 32, nullptr};
}

// The threads of this block, of kThreads threads.
GRADSCALE_DEVICE ThreadGroup block_threads(double* shared) {
  return {kThreads, static_cast<int>(threadIdx.x), shared};
}

// The row of this thread, and the group of threads that owns it. `block` is the number of the thread's block among the
// blocks that have these rows. A thread beyond the last row is not active, and its row is the last one.
struct RowOfThread {
  ThreadGroup group;
  int64_t row;
  bool active;

  GRADSCALE_DEVICE RowOfThread(int64_t block, int32_t threads_per_row, int64_t rows, double* shared)
      : group{threads_per_row, static_cast<int>(threadIdx.x) % threads_per_row, shared},
        row(block * (static_cast<int>(blockDim.x) / threads_per_row) + static_cast<int>(threadIdx.x) / threads_per_row),
        active(row < rows) {
    row = active ? row : rows - 1;
  }
};

template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T)); // elements of a vector

template <class T>
struct alignas(16) Vector16 {
  T elements[kVector<T>];
};

GRADSCALE_DEVICE bool aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

// The aligned vectors of a row: vector v has kVector<T> elements from element first(v) on. Some elements of the first
// and the last vector may be outside the row.
template <class T>
struct AlignedVectors {
  int32_t shift; // elements of the first vector that come before the row
  int32_t count;

  GRADSCALE_DEVICE AlignedVectors(const T* row, int32_t width)
      : shift(static_cast<int32_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T))),
        count(width == 0 ? 0 : (shift + width + kVector<T> - 1) / kVector<T>) {
  }
  GRADSCALE_DEVICE int32_t first(int32_t vector) const {
    return vector * kVector<T> - shift;
  }
};

// Reads `size` elements of a row from element `first` on; elements outside the row are `absent`.
template <int size, class T, class A>
GRADSCALE_DEVICE void read_elements(const T* row, int32_t width, int32_t first, A absent, A* out) {
  if (size % kVector<T> == 0 && first >= 0 && first + size <= width && aligned(row + first)) {
#pragma unroll
    for (int k = 0; k < size; ++k) { // one load for kVector<T> elements
      if (k % kVector<T> == 0) {
        const Vector16<T> vector = load16<Vector16<T>>(row + first + k);
#pragma unroll
        for (int i = 0; i < kVector<T> && k + i < size; ++i) {
          out[k + i] = static_cast<A>(to_accumulate(vector.elements[i]));
        }
      }
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < size; ++k) {
    const int32_t j = first + k;
    out[k] = j >= 0 && j < width ? static_cast<A>(to_accumulate(row[j])) : absent;
  }
}

// Writes `size` elements of a row from element `first` on, except elements outside the row.
template <int size, class T, class A>
GRADSCALE_DEVICE void write_elements(T* row, int32_t width, int32_t first, const A* values) {
  using Wide = Accumulate<T>;
  if (size % kVector<T> == 0 && first >= 0 && first + size <= width && aligned(row + first)) {
#pragma unroll
    for (int k = 0; k < size; ++k) {
      if (k % kVector<T> == 0) {
        Vector16<T> vector;
#pragma unroll
        for (int i = 0; i < kVector<T> && k + i < size; ++i) {
          vector.elements[i] = from_accumulate<T, Wide>(static_cast<Wide>(values[k + i]));
        }
        store16(row + first + k, vector);
      }
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < size; ++k) {
    const int32_t j = first + k;
    if (j >= 0 && j < width) {
      row[j] = from_accumulate<T, Wide>(static_cast<Wide>(values[k]));
    }
  }
}

// Calls function(values, first) for the vectors of a thread in the group that owns a row. `values` are the
// elements from element `first` on; those outside the row are `absent`.
template <class T, class A, class Function>
GRADSCALE_DEVICE void each_vector(const T* row, int32_t width, const ThreadGroup& group, A absent, Function function) {
  const AlignedVectors<T> vectors(row, width);
  for (int32_t vector = group.rank; vector < vectors.count; vector += group.size) {
    A values[kVector<T>];
    read_elements<kVector<T>>(row, width, vectors.first(vector), absent, values);
    function(values, vectors.first(vector));
  }
}

// The same for parts of kVector<T> elements from the beginning of the row on, so that the order of sums does not depend
// on where the row begins. Elements of parts that are not aligned are read one by one.
template <class T, class A, class Function>
GRADSCALE_DEVICE void each_part(const T* row, int32_t width, const ThreadGroup& group, A absent, Function function) {
  for (int32_t first = group.rank * kVector<T>; first < width; first += group.size * kVector<T>) {
    A values[kVector<T>];
    read_elements<kVector<T>>(row, width, first, absent, values);
    function(values, first);
  }
}

// ---- Rows of logits -------------------------------------------------------------------------------------------------

// A row of logits, and the group of threads that owns it.
template <class T>
struct LogitsRow {
  using A = Accumulate<T>;
  static constexpr int kSize = kVector<T>;
  const T* logits;
  int32_t width; // 0 for threads that have no row
  ThreadGroup group;

  // Calls function(logits, first) for the parts of this thread; logits outside of the row are -inf.
  template <class Function>
  GRADSCALE_DEVICE void each_part(Function function) const {
    gradscale::each_part(logits, width, group, -static_cast<A>(INFINITY), function);
  }

  // The largest logit; -inf for a row of NaN. Also finds the largest magnitude of this thread's finite logits.
  GRADSCALE_DEVICE A maximum(A& largest_finite) const {
    A largest = -static_cast<A>(INFINITY);
    largest_finite = A(0);
    each_part([&](const A* x, int32_t) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        largest = larger(largest, x[k]);
        largest_finite = larger(largest_finite, finite_magnitude(x[k]));
      }
    });
    return group.maximum(largest);
  }
  GRADSCALE_DEVICE A maximum() const {
    A largest_finite;
    return maximum(largest_finite);
  }

  // The distance of a bin from the middle of the row, in bins.
  GRADSCALE_DEVICE A position(int32_t bin) const {
    return static_cast<A>(bin) - static_cast<A>(0.5) * static_cast<A>(width - 1);
  }
};

// sum_j e_j c_j over raw centres c_j. Bins at equal distance from the middle are added in pairs, as on the CPU.
template <class T, class A>
GRADSCALE_DEVICE A raw_moment(const LogitsRow<T>& row, A maximum, const A* centers) {
  const auto e = [&](int32_t j) { return exp_nonpositive(static_cast<A>(to_accumulate(row.logits[j])) - maximum); };
  const int32_t last = row.width - 1;
  A sum = 0;
  for (int32_t j = row.group.rank; j < (row.width + 1) / 2; j += row.group.size) {
    sum += j == last - j ? e(j) * centers[j] : pair_moment(centers[j], centers[last - j], e(j), e(last - j));
  }
  return row.group.sum(sum);
}

// Decodes a row to its scalar. `moment` is the sum of e_j times centre j, or times position j if centres are not raw.
template <class A>
GRADSCALE_DEVICE A decoded_row(A moment, A sum, const Support& support) {
  return support.raw ? moment / sum : decoded_moment(2 * moment / sum, support);
}

} // namespace gradscale
