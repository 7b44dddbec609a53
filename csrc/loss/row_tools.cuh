// Loss, decoded prediction and gradient of one row by a group of threads: what categorical_rows.h, policy_rows.h and
// regression_rows.h are to a CPU.
//
// A row is read in windows of 16 bytes. Rows of logits keep their exponentials in registers, 128 bytes a thread; a row
// of more than all threads of a block can keep is read again, and its exponentials taken again, for each pass over it.
// Loops over a few elements of a row (the bins of a target) read it again, from the cache, instead of asking who of the
// group has them.
#pragma once

#include "../math/exponential.h"
#include "../math/losses.h"
#include "../math/rows.cuh"
#include "device_table.h"

namespace gradscale {

// A row of a segment and the group that has it.
struct RowTask {
  const DeviceSegment& segment;
  const DeviceHead& head;
  const void* raw_centers; // of the type of sums
  Group group;
  int64_t row;
  int32_t width; // 0 for threads beyond the last row, which take part in reductions
  bool active;
  bool kept;           // not masked
  bool writes_outputs; // loss and decoded prediction
  double coefficient;

  GRADSCALE_DEVICE bool leads() const {
    return active && group.rank == 0;
  }
  GRADSCALE_DEVICE void store_loss(double loss) const {
    if (leads() && writes_outputs) {
      head.loss.from(segment.step - head.head.first_step).store(row, kept ? loss : 0.0);
    }
  }
  GRADSCALE_DEVICE void store_expected(double value) const {
    if (leads() && writes_outputs && head.expected.data != nullptr) {
      head.expected.from(segment.step - head.head.first_step).store(row, value);
    }
  }
  template <class T>
  GRADSCALE_DEVICE const T* prediction() const {
    return static_cast<const T*>(segment.prediction) + row * segment.prediction_stride;
  }
  template <class A>
  GRADSCALE_DEVICE A scalar_target() const {
    A value = 0;
    dispatch_element(static_cast<Element>(segment.target_element), [&](auto type) {
      using U = decltype(type);
      value = static_cast<A>(to_accumulate(static_cast<const U*>(segment.target)[row * segment.target_stride]));
    });
    return value;
  }

  // Elements first .. first + size of the row's gradient, but for those in skip_begin .. skip_end.
  template <class T, int size, class A>
  GRADSCALE_DEVICE void write_gradient(int32_t first, A* values, int32_t skip_begin = 0, int32_t skip_end = 0) const {
#pragma unroll
    for (int k = 0; k < size; ++k) {
      values[k] = kept ? values[k] : A(0);
    }
    if (static_cast<Element>(segment.gradient_element) == ElementOf<T>::value) {
      T* to = static_cast<T*>(segment.gradient) + row * segment.gradient_stride;
      write_elements<size>(to, width, first, skip_begin, skip_end, values);
    } else {
      A* to = static_cast<A*>(segment.gradient) + row * segment.gradient_stride;
      write_elements<size>(to, width, first, skip_begin, skip_end, values);
    }
  }
};

// A row of logits. With `cached` its elements stay in registers.
template <class T, class A, bool cached>
class LogitsRow {
 public:
  static constexpr int kSize = kVector<T>;
  static constexpr int kCachedWindows = cached_windows(sizeof(T));

  GRADSCALE_DEVICE LogitsRow(const T* logits, int32_t width, const Group& group)
      : logits_(logits), width_(width), group_(group), windows_(logits, width) {
    if constexpr (cached) {
      Vector<T> raw[kCachedWindows]; // all are asked for before the first is waited for
#pragma unroll
      for (int c = 0; c < kCachedWindows; ++c) {
        if (is_whole(window_of(c))) {
          raw[c] = load16<Vector<T>>(logits_ + windows_.first(window_of(c)));
        }
      }
#pragma unroll
      for (int c = 0; c < kCachedWindows; ++c) {
        if (is_whole(window_of(c))) {
#pragma unroll
          for (int k = 0; k < kSize; ++k) {
            values_[c][k] = static_cast<A>(to_accumulate(raw[c].elements[k]));
          }
        } else if (window_of(c) < windows_.count) {
          read(window_of(c), values_[c]);
        }
      }
    }
  }

  GRADSCALE_DEVICE A operator[](int32_t j) const {
    return static_cast<A>(to_accumulate(logits_[j]));
  }

  // Calls function(values, first) for the windows of this thread: logits, which it may replace. Logits outside the row
  // are -inf.
  template <class Function>
  GRADSCALE_DEVICE void each_window(Function function) {
    if constexpr (cached) {
#pragma unroll
      for (int c = 0; c < kCachedWindows; ++c) {
        if (window_of(c) < windows_.count) {
          function(values_[c], windows_.first(window_of(c)));
        }
      }
    } else {
      for (int32_t window = group_.rank; window < windows_.count; window += group_.size) {
        A values[kSize];
        read(window, values);
        function(values, windows_.first(window));
      }
    }
  }

  // The same for exp(logit - maximum), which each_window has put into the place of the logits.
  template <class Function>
  GRADSCALE_DEVICE void each_window_of_exponentials(A maximum, Function function) {
    each_window([&](A* values, int32_t first) {
      if constexpr (!cached) {
#pragma unroll
        for (int k = 0; k < kSize; ++k) {
          values[k] = exp_nonpositive(values[k] - maximum);
        }
      }
      function(values, first);
    });
  }

  // The largest logit of the row; -inf of a row of NaN.
  GRADSCALE_DEVICE A maximum() {
    A largest = -static_cast<A>(INFINITY);
    each_window([&](const A* values, int32_t) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        largest = larger(largest, values[k]);
      }
    });
    return group_.maximum(largest);
  }

 private:
  // The window that is cached at c.
  GRADSCALE_DEVICE int32_t window_of(int c) const {
    return group_.rank + c * group_.size;
  }
  // All of it is in the row; where it begins is a multiple of 16 bytes, as of every window.
  GRADSCALE_DEVICE bool is_whole(int32_t window) const {
    return windows_.first(window) >= 0 && windows_.first(window) + kSize <= width_;
  }
  GRADSCALE_DEVICE void read(int32_t window, A* values) const {
    read_elements<kSize>(logits_, width_, windows_.first(window), -static_cast<A>(INFINITY), values);
  }

  const T* logits_;
  int32_t width_;
  Group group_;
  Windows<T> windows_;
  A values_[cached ? kCachedWindows : 1][kSize];
};

template <class T>
GRADSCALE_DEVICE bool fits_registers(int64_t width, const Group& group) {
  return windows_at_most(width, sizeof(T)) <= cached_windows(sizeof(T)) * group.size;
}

// sum_j e_j c_j over raw centres c_j, bins at equal distance from the middle taken together, as on the CPU.
template <class A, class Row>
GRADSCALE_DEVICE A raw_moment(const Row& row, int32_t width, A maximum, const A* centers, const Group& group) {
  const int32_t last = width - 1;
  A sum = 0;
  for (int32_t j = group.rank; j < (width + 1) / 2; j += group.size) {
    const A of_low = exp_nonpositive(row[j] - maximum), of_high = exp_nonpositive(row[last - j] - maximum);
    sum += j == last - j ? of_low * centers[j] : pair_moment(centers[j], centers[last - j], of_low, of_high);
  }
  return group.sum(sum);
}

template <class A>
struct CategoricalSums {
  A maximum;
  A sum;
  A expected; // in the coordinates of expectations
};

// Leaves exponentials in the row.
template <class A, class Row>
GRADSCALE_DEVICE CategoricalSums<A> categorical_sums(
    Row& row, int32_t width, const Support& support, const void* raw_centers, const Group& group) {
  const A maximum = row.maximum();
  const A offset = static_cast<A>(1 - width);
  A sum = 0;
  A moment = 0;
  row.each_window([&](A* values, int32_t first) {
    const A center = offset + static_cast<A>(2 * first); // a whole number, as the others of the window are
#pragma unroll
    for (int k = 0; k < Row::kSize; ++k) {
      const A e = exp_nonpositive(values[k] - maximum);
      sum += e;
      moment += e * (center + static_cast<A>(2 * k));
      values[k] = e;
    }
  });
  sum = group.sum(sum);
  moment = support.raw ? raw_moment(row, width, maximum, static_cast<const A*>(raw_centers), group) : group.sum(moment);
  const A expected = support.raw ? moment / sum : expectation_from_moment(moment / sum, support);
  return {maximum, sum, expected};
}

template <class A>
GRADSCALE_DEVICE A decoded_value(A expected, const Support& support) {
  return support.raw ? expected : inverse_transform_value(support.transform, expected, static_cast<A>(support.eps));
}

template <class A>
GRADSCALE_DEVICE A smoothing_of_bin(const DeviceHead& head) {
  const double smoothing = head.head.label_smoothing;
  return smoothing == 0 ? A(0) : static_cast<A>(smoothing / static_cast<double>(head.width));
}

// log(sum) - sum_j t_j (x_j - maximum); gradient c (p_j - t_j).
template <class T, class A, bool cached, class Target>
GRADSCALE_DEVICE void categorical_row(const RowTask& task, const Target& target) {
  const Head& head = task.head.head;
  const Group& group = task.group;
  const A kept = static_cast<A>(1 - head.label_smoothing);
  const A everywhere = smoothing_of_bin<A>(task.head);
  LogitsRow<T, A, cached> row(task.template prediction<T>(), task.width, group);
  const CategoricalSums<A> sums = categorical_sums<A>(row, task.width, head.support, task.raw_centers, group);
  const int32_t begin = task.active ? target.begin : 0;
  const int32_t end = task.active ? target.end : 0;
  A cost = 0;
  for (int32_t j = begin + group.rank; j < end; j += group.size) {
    const A mass = kept * static_cast<A>(target.mass(j));
    if (mass != 0) { // an illegal bin (-inf) without mass costs nothing
      cost += mass * (row[j] - sums.maximum);
    }
  }
  if (everywhere != 0) {
    for (int32_t j = group.rank; j < task.width; j += group.size) {
      cost += everywhere * (row[j] - sums.maximum);
    }
  }
  cost = group.sum(cost);
  const A nan = target.is_nan() ? static_cast<A>(NAN) : A(0);
  task.store_loss(std::log(sums.sum) - cost + nan);
  task.store_expected(decoded_value(sums.expected, head.support));
  if (task.segment.gradient == nullptr) {
    return;
  }
  const A c = static_cast<A>(task.coefficient);
  const A factor = c / sums.sum + nan;
  const A offset = c * everywhere;
  row.each_window_of_exponentials(sums.maximum, [&](const A* values, int32_t first) {
    A gradient[kVector<T>];
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      gradient[k] = values[k] * factor - offset;
    }
    task.template write_gradient<T, kVector<T>>(first, gradient, begin, end);
  });
  for (int32_t j = begin + group.rank; j < end; j += group.size) {
    const A p = exp_nonpositive(row[j] - sums.maximum) / sums.sum;
    A gradient = (p - (kept * static_cast<A>(target.mass(j)) + everywhere)) * c;
    task.template write_gradient<T, 1>(j, &gradient);
  }
}

// The target of a policy: a distribution, or a class as one; smoothed.
template <class A>
class PolicyTarget {
 public:
  GRADSCALE_DEVICE explicit PolicyTarget(const RowTask& task)
      : rows_(task.segment.target_rows()),
        row_(task.row),
        width_(task.width),
        kept_(static_cast<A>(1 - task.head.head.label_smoothing)),
        everywhere_(smoothing_of_bin<A>(task.head)),
        smooth_(task.head.head.label_smoothing != 0) {
    if (rows_.element == Element::int64) {
      const int64_t chosen = static_cast<const int64_t*>(rows_.data)[row_ * rows_.stride];
      chosen_ = chosen >= 0 && chosen < task.head.width ? static_cast<int32_t>(chosen) : -1;
    }
  }

  // Elements first .. first + size; 0 outside the row.
  template <int size>
  GRADSCALE_DEVICE void read(int32_t first, A* out) const {
    if (rows_.element == Element::int64) {
#pragma unroll
      for (int k = 0; k < size; ++k) {
        const int32_t j = first + k;
        out[k] = chosen_ < 0 && j >= 0 && j < width_ ? static_cast<A>(NAN) : (j == chosen_ ? A(1) : A(0));
      }
    } else {
      dispatch_element(rows_.element, [&](auto type) {
        using U = decltype(type);
        read_elements<size>(static_cast<const U*>(rows_.data) + row_ * rows_.stride, width_, first, A(0), out);
      });
    }
    if (smooth_) {
#pragma unroll
      for (int k = 0; k < size; ++k) {
        const int32_t j = first + k;
        out[k] = j >= 0 && j < width_ ? out[k] * kept_ + everywhere_ : A(0);
      }
    }
  }

 private:
  Rows rows_;
  int64_t row_;
  int32_t width_;
  int32_t chosen_ = -1;
  A kept_;
  A everywhere_;
  bool smooth_;
};

// sum(t) log(sum) - sum_j t_j (x_j - maximum) - w H(p) [+ sum_j t_j log t_j];
// gradient c (sum(t) p_j - t_j + w p_j (log p_j + H)).
template <class T, class A, bool cached>
GRADSCALE_DEVICE void soft_cross_entropy_row(const RowTask& task) {
  constexpr int size = kVector<T>;
  const Head& head = task.head.head;
  const Group& group = task.group;
  const PolicyTarget<A> target(task);
  LogitsRow<T, A, cached> row(task.template prediction<T>(), task.width, group);
  const A maximum = row.maximum();
  A sum = 0;
  A shifted = 0; // sum of e_j (x_j - maximum)
  A target_sum = 0;
  A correct = 0;
  row.each_window([&](A* values, int32_t first) {
    A t[size];
    target.template read<size>(first, t);
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const A difference = values[k] - maximum;
      const A e = exp_nonpositive(difference);
      sum += e;
      shifted += product(e, difference);
      target_sum += t[k];
      correct += product(t[k], difference);
      values[k] = e;
    }
  });
  sum = group.sum(sum);
  target_sum = group.sum(target_sum);
  correct = group.sum(correct);
  const A log_sum = std::log(sum);
  const A inverse_sum = A(1) / sum;
  A loss = target_sum * log_sum - correct;
  if (head.subtract_target_entropy) {
    double negative_entropy = 0; // small terms, all alike, would each lose the same digits in a float
    for (int32_t j = group.rank; j < task.width; j += group.size) {
      A t;
      target.template read<1>(j, &t);
      negative_entropy += t == 0 ? A(0) : t * std::log(t);
    }
    loss += static_cast<A>(group.sum(negative_entropy));
  }
  const A weight = static_cast<A>(head.entropy_weight);
  A entropy = 0;
  if (weight != 0) {
    entropy = log_sum - group.sum(shifted) * inverse_sum;
    loss -= weight * entropy;
  }
  task.store_loss(loss);
  if (task.segment.gradient == nullptr) {
    return;
  }
  const A c = static_cast<A>(task.coefficient);
  const A factor = target_sum * inverse_sum;
  const A constant = entropy - log_sum; // log p_j + H = x_j - maximum + constant
  const T* logits = task.template prediction<T>();
  row.each_window_of_exponentials(maximum, [&](const A* values, int32_t first) {
    A t[size];
    target.template read<size>(first, t);
    if (weight != 0) { // the entropy's part goes with the target's
      A x[size];
      read_elements<size>(logits, task.width, first, A(0), x);
#pragma unroll
      for (int k = 0; k < size; ++k) {
        t[k] -= weight * product(values[k] * inverse_sum, (x[k] - maximum) + constant);
      }
    }
    A gradient[size];
#pragma unroll
    for (int k = 0; k < size; ++k) {
      gradient[k] = (values[k] * factor - t[k]) * c;
    }
    task.template write_gradient<T, size>(first, gradient);
  });
}

// Calls function(prediction, target, first) for the windows of this thread, both 0 outside the row.
template <class T, class A, class Function>
GRADSCALE_DEVICE void each_window_of_both(const RowTask& task, Function function) {
  const T* prediction = task.template prediction<T>();
  const Windows<T> windows(prediction, task.width);
  const Rows rows = task.segment.target_rows();
  for (int32_t window = task.group.rank; window < windows.count; window += task.group.size) {
    A x[kVector<T>], t[kVector<T>] = {};
    const int32_t first = windows.first(window);
    read_elements<kVector<T>>(prediction, task.width, first, A(0), x);
    dispatch_element(rows.element, [&](auto type) {
      using U = decltype(type);
      const U* target = static_cast<const U*>(rows.data) + task.row * rows.stride;
      read_elements<kVector<T>>(target, task.width, first, A(0), t);
    });
    function(x, t, first);
  }
}

// mean_j (x_j - transform(t_j))^2; gradient c 2 (x_j - transform(t_j)) / width, which waits for no sum.
template <class T, class A>
GRADSCALE_DEVICE void mean_squared_error_row(const RowTask& task) {
  const Support& transform = task.head.head.support;
  const auto width = static_cast<double>(task.head.width);
  const A factor = static_cast<A>(2 * task.coefficient / width);
  A sum = 0;
  each_window_of_both<T, A>(task, [&](const A* x, const A* t, int32_t first) {
    A gradient[kVector<T>];
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      const A difference = x[k] - transform_value(transform.transform, t[k], static_cast<A>(transform.eps));
      sum += difference * difference;
      gradient[k] = difference * factor;
    }
    if (task.segment.gradient != nullptr) {
      task.template write_gradient<T, kVector<T>>(first, gradient);
    }
  });
  task.store_loss(task.group.sum(sum) / static_cast<A>(width));
}

// The row is read twice, the second time from the cache.
template <class T, class A>
GRADSCALE_DEVICE void negative_cosine_row(const RowTask& task) {
  constexpr int size = kVector<T>;
  double x_unit = 1;
  double t_unit = 1;
  if (sizeof(A) == 8) { // squares of doubles must neither overflow nor underflow
    x_unit = t_unit = 0;
    each_window_of_both<T, A>(task, [&](const A* x, const A* t, int32_t) {
#pragma unroll
      for (int k = 0; k < size; ++k) {
        x_unit = std::abs(x[k]) > x_unit ? static_cast<double>(std::abs(x[k])) : x_unit;
        t_unit = std::abs(t[k]) > t_unit ? static_cast<double>(std::abs(t[k])) : t_unit;
      }
    });
    x_unit = task.group.maximum(x_unit);
    t_unit = task.group.maximum(t_unit);
    x_unit = x_unit > 0 ? x_unit : 1;
    t_unit = t_unit > 0 ? t_unit : 1;
  }
  double xx = 0, tt = 0, xt = 0;
  each_window_of_both<T, A>(task, [&](const A* of_x, const A* of_t, int32_t) {
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const double x = of_x[k] / x_unit;
      const double t = of_t[k] / t_unit;
      xx += x * x;
      tt += t * t;
      xt += x * t;
    }
  });
  const Cosine cosine = negative_cosine(
      task.group.sum(xx), task.group.sum(tt), task.group.sum(xt), x_unit, t_unit, task.head.head.support.eps);
  task.store_loss(cosine.loss);
  if (task.segment.gradient == nullptr) {
    return;
  }
  const double of_x = cosine.of_x * task.coefficient;
  const double of_t = cosine.of_t * task.coefficient;
  each_window_of_both<T, A>(task, [&](const A* x, const A* t, int32_t first) {
    A gradient[size];
#pragma unroll
    for (int k = 0; k < size; ++k) {
      gradient[k] = static_cast<A>(of_x * x[k] + of_t * t[k]);
    }
    task.template write_gradient<T, size>(first, gradient);
  });
}

// Rows of one number: BinaryCrossEntropy and PerStepLoss.
template <class T, class A>
GRADSCALE_DEVICE void scalar_row(const RowTask& task) {
  const A x = static_cast<A>(to_accumulate(*task.template prediction<T>()));
  LossAndDerivative<A> result{x, A(1)};
  if (task.head.head.kind == Kind::binary_cross_entropy) {
    result = binary_cross_entropy(x, task.template scalar_target<A>());
  }
  task.store_loss(result.loss);
  if (task.leads() && task.segment.gradient != nullptr) {
    A gradient = result.derivative * static_cast<A>(task.coefficient);
    task.template write_gradient<T, 1>(0, &gradient);
  }
}

template <class T, class A, bool cached>
GRADSCALE_DEVICE void logits_row(const RowTask& task) {
  const Head& head = task.head.head;
  switch (head.kind) {
    case Kind::two_hot:
      return categorical_row<T, A, cached>(task, two_hot(task.template scalar_target<double>(), head.support));
    case Kind::hl_gauss:
      return categorical_row<T, A, cached>(
          task, hl_gauss(task.template scalar_target<double>(), head.support, head.sigma_ratio));
    default:
      return soft_cross_entropy_row<T, A, cached>(task);
  }
}

// A is the type of sums; predictions are of a type that is summed in it.
template <class A>
GRADSCALE_DEVICE void run_row(const RowTask& task) {
  dispatch_element(static_cast<Element>(task.segment.prediction_element), [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(typename AccumulateType<T>::type) == sizeof(A)) {
      switch (task.head.head.kind) {
        case Kind::mean_squared_error:
          return mean_squared_error_row<T, A>(task);
        case Kind::negative_cosine:
          return negative_cosine_row<T, A>(task);
        case Kind::binary_cross_entropy:
        case Kind::per_step_loss:
          return scalar_row<T, A>(task);
        default:
          break;
      }
      if (fits_registers<T>(task.head.width, task.group)) {
        logits_row<T, A, true>(task);
      } else {
        logits_row<T, A, false>(task);
      }
    }
  });
}

} // namespace gradscale
