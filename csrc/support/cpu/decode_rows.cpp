// The CPU kernels that decode and project rows. This file includes itself once for each instruction set.
#ifndef GRADSCALE_VARIANT
#include "../kernels.h"

#include <limits>

#define GRADSCALE_KERNELS "../support/cpu/decode_rows.cpp"
#include "../../cpu/each_instruction_set.h"

namespace gradscale {

const DecodeRows decode_rows_kernel = GRADSCALE_CPU_KERNEL(decode_rows);
const ProjectRows project_rows_kernel = GRADSCALE_CPU_KERNEL(project_rows);

} // namespace gradscale

#else
#include "../../cpu/softmax.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Writes the gradient of a decoded row: the derivative g'(E) p_j (c_j - E) times grad_output, with E the expectation,
// c_j the centres and g the inverse transform. `centers` are raw centres, or 2j - width + 1: centres in half bins
// around the middle. Because these are integers, the gradient of a softmax that is 1 in a bin is exactly 0.
template <class T, class A>
[[gnu::noinline]] void write_decode_gradient(
    const Decoding& d, int64_t row, const Softmax<A>& softmax, A expected, const A* centers) {
  const Support& support = d.support;
  const A slope =
      support.raw ? A(1) : inverse_transform_slope(support.transform, expected, static_cast<A>(support.eps));
  const A unit = support.raw ? A(1) : static_cast<A>(0.5 * bin_width(support)); // of `centers`
  const Lanes<A> factor = static_cast<A>(d.grad_output.load(row)) * slope / softmax.sum * unit;
  const Lanes<A> middle = support.raw ? expected : softmax.moment / softmax.sum;
  const A* values = softmax.values;
  T* out = static_cast<T*>(d.gradient.data) + row * d.gradient.stride;
  each_vector<1>(0, support.num_bins, 0, [=](int64_t j, auto lanes, auto) {
    const Lanes<A> distance = load_lanes(centers + j, lanes) - middle;
    store_lanes(out + j, load_lanes(values + j, lanes) * distance * factor, lanes);
  });
}

// Decodes a row of logits. Where a gradient is wanted, it is written instead of the value.
template <class T, class A>
void decode_row(const Decoding& d, int64_t row, Extremes<A> extremes, const A* centers, A* scratch) {
  Ahead ahead = ahead_of<T>(d.logits, d.gradient, row);
  ahead.read = row_of<T>(d.logits, row + 2); // row + 1 is in the cache: its maximum has been computed
  const Softmax<A> softmax = softmax_of<true>(row_of<T>(d.logits, row), d.support.num_bins, extremes, ahead, scratch);
  const Support& support = d.support;
  const A expected = support.raw ? raw_moment(softmax.values, support) / softmax.sum
                                 : expectation_from_moment(softmax.moment / softmax.sum, support);
  if (d.gradient.data == nullptr) {
    const auto eps = static_cast<A>(support.eps);
    d.out.store(row, support.raw ? expected : inverse_transform_value(support.transform, expected, eps));
  } else {
    write_decode_gradient<T>(d, row, softmax, expected, centers);
  }
}

void decode_rows(const Decoding& decoding, int64_t begin, int64_t end, double* scratch) {
  dispatch_element(decoding.logits.element, [&](auto type) {
    using T = decltype(type);
    using A = Accumulate<T>;
    if (begin == end) {
      return;
    }
    const int64_t width = decoding.support.num_bins;
    A* values = reinterpret_cast<A*>(scratch);
    A* places = second_row(values, width);
    for (int64_t j = 0; j < width; ++j) {
      places[j] = static_cast<A>(2 * j + 1 - width);
    }
    const A* centers = decoding.support.raw ? raw_centers(decoding.support, A()) : places;
    // The next row's maximum is found while this row's exponentials, which need this row's maximum, are computed.
    const auto extremes_of_row = [&](int64_t row) {
      return extremes_of<A, kIsFasterInRange>(row_of<T>(decoding.logits, row), width);
    };
    Extremes<A> next = extremes_of_row(begin);
    for (int64_t row = begin; row < end; ++row) {
      const Extremes<A> extremes = next;
      if (row + 1 < end) {
        next = extremes_of_row(row + 1);
      }
      decode_row<T>(decoding, row, extremes, centers, values);
    }
  });
}

// The projection of a row's atoms.
struct Atoms {
  double* upper;    // by atom: the mass that goes to the bin above
  double* lower;    // by atom: the mass that goes to the bin below
  double* to_lower; // by bin: the sum of `lower` over the atoms that have this bin below
  double* to_upper; // by bin: the sum of `upper` over the same atoms, which goes to the next bin
  int32_t* bins;    // by atom: the bin below

  Atoms(double* scratch, int64_t width)
      : upper(scratch),
        lower(scratch + width),
        to_lower(scratch + 2 * width),
        to_upper(scratch + 3 * width),
        bins(reinterpret_cast<int32_t*>(scratch + 4 * width)) {
  }
};

// Computes `bins`, `lower` and `upper` of a row. Returns false if an atom is NaN or its mass is not finite.
template <class T>
bool place_atoms(
    const T* probabilities,
    double reward,
    double discount,
    const double* centers,
    const Support& support,
    const Atoms& atoms) {
  const int32_t width = support.num_bins;
  double* __restrict const upper = atoms.upper;
  double* __restrict const lower = atoms.lower;
  int32_t* __restrict const bins = atoms.bins;
  for (int32_t j = 0; j < width; ++j) {
    upper[j] = reward + discount * centers[j];
  }
  if (support.transform != Transform::identity) {
    for (int32_t j = 0; j < width; ++j) {
      upper[j] = transformed_target(upper[j], support);
    }
  }
  const double scale = (width - 1) / (support.maximum - support.minimum), minimum = support.minimum;
  const double last_bin = width - 1, last_below = width - 2;
  for (int32_t j = 0; j < width; ++j) {
    const double position = clamp_between((upper[j] - minimum) * scale, 0, last_bin);
    const double above = position > 0 ? position : 0; // NaN: 0
    const auto bin = static_cast<int32_t>(above < last_below ? above : last_below);
    bins[j] = bin;
    lower[j] = to_accumulate(probabilities[j]);
    upper[j] = position - bin;
  }
  if (support.raw) {
    for (int32_t j = 0; j < width; ++j) {
      const double low = centers[bins[j]], high = centers[bins[j] + 1];
      upper[j] = clamp_between((reward + discount * centers[j] - low) / (high - low), 0, 1);
    }
  }
  int64_t not_finite = 0;
  for (int32_t j = 0; j < width; ++j) {
    const double share = upper[j], mass = lower[j];
    not_finite |= static_cast<int64_t>(share - share + (mass - mass) != 0); // a sum would not be vectorised
    upper[j] = mass * share;
    lower[j] = mass * (1 - share);
  }
  return not_finite == 0;
}

double number_of(const Rows& rows, int64_t row) {
  double result = 0;
  dispatch_element(
      rows.element, [&](auto type) { result = to_accumulate(static_cast<const decltype(type)*>(rows.data)[row]); });
  return result;
}

void project_rows(const Projection& p, const double* centers, int64_t begin, int64_t end, double* scratch) {
  const int64_t width = p.support.num_bins;
  const Atoms atoms(scratch, width);
  for (int64_t row = begin; row < end; ++row) {
    bool is_finite = false;
    dispatch_element(p.probabilities.element, [&](auto type) {
      const auto* probabilities = static_cast<const decltype(type)*>(p.probabilities.data) + row * width;
      is_finite =
          place_atoms(probabilities, number_of(p.rewards, row), number_of(p.discounts, row), centers, p.support, atoms);
    });
    // Two sums for each bin, so that additions for neighbouring atoms seldom wait for each other.
    for (int64_t k = 0; k < width; ++k) {
      atoms.to_lower[k] = atoms.to_upper[k] = 0;
    }
    for (int64_t j = 0; j < width; ++j) {
      const int32_t bin = atoms.bins[j];
      atoms.to_lower[bin] += atoms.lower[j];
      atoms.to_upper[bin] += atoms.upper[j];
    }
    dispatch_element(p.out.element, [&](auto type) {
      using T = decltype(type);
      using A = Accumulate<T>;
      T* out = static_cast<T*>(p.out.data) + row * width;
      const double nan = is_finite ? 0 : std::numeric_limits<double>::quiet_NaN();
      out[0] = from_accumulate<T>(static_cast<A>(atoms.to_lower[0] + nan));
      for (int64_t k = 1; k < width; ++k) {
        out[k] = from_accumulate<T>(static_cast<A>(atoms.to_lower[k] + atoms.to_upper[k - 1] + nan));
      }
    });
  }
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
