// Vectors of 16 bytes, whose elements are not converted yet, and sums over a vector. They are computed in float where
// that is accurate enough, so that double is used once per vector and not once per element.
//
// The error of a rounding to float is at most u = 2^-24 of the result. The squares of a vector go through three
// roundings or fewer, and so does the sum of its elements. So the relative error of a norm is at most 1.5 u = 9e-8, and
// the error of a sum at most 3 u = 1.8e-7 of the sum of magnitudes, whatever the elements are. If the roundings are
// independent, both errors are smaller by the square root of the number of vectors.
#pragma once

#include "../formulas/norms.h"
#include "lanes.cuh"
#include "thread_group.cuh"

namespace gradscale {

// Squares are computed in float if their sum over some vectors is between these bounds: then no square overflows, and
// the error of squares below 2^-126 is negligible compared with the sum.
constexpr float kLeastSquares = 0x1p-100f;
constexpr float kMostSquares = 0x1p120f;

GRADSCALE_DEVICE bool is_safe_in_float(float squares) {
  return squares > kLeastSquares && squares < kMostSquares; // NaN is not
}

// The sum of `count` numbers. `count` is a power of two, and each number goes through log2(count) roundings.
template <int count>
GRADSCALE_DEVICE float sum_in_pairs(float (&terms)[count]) {
#pragma unroll
  for (int half = count / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) {
      terms[k] += terms[k + half];
    }
  }
  return terms[0];
}

// Elements of a type that is narrower than double.
template <class T>
struct alignas(16) RawVector {
  static constexpr int kSize = kVector<T>;

  uint32_t words[4];

  GRADSCALE_DEVICE float operator[](int k) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      return bit_cast<float>(words[k]);
    } else {
      return k % 2 == 0 ? low_half(T(), words[k / 2]) : high_half(T(), words[k / 2]);
    }
  }
  // The element must be zero before.
  GRADSCALE_DEVICE void set(int k, T element) {
    if constexpr (sizeof(T) == sizeof(float)) {
      words[k] = bit_cast<uint32_t>(element);
    } else {
      words[k / 2] |= static_cast<uint32_t>(element.bits) << (k % 2 * 16);
    }
  }
  GRADSCALE_DEVICE bool has_only_zeros() const {
    const uint32_t magnitudes = sizeof(T) == sizeof(float) ? 0x7fffffffu : 0x7fff7fffu;
    return ((words[0] | words[1] | words[2] | words[3]) & magnitudes) == 0;
  }
  GRADSCALE_DEVICE int32_t zeros() const {
    int32_t zeros = 0;
#pragma unroll
    for (const uint32_t word : words) {
      if constexpr (sizeof(T) == sizeof(float)) {
        zeros += (word & 0x7fffffffu) == 0;
      } else {
        zeros += ((word & 0x7fffu) == 0) + ((word & 0x7fff0000u) == 0);
      }
    }
    return zeros;
  }
  GRADSCALE_DEVICE float sum() const {
    float terms[kSize / 2];
#pragma unroll
    for (int k = 0; k < kSize / 2; ++k) {
      terms[k] = (*this)[2 * k] + (*this)[2 * k + 1];
    }
    return sum_in_pairs(terms);
  }
  // Squares of 16-bit numbers are exact in float.
  GRADSCALE_DEVICE float squares() const {
    float terms[kSize / 2];
#pragma unroll
    for (int k = 0; k < kSize / 2; ++k) {
      const float a = (*this)[2 * k];
      const float b = (*this)[2 * k + 1];
      terms[k] = a * a + b * b;
    }
    return sum_in_pairs(terms);
  }
};

// Reads the vector of a row that begins at element `first`; elements outside the row are zeros.
template <class T>
GRADSCALE_DEVICE RawVector<T> read_raw_vector(const T* row, int32_t width, int32_t first) {
  if (first >= 0 && first + RawVector<T>::kSize <= width) {
    return load16<RawVector<T>>(row + first);
  }
  RawVector<T> vector{};
  if (first < width) {
#pragma unroll
    for (int k = 0; k < RawVector<T>::kSize; ++k) {
      if (first + k >= 0 && first + k < width) {
        vector.set(k, row[first + k]);
      }
    }
  }
  return vector;
}

// The sum of the squares of vectors, computed in double if float would lose it. NaN and inf propagate.
template <class T, int count>
GRADSCALE_DEVICE double squares_of(const RawVector<T> (&vectors)[count]) {
  float together = 0;
  double sum = 0;
#pragma unroll
  for (const RawVector<T>& vector : vectors) {
    const float squares = vector.squares();
    together += squares;
    sum += static_cast<double>(squares);
  }
  if (is_safe_in_float(together)) {
    return sum;
  }
  sum = 0;
#pragma unroll
  for (const RawVector<T>& vector : vectors) {
    if (!vector.has_only_zeros()) { // most vectors whose squares underflow have only zeros
#pragma unroll
      for (int k = 0; k < RawVector<T>::kSize; ++k) {
        const auto number = static_cast<double>(vector[k]);
        sum += number * number;
      }
    }
  }
  return sum;
}

// Adds up the squares of a range of elements, with the threads of a group. A thread issues the loads of four vectors
// before it uses the first.
template <class T>
GRADSCALE_DEVICE double sum_of_squares(const T* from, int32_t size, const ThreadGroup& group) {
  constexpr int kAhead = 4;
  const AlignedVectors<T> vectors(from, size);
  double sum = 0;
  for (int32_t vector = group.rank; vector < vectors.count; vector += kAhead * group.size) {
    RawVector<T> now[kAhead];
#pragma unroll
    for (int c = 0; c < kAhead; ++c) {
      now[c] = read_raw_vector(from, size, vectors.first(vector + c * group.size));
    }
    sum += squares_of(now);
  }
  return group.sum(sum);
}

// ---- Sums of powers by a group of threads, as in cpu/range.cpp
// -------------------------------------------------------

// Writes changed(x) for each element, where x is the element in the type of sums. A thread issues the loads of its next
// vectors before it changes the first.
template <class T, class Change>
GRADSCALE_DEVICE void change_range(const T* from, T* to, int32_t size, const ThreadGroup& group, Change changed) {
  using A = Accumulate<T>;
  constexpr int kAhead = 4;
  const AlignedVectors<T> vectors(from, size);
  const auto is_whole = [=](int32_t first) { return first >= 0 && first + kVector<T> <= size; };
  for (int32_t begin = group.rank; begin < vectors.count; begin += kAhead * group.size) {
    Vector16<T> now[kAhead];
#pragma unroll
    for (int c = 0; c < kAhead; ++c) {
      const int32_t first = vectors.first(begin + c * group.size);
      if (is_whole(first)) {
        now[c] = load16<Vector16<T>>(from + first);
      }
    }
#pragma unroll
    for (int c = 0; c < kAhead; ++c) {
      const int32_t first = vectors.first(begin + c * group.size);
      if (is_whole(first)) {
        A values[kVector<T>];
#pragma unroll
        for (int k = 0; k < kVector<T>; ++k) {
          values[k] = changed(static_cast<A>(to_accumulate(now[c].elements[k])));
        }
        write_elements<kVector<T>>(to, size, first, values);
      } else if (first < size) {
#pragma unroll
        for (int k = 0; k < kVector<T>; ++k) {
          if (first + k >= 0 && first + k < size) {
            to[first + k] = from_accumulate<T, A>(changed(static_cast<A>(to_accumulate(from[first + k]))));
          }
        }
      }
    }
  }
}

// Scales an element: x / root^2 * factor.
struct ScaledElement {
  Scaling by;
  bool narrow;       // the product can be computed in float
  double reciprocal; // 1 / root; the division is avoided for most groups

  GRADSCALE_DEVICE explicit ScaledElement(const Scaling& by)
      : by(by), narrow(by.is_normal_in_float()), reciprocal(by.root == 1 ? 1 : 1 / by.root) {
  }
  template <class A>
  GRADSCALE_DEVICE A operator()(A x) const {
    if (by.root == 0) {
      return A(0);
    }
    const bool is_product = std::is_same_v<A, double> ? by.root == 1 : narrow;
    return is_product ? x * static_cast<A>(by.factor)
                      : static_cast<A>(static_cast<double>(x) * reciprocal * reciprocal * by.factor);
  }
};

// Adds up (|g| reciprocal^2)^p, for a finite p.
template <class T>
GRADSCALE_DEVICE double plain_power_sum(
    const T* from, int32_t size, double p, double reciprocal, const ThreadGroup& group) {
  using A = Accumulate<T>;
  double sum = 0;
  each_vector(from, size, group, A(0), [&](const A* values, int32_t) {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      sum += power_in_norm(std::abs(static_cast<double>(values[k])) * reciprocal * reciprocal, p);
    }
  });
  return group.sum(sum);
}

// The larger of two numbers; NaN if one is NaN.
GRADSCALE_DEVICE double larger_or_nan(double a, double b) {
  return a > b || a != a ? a : b;
}

// The largest of the threads' values; NaN if one is NaN.
GRADSCALE_DEVICE double maximum_or_nan(double value, const ThreadGroup& group) {
  return group.reduced(value, larger_or_nan);
}

// The largest magnitude; NaN if an element is NaN.
template <class T>
GRADSCALE_DEVICE double range_maximum(const T* from, int32_t size, const ThreadGroup& group) {
  using A = Accumulate<T>;
  double largest = 0;
  each_vector(from, size, group, A(0), [&](const A* values, int32_t) {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      largest = larger_or_nan(std::abs(static_cast<double>(values[k])), largest);
    }
  });
  return maximum_or_nan(largest, group);
}

template <class T>
GRADSCALE_DEVICE PowerSum range_power_sum(const T* from, int32_t size, double p, const ThreadGroup& group) {
  if constexpr (!std::is_same_v<T, double>) {
    if (p == 2) { // squares of such elements neither overflow nor underflow in double
      return {sum_of_squares(from, size, group), 1};
    }
  }
  const bool is_maximum = std::isinf(p);
  const double sum = is_maximum ? range_maximum(from, size, group) : plain_power_sum(from, size, p, 1.0, group);
  if (__all_sync(kWholeWarp, is_safe(sum))) {
    return {sum, 1};
  }
  const double maximum = is_maximum ? sum : range_maximum(from, size, group);
  const bool scaled = !is_safe(sum) && maximum > 0 && !std::isinf(maximum);
  const double root = scaled ? root_for(maximum, p) : 1;
  const double reciprocal = 1 / root;
  const double again =
      is_maximum ? maximum * reciprocal * reciprocal : plain_power_sum(from, size, p, reciprocal, group);
  if (is_safe(sum)) {
    return {sum, 1};
  }
  return scaled ? PowerSum{again, root} : PowerSum{maximum, 1};
}

// Adds up the power sums of the parts of a group of elements, with the threads of `block`, which may be a warp.
GRADSCALE_DEVICE PowerSum total_power_sum(const PowerSum* sums, int64_t count, double p, const ThreadGroup& block) {
  PowerSum own{0, 1};
  for (int64_t i = block.rank; i < count; i += block.size) {
    own = added(own, sums[i], p);
  }
  double root = block.maximum(own.sum == 0 ? 0.0 : own.root);
  root = root > 0 ? root : 1;
  if (own.sum != 0 && std::isfinite(own.sum)) { // a factor of 0 would turn inf into NaN
    own.sum *= from_root_to_root(own.root, root, p);
  }
  return {std::isinf(p) ? maximum_or_nan(own.sum, block) : block.sum(own.sum), root};
}

} // namespace gradscale
