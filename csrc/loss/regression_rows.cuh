// The rows of regression_rows.h on a device: numbers and vectors.
#pragma once

#include "row_tools.cuh"

namespace gradscale {

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

// Stores the loss and the gradient of a row of one number.
template <class T, class A>
GRADSCALE_DEVICE void store_scalar_row(const RowTask& task, const LossAndDerivative<A>& result) {
  task.store_loss(result.loss);
  if (task.leads() && task.segment.gradient != nullptr) {
    A gradient = result.derivative * static_cast<A>(task.coefficient);
    task.template write_gradient<T, 1>(0, &gradient);
  }
}

template <class T, class A>
GRADSCALE_DEVICE A scalar_prediction(const RowTask& task) {
  return static_cast<A>(to_accumulate(*task.template prediction<T>()));
}

template <class T, class A>
GRADSCALE_DEVICE void binary_cross_entropy_row(const RowTask& task) {
  store_scalar_row<T, A>(task, binary_cross_entropy(scalar_prediction<T, A>(task), task.template scalar_target<A>()));
}

template <class T, class A>
GRADSCALE_DEVICE void per_step_loss_row(const RowTask& task) {
  store_scalar_row<T, A>(task, LossAndDerivative<A>{scalar_prediction<T, A>(task), A(1)});
}

} // namespace gradscale
