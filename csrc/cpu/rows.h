// The tools that the rows of all heads are made of: reading, the softmax of a row, writing. Included once for each
// instruction set, with GRADSCALE_VARIANT naming the namespace; the loops are plain, and vectorised by the compiler.
#include "../formulas/exponential.h"
#include "../formulas/logarithm.h"
#include "../formulas/losses.h"
#include "../formulas/slab.h"
#include "lane_sums.h"
#include "scratch.h"

#include <array>
#include <tuple>
#include <type_traits>

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

template <class A>
struct Softmax {
  A maximum;
  A sum;           // sum of exp(logit - maximum)
  A moment;        // sum of exp(logit - maximum) (2j - width + 1)
  const A* values; // exp(logit - maximum)
};

// Memory that is wanted next. It is fetched while exponentials are computed, which needs none.
struct Ahead {
  const void* read;
  void* write;
};

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#if GRADSCALE_AVX512
#include "rows_avx512.h"
#endif

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// True if rows with sums of type A are computed by rows_avx512.h.
template <class A>
constexpr bool in_lanes = GRADSCALE_AVX512 && std::is_same_v<A, float>;

// Declared for all instruction sets, and defined where there is AVX-512.
template <bool with_moment, class T>
Softmax<float> exponentials_in_lanes(const T* logits, int64_t width, float maximum, Ahead ahead, float* scratch);

// Memory for a second row, next to the row of the exponentials.
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

// Widens the first element of each of `count` rows of T.
template <class T, class A>
void widen_column(const Rows& rows, int64_t first, int64_t count, A* to) {
  const T* from = static_cast<const T*>(rows.data) + first * rows.stride;
  for (int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<A>(to_accumulate(from[i * rows.stride]));
  }
}

template <class T>
const T* row_of(const Rows& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + row * rows.stride;
}

template <class A, class T>
A maximum_of_any(const T* logits, int64_t width) {
  A maximum = -static_cast<A>(INFINITY);
#pragma omp simd reduction(max : maximum)
  for (int64_t j = 0; j < width; ++j) {
    const A logit = static_cast<A>(to_accumulate(logits[j]));
    maximum = logit > maximum ? logit : maximum; // passes NaN over
  }
  return maximum;
}

template <bool with_moment, class T, class A>
Softmax<A> exponentials_of_any(const T* logits, int64_t width, A maximum, A* row) {
  const int64_t padded = padded_width(width);
  widen(logits, width, row);
  for (int64_t j = width; j < padded; ++j) {
    row[j] = -static_cast<A>(INFINITY);
  }
  LaneSum<A> sum;
  LaneSum<A> moment; // weighted with the number of the block; the place in the block is added after the loop
  A block = 0;
  for (int64_t j = 0; j < padded; j += kLanes, block += 1) {
#pragma omp simd
    for (int k = 0; k < kLanes; ++k) {
      const A e = exp_nonpositive(row[j + k] - maximum);
      row[j + k] = e;
      sum.lanes[k] += e;
      if (with_moment) {
        moment.lanes[k] += e * block;
      }
    }
  }
  if (with_moment) {
    for (int k = 0; k < kLanes; ++k) {
      const A offset = static_cast<A>(2 * k + 1 - static_cast<int32_t>(width));
      moment.lanes[k] = 2 * kLanes * moment.lanes[k] + offset * sum.lanes[k];
    }
  }
  return {maximum, sum.total(), with_moment ? moment.total() : A(0), row};
}

// The logits of the next row, and where the gradient of this one goes.
template <class T>
Ahead ahead_of(const Rows& logits, const Rows& gradient, int64_t row) {
  const int64_t size = element_size(gradient.element);
  char* out = static_cast<char*>(gradient.data);
  return {row_of<T>(logits, row + 1), out == nullptr ? nullptr : out + row * gradient.stride * size};
}

// The largest logit; -inf for a row of NaN.
template <class A, class T>
A maximum_of(const T* logits, int64_t width) {
  if constexpr (in_lanes<A>) {
    return maximum_in_lanes(logits, width);
  } else {
    return maximum_of_any<A>(logits, width);
  }
}

// Leaves exp(logit - maximum) in `scratch`, where `values` says.
template <bool with_moment, class T, class A>
Softmax<A> softmax_of(const T* logits, int64_t width, A maximum, Ahead ahead, A* scratch) {
  if constexpr (in_lanes<A>) {
    return exponentials_in_lanes<with_moment>(logits, width, maximum, ahead, scratch);
  } else {
    return exponentials_of_any<with_moment>(logits, width, maximum, scratch);
  }
}

// Writes out[j] = value(load) with load(row) = row[j].
template <class G, class A, class Value>
void write_gradient(const Rows& gradient, int64_t row, int64_t width, Value value) {
  G* out = static_cast<G*>(gradient.data) + row * gradient.stride;
  if constexpr (in_lanes<A>) {
    write_lanes(out, width, value);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      out[j] = from_accumulate<G, A>(value([j](const A* from) { return from[j]; }));
    }
  }
}

// The sums over j of the three terms(load), load(row) being row[j], widened. `first` is the row with the alignment that
// matters.
template <class A, class T, class Terms>
std::array<A, 3> sums_of(const T* first, int64_t width, Terms terms) {
  if constexpr (in_lanes<A>) {
    return sums_of_lanes(first, width, terms);
  } else {
    A one = 0, two = 0, three = 0;
#pragma omp simd reduction(+ : one, two, three)
    for (int64_t j = 0; j < width; ++j) {
      const auto [a, b, c] = terms([j](const auto* row) { return static_cast<A>(to_accumulate(row[j])); });
      one += a;
      two += b;
      three += c;
    }
    return {one, two, three};
  }
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
