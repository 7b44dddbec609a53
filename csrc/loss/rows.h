// CPU kernel of the multi-step loss: one row (the prediction of one sample at one step) at a time.
//
// A row is read from memory once, widened into a padded scratch row that stays in the first-level cache, and its
// gradient is written once; between the two there is one exponential per element. Included once for each instruction
// set, with GRADSCALE_VARIANT naming the namespace; the loops are plain, and vectorised by the compiler.

#include "../math/element.h"
#include "../math/exponential.h"
#include "../math/support.h"
#include "segment.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

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

inline double load_scalar(const Rows& rows, int64_t row) {
  double value = 0;
  widen_row(rows, row, 1, &value);
  return value;
}

template <class A>
struct Softmax {
  A maximum;
  A sum;    // of exp(logit - maximum)
  A moment; // of the same, weighted with 2j - width + 1
};

// Widens a row of logits, and leaves exp(logit - maximum) in `row`.
template <bool with_moment, class T, class A>
Softmax<A> exponentials(const T* logits, int64_t width, A* row) {
  const int64_t padded = padded_width(width);
  A maximum = -static_cast<A>(INFINITY);
  for (int64_t j = width; j < padded; ++j) {
    row[j] = maximum;
  }
#pragma omp simd reduction(max : maximum)
  for (int64_t j = 0; j < width; ++j) {
    const A logit = static_cast<A>(to_accumulate(logits[j]));
    row[j] = logit;
    maximum = logit > maximum ? logit : maximum;
  }
  LaneSum<A> sum;
  LaneSum<A> moment; // of the number of the block; the place in the block is the lane's, and comes after the loop
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
  return {maximum, sum.total(), with_moment ? moment.total() : A(0)};
}

template <class T, class A, class Value>
void write_gradient(const Rows& gradient, int64_t row, int64_t width, Value value) {
  T* out = static_cast<T*>(gradient.data) + row * gradient.stride;
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    out[j] = from_accumulate<T, A>(value(j));
  }
}

// Cross-entropy with the two-hot target: log(sum) - sum_j t_j (x_j - maximum); gradient c (p_j - t_j).
template <class T, class A>
void two_hot_row(const Segment& s, int64_t row, double coefficient, A* scratch) {
  const T* logits = static_cast<const T*>(s.prediction.data) + row * s.prediction.stride;
  const Softmax<A> softmax = exponentials<true>(logits, s.width, scratch);
  const Support& support = s.head->support;
  const TwoHotTarget<double> target = two_hot(load_scalar(s.target, row), support);
  const int64_t bins[2] = {target.lower_bin, target.lower_bin + 1};
  const A weights[2] = {static_cast<A>(1 - target.upper), static_cast<A>(target.upper)};
  A loss = std::log(softmax.sum);
  for (int side = 0; side < 2; ++side) {
    if (weights[side] != 0) { // an illegal bin (-inf) without weight costs nothing
      loss -= weights[side] * (static_cast<A>(to_accumulate(logits[bins[side]])) - softmax.maximum);
    }
  }
  s.loss.store(row, loss);
  if (s.expected.data != nullptr) {
    const A expected = expectation_from_moment(softmax.moment / softmax.sum, support);
    s.expected.store(row, inverse_transform_value(support.transform, expected, static_cast<A>(support.eps)));
  }
  if (s.gradient.data == nullptr) {
    return;
  }
  const A c = static_cast<A>(coefficient);
  const A factor = c / softmax.sum + A(0) * weights[0]; // a NaN target makes the whole row NaN
  write_gradient<T, A>(s.gradient, row, s.width, [=](int64_t j) { return scratch[j] * factor; });
  T* gradient = static_cast<T*>(s.gradient.data) + row * s.gradient.stride;
  for (int side = 0; side < 2; ++side) {
    const A p = scratch[bins[side]] / softmax.sum;
    gradient[bins[side]] = from_accumulate<T, A>((p - weights[side]) * c);
  }
}

// Cross-entropy with a dense target t: sum(t) log(sum) - sum_j t_j (x_j - maximum); gradient c (sum(t) p_j - t_j).
template <class T, class A>
void soft_cross_entropy_row(const Segment& s, int64_t row, double coefficient, A* scratch) {
  const int64_t width = s.width;
  const int64_t padded = padded_width(width);
  A* target = scratch + padded;
  const T* logits = static_cast<const T*>(s.prediction.data) + row * s.prediction.stride;
  const Softmax<A> softmax = exponentials<false>(logits, width, scratch);
  widen_row(s.target, row, width, target);
  A target_sum = 0;
  A correct = 0;
#pragma omp simd reduction(+ : target_sum, correct)
  for (int64_t j = 0; j < width; ++j) {
    const A shifted = static_cast<A>(to_accumulate(logits[j])) - softmax.maximum;
    target_sum += target[j];
    correct += target[j] == 0 ? A(0) : target[j] * shifted; // 0 * -inf is 0 for an illegal action
  }
  s.loss.store(row, target_sum * std::log(softmax.sum) - correct);
  if (s.gradient.data == nullptr) {
    return;
  }
  const A c = static_cast<A>(coefficient);
  const A factor = target_sum / softmax.sum;
  write_gradient<T, A>(s.gradient, row, width, [=](int64_t j) { return (scratch[j] * factor - target[j]) * c; });
}

// mean_j (x_j - transform(t_j))^2; gradient c 2 (x_j - transform(t_j)) / width.
template <class T, class A>
void mean_squared_error_row(const Segment& s, int64_t row, double coefficient, A* scratch) {
  const int64_t width = s.width;
  const Support& transform = s.head->support;
  A* difference = scratch + padded_width(width);
  widen_row(s.target, row, width, difference);
  if (transform.transform != Transform::identity) {
    for (int64_t j = 0; j < width; ++j) {
      difference[j] = transform_value(transform.transform, difference[j], static_cast<A>(transform.eps));
    }
  }
  const T* prediction = static_cast<const T*>(s.prediction.data) + row * s.prediction.stride;
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < width; ++j) {
    difference[j] = static_cast<A>(to_accumulate(prediction[j])) - difference[j];
    sum += difference[j] * difference[j];
  }
  s.loss.store(row, sum / static_cast<A>(width));
  if (s.gradient.data == nullptr) {
    return;
  }
  const A factor = static_cast<A>(2 * coefficient / static_cast<double>(width));
  write_gradient<T, A>(s.gradient, row, width, [=](int64_t j) { return difference[j] * factor; });
}

template <class T>
void run_rows_of(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end, double* scratch) {
  using A = typename AccumulateType<T>::type;
  A* row_scratch = reinterpret_cast<A*>(scratch);
  for (int64_t row = begin; row < end; ++row) {
    // A masked row adds exactly nothing: it is computed into the outputs that do not depend on its target, and its loss
    // and gradient are zero whatever it holds.
    const bool kept = coefficients.mask.keeps(row, s.step);
    const double coefficient = kept ? coefficients.at(row, s.step) : 0.0;
    switch (s.head->kind) {
      case Kind::two_hot:
        two_hot_row<T>(s, row, coefficient, row_scratch);
        break;
      case Kind::soft_cross_entropy:
        soft_cross_entropy_row<T>(s, row, coefficient, row_scratch);
        break;
      case Kind::mean_squared_error:
        mean_squared_error_row<T>(s, row, coefficient, row_scratch);
        break;
    }
    if (!kept) {
      s.loss.store(row, 0.0);
      if (s.gradient.data != nullptr) {
        memset(static_cast<T*>(s.gradient.data) + row * s.gradient.stride, 0, s.width * sizeof(T));
      }
    }
  }
}

void run_rows(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end, double* scratch) {
  dispatch_element(
      s.prediction.element, [&](auto type) { run_rows_of<decltype(type)>(s, coefficients, begin, end, scratch); });
}

void decode_rows(
    const Rows& logits, int64_t width, const Support& support, Slab out, int64_t begin, int64_t end, double* scratch) {
  dispatch_element(logits.element, [&](auto type) {
    using T = decltype(type);
    using A = typename AccumulateType<T>::type;
    for (int64_t row = begin; row < end; ++row) {
      const T* from = static_cast<const T*>(logits.data) + row * logits.stride;
      const Softmax<A> softmax = exponentials<true>(from, width, reinterpret_cast<A*>(scratch));
      const A expected = expectation_from_moment(softmax.moment / softmax.sum, support);
      out.store(row, inverse_transform_value(support.transform, expected, static_cast<A>(support.eps)));
    }
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
