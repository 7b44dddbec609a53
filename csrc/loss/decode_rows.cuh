// The kernels that decode rows of logits to scalars, or compute the gradient of that, of float
// and half types, a width that is known at compile time, supports that are not raw.
//
// decode_by_warps, decode_gradient_by_warps      a warp has up to 32 rows, one after the other: all lanes have a part
// of
//                                                each, and lane r decodes row r in the end
// decode_by_threads                              rows of few bins, 32 a warp, of which a thread has one
//
// Bytes: logits are read once, and a gradient is written once. Blocks are small, so that multiprocessors are full
// although rows take many registers.
#pragma once

#include "../math/thread_row.cuh"
#include "../math/warp_row.cuh"
#include "device_arguments.h"

namespace gradscale {

// The rows of a warp.
template <class T, int width>
struct WarpOfDecoding {
  int64_t first;
  int count; // none: there is nothing to do
  int lane;
  const T* own; // of the first row, at this lane's window

  GRADSCALE_DEVICE explicit WarpOfDecoding(const DecodeArguments& arguments) {
    constexpr int warps = kRowThreads / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32;
    first = warp * arguments.rows_of_warp;
    const int64_t left = arguments.count - first;
    count = left < arguments.rows_of_warp ? static_cast<int>(left < 0 ? 0 : left) : arguments.rows_of_warp;
    const Rows& logits = arguments.decoding.logits;
    own = static_cast<const T*>(logits.data) + first * logits.stride + kWindow * lane;
  }
};

struct NothingAsked {};

// The blocks that a multiprocessor is to hold, of threads with so many registers for each window of a row.
template <int width>
GRADSCALE_HOST_DEVICE constexpr int blocks_of_warps(int registers_of_window, int others) {
  return 65536 / 128 / larger_of(RowPlace<width>::kWindows * registers_of_window + others, 64);
}

template <class T, int width, Transform transform>
GRADSCALE_KERNEL(kRowThreads, blocks_of_warps<width>(sizeof(T), 42))
decode_by_warps(GRADSCALE_ARGUMENT(DecodeArguments) arguments) {
  const WarpOfDecoding<T, width> warp(arguments);
  if (warp.count == 0) {
    return;
  }
  WarpRow<T, width> row(warp.lane);
  row.load(warp.own);
  WarpSoftmax of_own{};
  walk_rows<false, 1>(
      row,
      warp.own,
      arguments.decoding.logits.stride,
      warp.count,
      [](int, Constant<0>, const T*, bool) { return NothingAsked(); },
      [&](int i, Constant<0>, const T*, const auto&, auto&, const WarpSoftmax& softmax, NothingAsked) {
        of_own = warp.lane == i ? softmax : of_own;
      });
  if (warp.lane < warp.count) {
    const FloatSupport& support = arguments.rounded;
    const float expected = support.middle + support.spacing * (of_own.moment / of_own.sum);
    arguments.decoding.out.store(warp.first + warp.lane, inverse_transform_value(transform, expected, support.eps));
  }
}

// inverse_transform_slope() in few instructions, a few units of the last place off.
GRADSCALE_DEVICE float approximate_slope(Transform transform, float y, float eps) {
  if (transform != Transform::signed_hyperbolic || eps > 1) {
    return inverse_transform_slope(transform, y, eps);
  }
  const float square = 0.25f + eps * (std::abs(y) + (1 + eps)); // of half the derivative of y by v
  const float reciprocal = approximate_reciprocal_root(square);
  const float v = std::abs(y) * approximate_reciprocal(square * reciprocal + (0.5f + eps)) + 1; // x = v^2 - 1
  return v * reciprocal;
}

// Leaves c p_j (j - E) in the place of exponentials e_j, E being the expectation in bins. Where the softmax is narrow,
// little is left of the distance from E: so the moment is taken once more, from the whole number next to E.
template <int width, class Slope>
GRADSCALE_DEVICE void decode_gradient(
    float (&e)[RowPlace<width>::kWindows][kWindow],
    const RowPlace<width>& place,
    const WarpSoftmax& softmax,
    Slope slope) {
  constexpr int windows = RowPlace<width>::kWindows;
  constexpr int middle = windows / 2;
  const float inverse_sum = approximate_reciprocal(softmax.sum);
  const float first = static_cast<float>(kWindow * place.lane + 128 * middle - place.shift) - 0.5f * (width - 1);
  const float center = std::rint(softmax.moment * inverse_sum);
  const float from_center = first - center;
  float moment[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kWindow * windows; ++i) {
    const int c = i / kWindow, k = i % kWindow;
    moment[i % 2] += e[c][k] * (static_cast<float>(128 * (c - middle) + k) + from_center);
  }
  const float rest = warp_sum(moment[0] + moment[1]) * inverse_sum;
  const float factor = slope(center, rest) * inverse_sum;
  const float offset = -factor * rest;
#pragma unroll
  for (int i = 0; i < kWindow * windows; ++i) {
    const int c = i / kWindow, k = i % kWindow;
    e[c][k] *= factor * (static_cast<float>(128 * (c - middle) + k) + from_center) + offset;
  }
}

template <class T, int width, Transform transform, bool begins_alike>
GRADSCALE_KERNEL(kRowThreads, blocks_of_warps<width>(sizeof(T) + kWindow + 1, 48))
decode_gradient_by_warps(GRADSCALE_ARGUMENT(DecodeArguments) arguments) {
  const WarpOfDecoding<T, width> warp(arguments);
  if (warp.count == 0) {
    return;
  }
  const Decoding& decoding = arguments.decoding;
  WarpRow<T, width> row(warp.lane);
  row.load(warp.own);
  const int own = warp.lane < warp.count ? warp.lane : warp.count - 1;
  const FloatSupport& support = arguments.rounded;
  const float coefficient = static_cast<float>(decoding.grad_output.load(warp.first + own)) * support.spacing;
  T* gradient = static_cast<T*>(decoding.gradient.data) + warp.first * decoding.gradient.stride + kWindow * warp.lane;
  walk_rows<false, 1>(
      row,
      warp.own,
      decoding.logits.stride,
      warp.count,
      [](int, Constant<0>, const T*, bool) { return NothingAsked(); },
      [&](int i, Constant<0>, const T*, const auto& place, auto& e, const WarpSoftmax& softmax, NothingAsked) {
        decode_gradient<width>(e, place, softmax, [&](float center, float rest) {
          const float expected = support.middle + support.spacing * (center + rest);
          return __shfl_sync(kWholeWarp, coefficient, i) * approximate_slope(transform, expected, support.eps);
        });
        if constexpr (begins_alike) {
          store_row<width>(gradient, place, e);
        } else {
          store_elements<width>(gradient, place, e);
        }
        gradient += decoding.gradient.stride;
      });
}

// The computation of 32 rows of few bins; G is the type of gradients, void where values are wanted.
template <class T, class G, int width>
class ThreadDecoding : RowsOfThreads<T, G, width> {
  using Base = RowsOfThreads<T, G, width>;
  using Row = ThreadRow<T, width>;
  static constexpr int kGroup = Base::Logits::kUnit;

 public:
  static constexpr int kSharedBytes = Base::kBytes;

  GRADSCALE_DEVICE ThreadDecoding(const DecodeArguments& arguments, const WarpOfRows& rows, char* shared)
      : Base(rows, shared), decoding_(arguments.decoding), support_(arguments.rounded) {
  }

  GRADSCALE_DEVICE void compute(Transform transform) {
    NotStaged none;
    const Rows& logits = decoding_.logits;
    const float coefficient = this->stage(logits.data, logits.stride, none, [&](int64_t own) {
      return Base::kWantsGradient ? static_cast<float>(decoding_.grad_output.load(own)) : 0.0f;
    });
    Row row(this->logits_);
    const ThreadSoftmax softmax = softmax_of<kGroup>(row);
    if constexpr (Base::kWantsGradient) {
      put_gradient(row, softmax, transform, coefficient);
      this->write_gradient(decoding_.gradient.data, decoding_.gradient.stride, true);
    } else if (this->rows_.is_active()) {
      const float expected = support_.middle + support_.spacing * (0.5f * softmax.moment / softmax.sum);
      decoding_.out.store(this->rows_.own(), inverse_transform_value(transform, expected, support_.eps));
    }
  }

 private:
  // Leaves c p_j (j - E) in shared memory. As in decode_gradient(), the moment is taken once more, from a whole number.
  GRADSCALE_DEVICE void put_gradient(
      const Row& row, const ThreadSoftmax& softmax, Transform transform, float coefficient) const {
    const float center = std::rint(softmax.moment * softmax.inverse_sum); // of 2j + 1 - width
    TwoSums moment;
    each_group(row, softmax.maximum, [&](int first, const float(&e)[kGroup]) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        moment.add(first + k, e[k], static_cast<float>(2 * (first + k) + 1 - width) - center);
      }
    });
    row.forget();
    const float rest = moment.total() * softmax.inverse_sum;
    const float expected = support_.middle + support_.spacing * (0.5f * (center + rest));
    const float slope = approximate_slope(transform, expected, support_.eps);
    const float factor = coefficient * (0.5f * support_.spacing) * slope * softmax.inverse_sum;
    each_group(row, softmax.maximum, [&](int first, float(&e)[kGroup]) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        e[k] *= factor * ((static_cast<float>(2 * (first + k) + 1 - width) - center) - rest);
      }
      this->gradient_.set(first, e);
    });
  }

  // Calls function(first, exponentials) for groups of bins.
  template <class Function>
  GRADSCALE_DEVICE static void each_group(const Row& row, float maximum, Function function) {
#pragma unroll
    for (int first = 0; first < width; first += kGroup) {
      float e[kGroup];
      row.get_exponentials(first, maximum, e);
      function(first, e);
    }
  }

  const Decoding& decoding_;
  const FloatSupport& support_;
};

template <class T, class G, int width, Transform transform>
GRADSCALE_KERNEL(kRowThreads, blocks_of_threads(width))
decode_by_threads(GRADSCALE_ARGUMENT(DecodeArguments) arguments) {
  using Computation = ThreadDecoding<T, G, width>;
  constexpr int size = Computation::kSharedBytes / 16;
  GRADSCALE_SHARED(Words16, shared, kRowThreads / 32 * size);
  const WarpOfRows rows = WarpOfRows::in_block(blockIdx.x, arguments.count);
  if (rows.count > 0) {
    char* const of_warp = reinterpret_cast<char*>(shared + static_cast<int>(threadIdx.x) / 32 * size);
    Computation(arguments, rows, of_warp).compute(transform);
  }
}

} // namespace gradscale
