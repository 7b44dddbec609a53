// Reads and writes rows of logits, and computes the softmax of a row. Included once for each instruction set.
//
// The order of additions in a row depends on its width and the instruction set alone, not on its address, so that equal
// rows give the same bits: there are 16 partial sums, and element j is added to sum j % 16. Vectors of 64 bytes are
// aligned in memory, because each load and store would cross a cache line otherwise. Lane i of them adds to sum
// (i + before) % 16, `before` being the number of elements before the first aligned vector.
#include "../formulas/element.h"
#include "../formulas/support.h"
#include "lanes.h"
#include "scratch.h"

#include <algorithm>
#include <array>
#include <limits>

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

template <class A>
struct Softmax {
  A sum;          // sum of exp(logit - maximum)
  A moment;       // sum of exp(logit - maximum) (2j - width + 1)
  A* values;      // exp(logit - maximum)
  int64_t before; // elements before the first aligned vector
};

// Memory that is used next. It is prefetched while exponentials are computed.
struct Ahead {
  const void* read;
  void* write;
};

// Memory for a second row in `scratch`, after the row of exponentials.
template <class A>
A* second_row(A* scratch, int64_t width) {
  return scratch + padded_width(width) + kLanes;
}

template <class T, class A>
void widen(const T* from, int64_t width, A* to) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    to[j] = static_cast<A>(to_accumulate(from[j]));
  }
}

template <class A>
void widen_row(const Rows& rows, int64_t row, int64_t width, A* to) {
  dispatch_element(rows.element, [&](auto type) {
    using T = decltype(type);
    widen(static_cast<const T*>(rows.data) + row * rows.stride, width, to);
  });
}

// Widens the first element of each of `count` rows.
template <class A>
void widen_column(const Rows& rows, int64_t first, int64_t count, A* to) {
  dispatch_element(rows.element, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(rows.data) + first * rows.stride;
    for (int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<A>(to_accumulate(from[i * rows.stride]));
    }
  });
}

template <class T>
const T* row_of(const Rows& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + row * rows.stride;
}

// The logits of the next row, and the memory for the gradient of this row.
template <class T>
Ahead ahead_of(const Rows& logits, const Rows& gradient, int64_t row) {
  const int64_t size = element_size(gradient.element);
  char* out = static_cast<char*>(gradient.data);
  return {row_of<T>(logits, row + 1), out == nullptr ? nullptr : out + row * gradient.stride * size};
}

template <int chain>
using Chain = std::integral_constant<int, chain>;

// Sums of longer rows are added up from the sums of tiles of this many elements, whose rounding errors are smaller.
constexpr int64_t kSumTile = 1024;

// Calls body(begin, end) for each tile of a row.
template <class Body>
GRADSCALE_HOST_DEVICE void each_tile(int64_t width, Body body) {
  for (int64_t begin = 0; begin < width; begin += kSumTile) {
    body(begin, begin + kSumTile < width ? begin + kSumTile : width);
  }
}

// The number of elements of a row before the first aligned vector; 0 for vectors that are not aligned. The tiles of a
// longer row begin at other lanes of aligned vectors, so that it has none.
template <class T>
int64_t elements_before_vectors(const T* row, int64_t width) {
  constexpr int64_t alignment = 64 / sizeof(T) < kLanes ? 64 / sizeof(T) : kLanes; // in elements
  const auto begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % alignment);
  return kHasMasks && kLanes <= width && width <= kSumTile && begin != 0 ? alignment - begin : 0;
}

// Moves partial sum i, which is in lane (i - before) % 16, to lane i.
template <class A>
GRADSCALE_HOST_DEVICE Lanes<A> in_order(Lanes<A> sums, int64_t before) {
  if constexpr (kHasMasks) {
    return before == 0 ? sums : rotated(sums, before);
  } else {
    return sums;
  }
}

// Calls body(first, lanes, chain) for each vector of elements begin to end - 1 of a row; `first` is the index of the
// vector's first element. The first vector has `before` elements, if there are any, in its last lanes. `lanes` selects
// each element of the row in one vector only; without masks, the last vector overlaps the one before it. `chain` is 0,
// or alternates between 0 and 1 if there are two chains, whose sums the processor can compute in parallel.
template <int chains, class Body>
GRADSCALE_HOST_DEVICE void each_vector(int64_t begin, int64_t end, int64_t before, Body body) {
  if (end - begin < kLanes) {
    body(begin, FirstLanes{static_cast<int>(end - begin)}, Chain<0>());
    return;
  }
  int64_t j = begin + before;
  if constexpr (kHasMasks) {
    if (before != 0) {
      body(j - kLanes, LanesFrom{static_cast<int>(kLanes - before)}, Chain<0>());
    }
  }
  for (; j + chains * kLanes <= end; j += chains * kLanes) {
    body(j, AllLanes(), Chain<0>());
    if constexpr (chains == 2) {
      body(j + kLanes, AllLanes(), Chain<1>());
    }
  }
  for (; j + kLanes <= end; j += kLanes) {
    body(j, AllLanes(), Chain<0>());
  }
  if (j < end) {
    if constexpr (kHasMasks) {
      body(j, FirstLanes{static_cast<int>(end - j)}, Chain<chains - 1>());
    } else {
      const int64_t first = end - kLanes;
      body(first, LanesFrom{static_cast<int>(j - first)}, Chain<chains - 1>());
    }
  }
}

// `largest` ignores NaN, and is -inf if all logits are NaN. `smallest` is the smallest logit if any logit is negative.
// Otherwise it is at most `largest` in magnitude, so that the largest magnitude is max(-smallest, largest).
// `smallest` may be NaN if a logit is NaN, and is -inf if it is not wanted.
template <class A>
struct Extremes {
  A smallest, largest;
};

template <class A, bool wants_smallest = true, class T>
Extremes<A> extremes_of(const T* logits, int64_t width) {
  const Lanes<A> zero = A(0), none = -static_cast<A>(INFINITY);
  Lanes<A> least[2] = {zero, zero}, most[2] = {none, none};
  each_vector<2>(0, width, elements_before_vectors(logits, width), [&](int64_t j, auto lanes, auto chain) {
    const Lanes<A> x = load_lanes(logits + j, lanes);
    if constexpr (wants_smallest) {
      least[chain] = larger_bits(kept(lanes, x, zero), least[chain]);
    }
    most[chain] = larger(kept(lanes, x, none), most[chain]);
  });
  return {
      wants_smallest ? largest_bits(larger_bits(least[0], least[1])) : -static_cast<A>(INFINITY),
      largest(larger(most[0], most[1]))};
}

// The largest magnitude of the finite logits of a row; 0 if there are none.
template <class A, class T>
A largest_finite(const T* logits, int64_t width) {
  Lanes<A> most = A(0);
  each_vector<1>(0, width, elements_before_vectors(logits, width), [&](int64_t j, auto lanes, auto) {
    most = larger(finite_magnitude(kept(lanes, load_lanes(logits + j, lanes), Lanes<A>(A(0)))), most);
  });
  return largest(most);
}

// Stores e = exp(d), d = logit - maximum, of elements begin to end - 1 in `values`, and calls visit(first, lanes, d, e)
// for each vector.
template <bool in_range, class T, class A, class Visit>
GRADSCALE_HOST_DEVICE void each_exponential(
    const T* logits, int64_t begin, int64_t end, A maximum, Ahead ahead, int64_t before, A* values, Visit visit) {
  const auto* read = static_cast<const T*>(ahead.read);
  const auto* write = static_cast<const T*>(ahead.write != nullptr ? ahead.write : values);
  each_vector<1>(begin, end, before, [&](int64_t j, auto lanes, auto) {
    // Prefetching past the end is harmless.
    __builtin_prefetch(read + j, /*rw=*/0);
    __builtin_prefetch(write + j, /*rw=*/1);
    const Lanes<A> d = load_lanes(logits + j, lanes) - Lanes<A>(maximum), e = exp_nonpositive<in_range>(d);
    store_lanes(values + j, e);
    visit(j, lanes, d, e);
  });
}

// The place in `scratch` for the exponentials of a row.
template <class A>
A* exponentials_in(A* scratch, int64_t before) {
  return scratch + (kLanes - before) % kLanes;
}

// Stores exp(logit - maximum) in `scratch`, beginning at the returned `values`. The moment weights element j by the
// distance of element j - j % 16 from the middle of the row.
template <bool with_moment, bool in_range, class T, class A>
Softmax<A> softmax_of(const T* logits, int64_t width, A maximum, Ahead ahead, A* scratch) {
  const int64_t before = elements_before_vectors(logits, width);
  A* values = exponentials_in(scratch, before);
  const Lanes<A> zero = A(0), step = A(2 * kLanes);
  Lanes<A> sum = zero, moment = zero;
  Lanes<A> next = static_cast<A>(1 - width); // the weights in the next vector
  if constexpr (with_moment && kHasMasks) {
    if (before != 0) {
      next = kept(LanesFrom{static_cast<int>(kLanes - before)}, next, next - step);
    }
  }
  each_tile(width, [&](int64_t begin, int64_t end) {
    Lanes<A> tile_sum = zero, tile_moment = zero;
    const auto add = [&](int64_t j, auto lanes, Lanes<A> /*d*/, Lanes<A> e) {
      const Lanes<A> counted = kept(lanes, e, zero);
      tile_sum += counted;
      if constexpr (with_moment && (kHasMasks || std::is_same_v<decltype(lanes), AllLanes>)) {
        tile_moment += counted * next;
        next += step;
      } else if constexpr (with_moment) {
        tile_moment += counted * Lanes<A>(static_cast<A>(2 * j + 1 - width));
      }
    };
    each_exponential<in_range>(logits, begin, end, maximum, ahead, before, values, add);
    sum += tile_sum;
    moment += tile_moment;
  });
  sum = in_order(sum, before);
  moment = in_order(moment, before) + sum * Lanes<A>::numbers() * Lanes<A>(2);
  return {total(sum), with_moment ? total(moment) : A(0), values, before};
}

// Calls run(in_range), with exp_nonpositive()'s in_range.
template <class A, class Run>
auto in_range_of(const Extremes<A>& extremes, const Run& run) {
  return extremes.largest - std::min(extremes.smallest, A(0)) < -kLeastInRange ? run(std::true_type())
                                                                               : run(std::false_type());
}

template <bool with_moment, class T, class A>
Softmax<A> softmax_of(const T* logits, int64_t width, Extremes<A> extremes, Ahead ahead, A* scratch) {
  return in_range_of(extremes, [&](auto in_range) {
    return softmax_of<with_moment, in_range.value>(logits, width, extremes.largest, ahead, scratch);
  });
}

// Loads the lanes of one vector from a row.
template <class Which>
struct LoadBlock {
  int64_t first;
  Which lanes;

  template <class T>
  GRADSCALE_HOST_DEVICE LanesOf<T> operator()(const T* row) const {
    return load_lanes(row + first, lanes);
  }
};

inline double squared(double x) {
  return x * x;
}

// True if factor^2 * squares is the sum of (factor * x_j)^2, where `squares` is the sum of x_j^2 in A: no square
// overflowed, those that underflowed are negligible, and the factor is finite (0 * inf is NaN).
template <class A>
bool factor_can_wait(A squares, A factor) {
  return squares > std::numeric_limits<A>::min() / std::numeric_limits<A>::epsilon() &&
         squares <= std::numeric_limits<A>::max() && factor - factor == 0; // false for NaN
}

// The sum over j of (factor * value(load))^2 in double, where load(row) = row[j].
template <class A, class Value>
[[gnu::noinline]] double squares_in_double(int64_t width, double factor, const Value& value) {
  double sums[kLanes] = {};
  each_vector<1>(0, width, 0, [&](int64_t j, auto lanes, auto) {
    A values[kLanes], ones[kLanes];
    store_lanes(values, value(LoadBlock<decltype(lanes)>{j, lanes}));
    store_lanes(ones, kept(lanes, Lanes<A>(A(1)), Lanes<A>(A(0))));
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      sums[i] += ones[i] != 0 ? squared(factor * static_cast<double>(values[i])) : 0;
    }
  });
  double sum = 0;
  for (const double of_lane : sums) {
    sum += of_lane;
  }
  return sum;
}

// Calls function(T()) for the type T of rows whose sums are of type A.
template <class A, class Function>
GRADSCALE_HOST_DEVICE void dispatch_rows(const Rows& rows, Function function) {
  dispatch_element(rows.element, [&](auto type) {
    if constexpr (std::is_same_v<A, Accumulate<decltype(type)>>) {
      function(type);
    }
  });
}

template <class G, class A, class Value>
double write_gradient_row(G* out, int64_t width, A factor, const Value& value) {
  const Lanes<A> zero = A(0), factors = factor;
  Lanes<A> squares[2] = {zero, zero};
  each_vector<2>(0, width, elements_before_vectors(out, width), [&](int64_t j, auto lanes, auto chain) {
    const Lanes<A> x = value(LoadBlock<decltype(lanes)>{j, lanes}), counted = kept(lanes, x, zero);
    squares[chain] += counted * counted;
    store_lanes(out + j, x * factors, lanes);
  });
  const A sum = total(squares[0] + squares[1]);
  return factor_can_wait(sum, factor) ? squared(factor) * sum : squares_in_double<A>(width, factor, value);
}

// Writes factor * value(load) as element j of the row's gradient, where load(row) = row[j]. Returns the sum of the
// squares before rounding, whose order of additions depends on the address of the gradient.
template <class A, class Value>
double write_gradient(const Rows& gradient, int64_t row, int64_t width, A factor, const Value& value) {
  double squares = 0;
  dispatch_rows<A>(gradient, [&](auto type) {
    auto* out = static_cast<decltype(type)*>(gradient.data) + row * gradient.stride;
    squares = write_gradient_row(out, width, factor, value);
  });
  return squares;
}

// The sums over j of terms(load), where load(row) = row[j]. `before` as in each_vector().
template <class A, class Terms>
auto sums_of(int64_t width, int64_t before, Terms terms) {
  constexpr size_t count = std::tuple_size<decltype(terms(LoadBlock<AllLanes>()))>::value;
  const Lanes<A> zero = A(0);
  std::array<Lanes<A>, count> sums;
  sums.fill(zero);
  each_tile(width, [&](int64_t begin, int64_t end) {
    std::array<Lanes<A>, count> tile_sums;
    tile_sums.fill(zero);
    each_vector<1>(begin, end, before, [&](int64_t j, auto lanes, auto) {
      const auto block_terms = terms(LoadBlock<decltype(lanes)>{j, lanes});
      for (size_t i = 0; i < count; ++i) {
        // Selects after the addition, so that all vectors are rounded alike if a product and the sum are contracted.
        tile_sums[i] = kept(lanes, tile_sums[i] + block_terms[i], tile_sums[i]);
      }
    });
    for (size_t i = 0; i < count; ++i) {
      sums[i] += tile_sums[i];
    }
  });
  std::array<A, count> result;
  for (size_t i = 0; i < count; ++i) {
    result[i] = total(in_order(sums[i], before));
  }
  return result;
}

// ---- Decoding of logits over the bins of a support ------------------------------------------------------------------

inline const float* raw_centers(const Support& support, float) {
  return support.raw_centers_float;
}

inline const double* raw_centers(const Support& support, double) {
  return support.raw_centers;
}

// sum_j e_j c_j over the raw (not transformed) centres c_j. Bins at equal distance from the middle are added in pairs:
// the centres of each pair of a symmetric support cancel exactly, so that equal e_j give exactly 0.
template <class A>
A raw_moment(const A* values, const Support& support) {
  const A* centers = raw_centers(support, A());
  const int64_t last = support.num_bins - 1;
  const int64_t pairs = support.num_bins / 2;
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < pairs; ++j) {
    sum += pair_moment(centers[j], centers[last - j], values[j], values[last - j]);
  }
  return last % 2 == 0 ? sum + values[pairs] * centers[pairs] : sum;
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
