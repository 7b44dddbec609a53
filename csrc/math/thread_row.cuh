// Short rows of logits, a thread each.
//
// A warp has 32 rows, which come and go through shared memory (staged_rows.cuh); a thread computes its row alone, and
// nothing is exchanged. Rows of up to 32 elements stay in registers; longer ones are read from shared memory in each
// pass.
#pragma once

#include "staged_rows.cuh"

namespace gradscale {

GRADSCALE_HOST_DEVICE constexpr int larger_of(int a, int b) {
  return a > b ? a : b;
}

// A lane's row of logits, in registers or in shared memory.
template <class T, int width>
class ThreadRow {
 public:
  static constexpr bool kCached = width <= 32;
  using Staged = StagedRows<T, width>;

  GRADSCALE_DEVICE explicit ThreadRow(const Staged& staged) : staged_(staged) {
    if constexpr (kCached) {
      staged.get(0, cached_);
    }
  }

  // Logits first .. first + size.
  template <int size>
  GRADSCALE_DEVICE void get(int first, float (&values)[size]) const {
    if constexpr (kCached) {
#pragma unroll
      for (int k = 0; k < size; ++k) {
        values[k] = cached_[first + k];
      }
    } else {
      staged_.get(first, values);
    }
  }

  // Passes NaN over.
  GRADSCALE_DEVICE float maximum() const {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int first = 0; first < width; first += Staged::kUnit) {
      float values[Staged::kUnit];
      get(first, values);
#pragma unroll
      for (int k = 0; k < Staged::kUnit; ++k) {
        largest[(first + k) % 2] = larger(largest[(first + k) % 2], values[k]);
      }
    }
    forget();
    return larger(largest[0], largest[1]);
  }

  // Keeps the compiler from holding rows in registers from one pass over shared memory to the next.
  GRADSCALE_DEVICE void forget() const {
#if defined(__CUDA_ARCH__)
    if constexpr (!kCached) {
      asm volatile("" ::: "memory");
    }
#endif
  }

  // Keeps exponentials in the place of logits, where both stay in registers.
  template <int size>
  GRADSCALE_DEVICE void keep_exponentials(int first, const float (&values)[size]) {
    if constexpr (kCached) {
#pragma unroll
      for (int k = 0; k < size; ++k) {
        cached_[first + k] = values[k];
      }
    }
  }
  // The exponentials that were kept, or those of the logits once more.
  template <int size>
  GRADSCALE_DEVICE void get_exponentials(int first, float maximum, float (&values)[size]) const {
    get(first, values);
    if constexpr (!kCached) {
#pragma unroll
      for (int k = 0; k < size; ++k) {
        values[k] = approximate_exp(values[k] - maximum);
      }
    }
  }

 private:
  Staged staged_;
  float cached_[kCached ? width : 1];
};

constexpr float kLowest = -3e38f; // finite, so that 0 times it is 0

// A sum as that of its even and of its odd terms, so that fewer wait for each other, and fewer digits are lost.
struct TwoSums {
  float of[2] = {0, 0};

  GRADSCALE_DEVICE void add(int index, float term) {
    of[index % 2] += term;
  }
  GRADSCALE_DEVICE void add(int index, float factor, float other) {
    of[index % 2] += factor * other;
  }
  GRADSCALE_DEVICE float total() const {
    return of[0] + of[1];
  }
};

// The sums over a row of categorical logits.
struct ThreadSoftmax {
  float maximum;
  float sum; // of e_j = exp(x_j - maximum)
  float inverse_sum;
  float moment;      // sum of e_j (2j + 1 - width): whole numbers times 1, exactly 0 for a uniform row
  float differences; // sum of x_j - maximum
};

// Takes the sums of a row in groups of `group` elements, and leaves its exponentials in it.
template <int group, class T, int width>
GRADSCALE_DEVICE ThreadSoftmax softmax_of(ThreadRow<T, width>& row) {
  const float maximum = row.maximum();
  TwoSums sum, moment, differences;
#pragma unroll
  for (int first = 0; first < width; first += group) {
    float values[group];
    row.get(first, values);
#pragma unroll
    for (int k = 0; k < group; ++k) {
      const float difference = values[k] - maximum;
      values[k] = approximate_exp(difference);
      sum.add(first + k, values[k]);
      moment.add(first + k, values[k], static_cast<float>(2 * (first + k) + 1 - width));
      differences.add(first + k, difference);
    }
    row.keep_exponentials(first, values);
  }
  row.forget();
  const float total = sum.total();
  return {maximum, total, approximate_reciprocal(total), moment.total(), differences.total()};
}

// The blocks that a multiprocessor is to hold: as many as have registers for rows of that width.
GRADSCALE_HOST_DEVICE constexpr int blocks_of_threads(int width) {
  return width <= 6 ? 6 : (width <= 21 ? 5 : (width <= 48 ? 4 : 3));
}

// A target that does not come through shared memory.
struct NotStaged {
  GRADSCALE_DEVICE bool are_windows() const {
    return true;
  }
  GRADSCALE_DEVICE void ask() {
  }
  GRADSCALE_DEVICE void put(bool /*windows*/) {
  }
};

// The rows of a warp, logits of type T with gradients of type G, which take the place of logits in shared memory or,
// being of another type, one of their own. G is void where no gradients are wanted.
template <class T, class G, int width>
class RowsOfThreads {
 public:
  static constexpr bool kWantsGradient = !std::is_same_v<G, void>;
  using Logits = StagedRows<T, width>;
  using GradientElement = std::conditional_t<kWantsGradient, G, T>;
  using Gradient = StagedRows<GradientElement, width>;
  static constexpr bool kInPlace = std::is_same_v<T, GradientElement>;
  static constexpr int kBytes = Logits::kBytes + (kInPlace ? 0 : Gradient::kBytes);

  GRADSCALE_DEVICE RowsOfThreads(const WarpOfRows& rows, char* shared)
      : rows_(rows), logits_(shared, rows.lane), gradient_(kInPlace ? shared : shared + Logits::kBytes, rows.lane) {
  }

 protected:
  // Brings logits and targets to shared memory, and returns what prepare() makes of all else that is known of a lane's
  // row: that is read meanwhile.
  template <class Target, class Prepare>
  GRADSCALE_DEVICE auto stage(const void* logits, int64_t stride, Target& target, Prepare prepare) {
    const auto of_logits = rows_.of(static_cast<const T*>(logits), stride);
    const bool windows = of_logits.are_windows(width) && target.are_windows();
    if (windows) {
      logits_.ask(of_logits, 0);
      target.ask();
    }
    const auto prepared = prepare(rows_.own());
    if (windows) {
      logits_.put(0);
      logits_.bring(of_logits, 1);
    } else {
      logits_.put_elements(of_logits);
    }
    target.put(windows);
    __syncwarp();
    return prepared;
  }

  // Brings gradients to device memory. Those of rows that do not count are 0.
  GRADSCALE_DEVICE void write_gradient(void* gradient, int64_t stride, bool counts) const {
    if (!counts) {
      gradient_.clear();
    }
    __syncwarp();
    gradient_.write(rows_.of(static_cast<GradientElement*>(gradient), stride));
  }

  WarpOfRows rows_;
  Logits logits_;
  Gradient gradient_;
};

} // namespace gradscale
