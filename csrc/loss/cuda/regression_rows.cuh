// The loops over rows on a GPU for the heads of regression_heads.h.
#pragma once

#include "../regression_heads.h"
#include "block_of_rows.cuh"

namespace gradscale {

// Calls function(prediction, target, first) for the 16-byte windows of this thread. Elements outside the row are 0.
template <class RowHead, class T, class A, class Function>
GRADSCALE_DEVICE void each_window_pair(const RowTask& task, Function function) {
  const T* prediction = task.template prediction<T>();
  const Rows rows = task.segment().target;
  const Support& transform = task.head().support;
  each_window(prediction, task.width, task.group, A(0), [&](const A* x, int32_t first) {
    A t[kVector<T>] = {};
    dispatch_element(rows.element, [&](auto type) {
      using U = decltype(type);
      const U* target = static_cast<const U*>(rows.data) + task.row * rows.stride;
      read_elements<kVector<T>>(target, task.width, first, A(0), t);
    });
#pragma unroll
    for (int k = 0; k < kVector<T> && RowHead::kTransformsTarget; ++k) {
      t[k] = transform_value(transform.transform, t[k], static_cast<A>(transform.eps));
    }
    function(x, t, first);
  });
}

// If the gradient depends on the sums (kGradientWaits), the row is read again, from the cache.
template <class RowHead, class T, class A>
GRADSCALE_DEVICE void vector_row(const RowTask& task) {
  constexpr int size = kVector<T>;
  const Group& group = task.group;
  const bool wants_gradient = task.segment().gradient.data != nullptr;
  RowHead head{{static_cast<double>(task.segment().width), &task.head()}};
  if constexpr (RowHead::kScales) {
    A largest_x = 0, largest_t = 0;
    each_window_pair<RowHead, T, A>(task, [&](const A* x, const A* t, int32_t) {
#pragma unroll
      for (int k = 0; k < size; ++k) {
        largest_x = larger(largest_x, std::abs(x[k]));
        largest_t = larger(largest_t, std::abs(t[k]));
      }
    });
    head.scale(group.maximum(largest_x), group.maximum(largest_t));
  }
  A factor = RowHead::kGradientWaits ? A(0) : head.factor(task.coefficient);
  double square = 0;
  const auto write_gradient = [&](const A* x, const A* t, int32_t first) {
    A gradient[size];
#pragma unroll
    for (int k = 0; k < size; ++k) {
      gradient[k] = head.gradient(x[k], t[k]) * factor;
    }
    square += task.template write_gradient<T, size>(first, gradient);
  };
  Sums<typename RowHead::Sum> sums{};
  each_window_pair<RowHead, T, A>(task, [&](const A* x, const A* t, int32_t first) {
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const auto terms = head.terms(x[k], t[k]);
#pragma unroll
      for (int i = 0; i < RowHead::kSums; ++i) {
        sums.values[i] += terms.values[i];
      }
    }
    if (!RowHead::kGradientWaits && wants_gradient) {
      write_gradient(x, t, first);
    }
  });
#pragma unroll
  for (int i = 0; i < RowHead::kSums; ++i) {
    sums.values[i] = group.sum(sums.values[i]);
  }
  task.store_loss(head.finish(sums));
  if (RowHead::kGradientWaits && wants_gradient) {
    factor = head.factor(task.coefficient);
    each_window_pair<RowHead, T, A>(task, write_gradient);
  }
  task.store_metrics(square, 0);
}

// A row of one number, which one thread owns.
template <class RowHead, class T, class A>
GRADSCALE_DEVICE void scalar_row(const RowTask& task) {
  const A x = static_cast<A>(to_accumulate(*task.template prediction<T>()));
  const A t = task.segment().target.data == nullptr ? A(0) : task.block.template target<A>(task.row);
  RowHead head{{1, &task.head()}};
  task.store_loss(head.finish(head.terms(x, t)));
  double square = 0;
  if (task.leads() && task.segment().gradient.data != nullptr) {
    A gradient = head.gradient(x, t) * head.factor(task.coefficient);
    square = task.template write_gradient<T, 1>(0, &gradient);
  }
  task.store_metrics(square, 0);
}

} // namespace gradscale
