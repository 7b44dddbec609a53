// The row of each head on a device: its loss, decoded prediction and gradient, by a group of threads.
#pragma once

#include "categorical_rows.cuh"
#include "kinds.h"
#include "policy_rows.cuh"
#include "regression_rows.cuh"

#include <type_traits>

namespace gradscale {

// Calls row(cached) with std::true_type where the row stays in the registers of its group, or else std::false_type.
template <class T, class Row>
GRADSCALE_DEVICE void with_logits(const RowTask& task, Row row) {
  if (fits_registers<T>(task.head.width, task.group)) {
    row(std::true_type());
  } else {
    row(std::false_type());
  }
}

// A is the type of sums; predictions are of a type that is summed in it.
template <class T, class A>
GRADSCALE_DEVICE void run_row_of(const RowTask& task) {
  dispatch_kind<A>(
      task.head.head,
      [&](auto encode) {
        with_logits<T>(task, [&](auto cached) {
          categorical_row<T, A, decltype(cached)::value>(task, encode(task.template scalar_target<double>()));
        });
      },
      [&] { with_logits<T>(task, [&](auto cached) { soft_cross_entropy_row<T, A, decltype(cached)::value>(task); }); },
      [&](auto of) { vector_row<typename decltype(of)::Head, T, A>(task); },
      [&](auto of) { scalar_row<typename decltype(of)::Head, T, A>(task); });
}

template <class A>
GRADSCALE_DEVICE void run_row(const RowTask& task) {
  dispatch_element(static_cast<Element>(task.segment.prediction_element), [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(typename AccumulateType<T>::type) == sizeof(A)) {
      run_row_of<T, A>(task);
    }
  });
}

} // namespace gradscale
