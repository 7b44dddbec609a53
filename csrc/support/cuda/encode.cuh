// The kernels that write distributions over the bins of a support: encode and project.
#pragma once

#include "../../cuda/thread_group.cuh"
#include "../../formulas/targets.h"
#include "../kernels.h"

namespace gradscale {

// Encoding turns scalars into distributions over the bins of a support. A group of threads writes each row. Scalars are
// read from memory once, and rows are written once.

template <class T, class Target>
GRADSCALE_DEVICE void encode_row(T* row, int32_t width, const Target& target, const ThreadGroup& group) {
  using A = Accumulate<T>;
  constexpr int size = kVector<T>;
  const A elsewhere = target.is_nan() ? static_cast<A>(NAN) : A(0);
  const AlignedVectors<T> vectors(row, width);
  for (int32_t vector = group.rank; vector < vectors.count; vector += group.size) {
    A values[size];
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const int32_t j = vectors.first(vector) + k;
      values[k] = j >= target.begin && j < target.end ? static_cast<A>(target.mass(j)) : elsewhere;
    }
    write_elements<size>(row, width, vectors.first(vector), values);
  }
}

GRADSCALE_KERNEL(kThreads, 2) encode_rows(GRADSCALE_ARGUMENT(Encoding) e) {
  const int32_t width = e.support.num_bins;
  const RowOfThread own(blockIdx.x, threads_for_row(width, element_size(e.out.element)), e.count, nullptr);
  if (!own.active) {
    return;
  }
  dispatch_element(e.scalars.element, [&](auto type) {
    using T = decltype(type);
    const double x = to_accumulate(static_cast<const T*>(e.scalars.data)[own.row * e.scalars.stride]);
    T* row = static_cast<T*>(e.out.data) + own.row * e.out.stride;
    if (e.sigma_ratio > 0) {
      encode_row(row, width, hl_gauss(x, e.support, e.sigma_ratio), own.group);
    } else {
      encode_row(row, width, two_hot(x, e.support), own.group);
    }
  });
}

// The categorical projection. One warp per row; its lanes have 32 neighbouring atoms. The warp adds these to the bins
// that they reach, 32 bins at a time and always in the same order, so that results are the same from run to run.

template <class A>
GRADSCALE_DEVICE void project_row(const Projection& p, int64_t row, int lane) {
  constexpr int lanes = 32;
  const ThreadGroup warp{lanes, lane, nullptr};
  const Support& support = p.support;
  const int32_t width = support.num_bins;
  const double reward = p.rewards.load(row), discount = p.discounts.load(row);
  A* const out = static_cast<A*>(p.out.data) + row * p.out.stride;
  for (int32_t k = lane; k < width; k += lanes) { // each lane reads and writes its own bins only
    out[k] = A(0);
  }
  bool is_nan = false;
  for (int32_t first = 0; first < width; first += lanes) {
    int32_t bin = -2, least = width, most = -2; // lanes after the last atom have no bin
    A lower = A(0), upper = A(0);
    if (first + lane < width) {
      const double mass = p.probabilities.load(row, first + lane);
      const TwoHotTarget target = two_hot(reward + discount * raw_center(support, first + lane), support);
      is_nan = is_nan || target.is_nan() || mass - mass != 0;
      bin = least = most = target.begin;
      lower = static_cast<A>(mass * target.lower);
      upper = static_cast<A>(mass * target.upper);
    }
    least = warp.reduced(least, [](int32_t a, int32_t b) { return a < b ? a : b; });
    most = warp.reduced(most, [](int32_t a, int32_t b) { return a > b ? a : b; });
    for (int32_t begin = least / lanes * lanes; begin <= most + 1; begin += lanes) {
      const int32_t k = begin + lane;
      A sum = k < width ? out[k] : A(0);
      for (int other = 0; other < lanes; ++other) {
        const int32_t other_bin = __shfl_sync(kWholeWarp, bin, other);
        const A other_lower = __shfl_sync(kWholeWarp, lower, other);
        const A other_upper = __shfl_sync(kWholeWarp, upper, other);
        sum += other_bin == k ? other_lower : (other_bin + 1 == k ? other_upper : A(0));
      }
      if (k < width) {
        out[k] = sum;
      }
    }
  }
  if (__any_sync(kWholeWarp, is_nan)) {
    for (int32_t k = lane; k < width; k += lanes) {
      out[k] = static_cast<A>(NAN);
    }
  }
}

GRADSCALE_KERNEL(kThreads, 2) project_rows(GRADSCALE_ARGUMENT(Projection) p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (row >= p.count) {
    return;
  }
  if (p.out.element == Element::float64) {
    project_row<double>(p, row, lane);
  } else {
    project_row<float>(p, row, lane);
  }
}

} // namespace gradscale
