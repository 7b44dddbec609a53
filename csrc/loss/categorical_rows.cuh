// The rows of categorical_rows.h on a device: logits over the bins of a support.
#pragma once

#include "row_tools.cuh"

namespace gradscale {

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

// Takes the sums of a row, and leaves its exponentials in it.
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

// log(sum) - sum_j t_j (x_j - maximum); gradient c (p_j - t_j).
template <class T, class A, bool cached, class Target>
GRADSCALE_DEVICE void categorical_row(const RowTask& task, const Target& target) {
  const Head& head = task.head().head;
  const Group& group = task.group;
  const A target_share = static_cast<A>(1 - head.label_smoothing);
  const A everywhere = smoothing_of_bin<A>(task.head());
  LogitsRow<T, A, cached> row(task.template prediction<T>(), task.width, group);
  const CategoricalSums<A> sums =
      categorical_sums<A>(row, task.width, head.support, task.block.template raw_centers<A>(), group);
  const int32_t begin = task.active ? target.begin : 0;
  const int32_t end = task.active ? target.end : 0;
  A cost = 0;
  for (int32_t j = begin + group.rank; j < end; j += group.size) {
    const A mass = target_share * static_cast<A>(target.mass(j));
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
  task.store_detail(decoded_value(sums.expected, head.support));
  if (task.segment().gradient == nullptr) {
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
    A gradient = (p - (target_share * static_cast<A>(target.mass(j)) + everywhere)) * c;
    task.template write_gradient<T, 1>(j, &gradient);
  }
}

} // namespace gradscale
