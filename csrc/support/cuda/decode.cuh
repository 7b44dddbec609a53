// The kernels that decode rows of logits to scalars, or compute the gradient of decoding. Rows have no targets.
//
// decode_by_lanes        float and half types, widths that are known at compile time, raw centres up to 2^40: rows of
//                        lane_rows.cuh
// decode_by_groups        all others: rows of thread_group.cuh
//
// Bytes: logits are read from memory once, and a gradient is written once. Groups read the logits again from the cache:
// twice to decode, five times for a gradient.
#pragma once

#include "../../cuda/lane_rows.cuh"
#include "../../cuda/thread_group.cuh"
#include "../kernels.h"

namespace gradscale {

// inverse_transform_slope() in few instructions, accurate to a few units in the last place.
GRADSCALE_DEVICE float approximate_slope(Transform transform, float y, float eps) {
  if (transform != Transform::signed_hyperbolic || eps > 1) {
    return inverse_transform_slope(transform, y, eps);
  }
  const float square = 0.25f + eps * (std::abs(y) + (1 + eps)); // (dy/dv / 2)^2
  const float reciprocal = approximate_reciprocal_root(square);
  const float v = std::abs(y) * approximate_reciprocal(square * reciprocal + (0.5f + eps)) + 1; // x = v^2 - 1
  return v * reciprocal;
}

// The expectation E, in bins from the middle. The gradient is c p_j (j - E), where c is grad_output times the slope of
// the inverse transform times the bin spacing. For a raw support, E and j are raw centres, the transform is the
// identity and the spacing is 1.
template <class Shape, Transform transform, bool raw>
class DecodeFormula : public Shape, public BinSums<raw> {
  using Bins = BinSums<raw>;
  using Bins::kMoment, Bins::kSum;

 public:
  using typename Shape::Gradient, typename Shape::Vectors, typename Shape::Values;
  using Exponent = NaturalExponent; // uniform logits decode to exactly the middle
  static constexpr int kSums = 2, kRowSums = Shape::kWantsGradient ? 2 : 0;
  static constexpr bool kKeepsDifferences = false, kFinishes = !Shape::kWantsGradient;
  static constexpr bool kHasMetrics = false;
  static constexpr bool kLoadsAhead = !Shape::kWantsGradient; // a gradient's two passes need the registers

  GRADSCALE_DEVICE DecodeFormula(const LaneDecoding& arguments, const float* raw_centers, const RowsOfWarp& warp)
      : Bins(raw_centers), decoding_(arguments.decoding), support_(arguments.rounded), warp_(warp) {
    if constexpr (Shape::kWantsGradient) {
      coefficient_ = static_cast<float>(decoding_.grad_output.load(warp.own())) * support_.spacing;
    }
  }
  GRADSCALE_DEVICE void begin_row(int owner, const Vectors&, const Exponent&) {
    owner_ = owner;
  }
  GRADSCALE_DEVICE static bool counts() {
    return true;
  }

  // For a narrow softmax, j - E cancels if both are large. So the moment is computed again, relative to the integer
  // closest to E, whose distances are exact, or to E as it was rounded: the gradient of a softmax that is 1 at one bin
  // is exactly 0.
  GRADSCALE_DEVICE void gradient(
      const float (&sums)[kSums], const Vectors& vectors, Values& e, const Values&, const Values&) {
    const float inverse_sum = approximate_reciprocal(sums[kSum]);
    const float center = raw ? sums[kMoment] / sums[kSum] : std::rint(sums[kMoment] * inverse_sum);
    const float from_center = Bins::middle(vectors) - center;
    Bins::forget_places();
    const float moment = Bins::moment(vectors, e, from_center);
    const float rest = lane_sum<Shape::kLanes>(moment) * inverse_sum; // E - center
    const float expected = support_.middle + support_.spacing * (center + rest);
    const float slope = approximate_slope(transform, expected, support_.eps);
    const float factor = from_owner<Shape::kLanes>(owner_, coefficient_) * slope * inverse_sum;
    const float offset = -factor * rest, again = opaque(from_center);
    Bins::forget_places();
#pragma unroll
    for (int n = 0; n < Shape::kElements; ++n) {
      e[n] *= factor * (Bins::place(vectors, n) + again) + offset;
    }
  }

  GRADSCALE_DEVICE void finish(const RowResults<kSums>& results, const RowsInMemory<Gradient>&) const {
    if (warp_.has_row()) {
      const float expected = support_.middle + support_.spacing * (results.sums[kMoment] / results.sums[kSum]);
      decoding_.out.store(warp_.own(), inverse_transform_value(transform, expected, support_.eps));
    }
  }

 private:
  const Decoding& decoding_;
  const FloatSupport& support_;
  const RowsOfWarp& warp_;
  float coefficient_ = 0;
  int owner_ = 0;
};

template <class T, class G, int width, int lanes_per_row, int vector_size, bool at_once, Transform transform, bool raw>
struct LanesOfDecoding {
  using Argument = std::conditional_t<raw, RawLaneDecoding, LaneDecoding>;
  using Shape = LaneShape<T, void, G, width, lanes_per_row, vector_size, at_once>;
  using Formula = DecodeFormula<Shape, transform, raw>;
  using Walk = LaneRows<Formula>;
  static constexpr int kBlocks = lane_blocks<Formula>(Formula::kWantsGradient ? (raw ? 92 : 64) : 46);

  GRADSCALE_DEVICE static void run(const Argument& arguments, char* shared) {
    const Decoding& decoding = arguments.decoding;
    const RowsOfWarp warp(
        static_cast<int>(threadIdx.x), blockIdx.x, arguments.rows_per_warp, decoding.count, lanes_per_row);
    if (warp.count > 0) {
      Walk walk(
          warp,
          warp.at(static_cast<const T*>(decoding.logits.data), decoding.logits.stride),
          {},
          warp.at(static_cast<typename Shape::Gradient*>(decoding.gradient.data), decoding.gradient.stride),
          shared + static_cast<int>(threadIdx.x) / 32 * Walk::kBytes);
      const float* raw_centers = nullptr;
      if constexpr (raw) {
        raw_centers = arguments.raw_centers.template at<float>(0);
      }
      Formula formula(arguments, raw_centers, warp);
      walk.run(formula);
    }
  }
};

template <class Rows>
GRADSCALE_KERNEL(kRowThreads, Rows::kBlocks)
decode_by_lanes(GRADSCALE_ARGUMENT(typename Rows::Argument) arguments) {
  GRADSCALE_SHARED(uint4, shared, kRowThreads / 32 * Rows::Walk::kBytes / 16 + 1);
  Rows::run(arguments, reinterpret_cast<char*>(shared));
}

// The sum of exp(x_j - maximum) weight(j) over a row.
template <class T, class A, class Weight>
GRADSCALE_DEVICE A weighted_sum(const LogitsRow<T>& row, A maximum, Weight weight) {
  A sum = 0;
  row.each_part([&](const A* x, int32_t first) {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      sum += exp_nonpositive(x[k] - maximum) * weight(first + k);
    }
  });
  return row.group.sum(sum);
}

// The index of the first of the largest logits.
template <class T, class A>
GRADSCALE_DEVICE int32_t peak_of(const LogitsRow<T>& row, A maximum) {
  double peak = row.width; // double: ThreadGroup reduces floating-point types
  row.each_part([&](const A* x, int32_t first) {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      peak = x[k] == maximum && first + k < peak ? first + k : peak;
    }
  });
  return static_cast<int32_t>(-row.group.maximum(-peak));
}

// Decodes a row with each group of threads, or writes its gradient f p_j (c_j - E). The centres c_j are raw centres, or
// bin numbers if the support is not raw; f is grad_output times the derivative of the value with respect to E. In the
// gradient, c_j and E are relative to the centre of the peak, so that the gradient of a softmax that is 1 at the peak
// is exactly 0.
template <class T>
GRADSCALE_KERNEL(kThreads, 2)
decode_by_groups(GRADSCALE_ARGUMENT(GroupDecoding) arguments) {
  using A = Accumulate<T>;
  GRADSCALE_SHARED(double, shared, kWarps);
  const Decoding& d = arguments.decoding;
  const Support& support = d.support;
  const bool raw = support.raw;
  const A* const raw_centers = raw ? arguments.raw_centers.template at<A>(0) : nullptr;
  const RowOfThread own(blockIdx.x, threads_for_row(support.num_bins, sizeof(T)), d.count, shared);
  const int32_t width = own.active ? support.num_bins : 0, last = width - 1;
  const LogitsRow<T> row{static_cast<const T*>(d.logits.data) + own.row * d.logits.stride, width, own.group};
  const A maximum = row.maximum();
  const A sum = weighted_sum(row, maximum, [](int32_t) { return A(1); });
  const A moment = raw ? raw_moment(row, maximum, raw_centers)
                       : weighted_sum(row, maximum, [&](int32_t j) { return row.position(j); });
  if (d.gradient.data == nullptr) {
    if (own.active && own.group.rank == 0) {
      d.out.store(own.row, decoded_row(moment, sum, support));
    }
    return;
  }
  const int32_t peak = peak_of(row, maximum), origin = peak < last ? peak : last; // a row of NaN has no peak
  const auto from_origin = [&](int32_t j) {
    const int32_t inside = j < last ? j : last;
    return raw ? raw_centers[inside] - raw_centers[origin] : static_cast<A>(inside - origin);
  };
  const A expected = weighted_sum(row, maximum, from_origin) / sum;
  const A slope =
      raw ? A(1)
          : inverse_transform_slope(
                support.transform, expectation_from_moment(2 * moment / sum, support), static_cast<A>(support.eps)) *
                static_cast<A>(bin_width(support));
  const A factor = static_cast<A>(d.grad_output.load(own.row)) * slope / sum;
  T* const gradient = static_cast<T*>(d.gradient.data) + own.row * d.gradient.stride;
  row.each_part([&](A* x, int32_t first) {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      x[k] = factor * exp_nonpositive(x[k] - maximum) * (from_origin(first + k) - expected);
    }
    write_elements<kVector<T>>(gradient, width, first, x);
  });
}

} // namespace gradscale
