// The rows of policy_rows.h on a device: logits over actions.
#pragma once

#include "row_tools.cuh"

namespace gradscale {

// The smoothed target of a policy: a distribution, or a class as one.
template <class A>
class PolicyTarget {
 public:
  GRADSCALE_DEVICE explicit PolicyTarget(const RowTask& task)
      : rows_(task.segment().target_rows()),
        row_(task.row),
        width_(task.width),
        target_share_(static_cast<A>(1 - task.head().head.label_smoothing)),
        everywhere_(smoothing_of_bin<A>(task.head())),
        smooth_(task.head().head.label_smoothing != 0) {
    if (rows_.element == Element::int64) {
      const int64_t chosen = static_cast<const int64_t*>(rows_.data)[row_ * rows_.stride];
      chosen_ = chosen >= 0 && chosen < task.head().width ? static_cast<int32_t>(chosen) : -1;
    }
  }

  // Reads elements first .. first + size; they are 0 outside the row.
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
        out[k] = j >= 0 && j < width_ ? out[k] * target_share_ + everywhere_ : A(0);
      }
    }
  }

 private:
  Rows rows_;
  int64_t row_;
  int32_t width_;
  int32_t chosen_ = -1;
  A target_share_;
  A everywhere_;
  bool smooth_;
};

template <class A>
struct PolicySums {
  A maximum;
  A sum;
  A target_sum;
  A correct; // sum of t_j (x_j - maximum)
  A shifted; // sum of e_j (x_j - maximum)
};

// Takes the sums of a row, and leaves its exponentials in it.
template <class A, class Row>
GRADSCALE_DEVICE PolicySums<A> policy_sums(Row& row, const PolicyTarget<A>& target, const Group& group) {
  PolicySums<A> sums{row.maximum(), 0, 0, 0, 0};
  row.each_window([&](A* values, int32_t first) {
    A t[Row::kSize];
    target.template read<Row::kSize>(first, t);
#pragma unroll
    for (int k = 0; k < Row::kSize; ++k) {
      const A difference = values[k] - sums.maximum;
      const A e = exp_nonpositive(difference);
      sums.sum += e;
      sums.shifted += product(e, difference);
      sums.target_sum += t[k];
      sums.correct += product(t[k], difference);
      values[k] = e;
    }
  });
  sums.sum = group.sum(sums.sum);
  sums.target_sum = group.sum(sums.target_sum);
  sums.correct = group.sum(sums.correct);
  sums.shifted = group.sum(sums.shifted);
  return sums;
}

// The sum of t_j log t_j, in double: small terms, all alike, would each lose the same digits in a float.
template <class A>
GRADSCALE_DEVICE A negative_entropy(const PolicyTarget<A>& target, int32_t width, const Group& group) {
  double sum = 0;
  for (int32_t j = group.rank; j < width; j += group.size) {
    A t = 0;
    target.template read<1>(j, &t);
    sum += t == 0 ? A(0) : t * std::log(t);
  }
  return static_cast<A>(group.sum(sum));
}

// Writes c (sum(t) p_j - t_j + w p_j (log p_j + H)), from a row that has exponentials.
template <class T, class A, class Row>
GRADSCALE_DEVICE void write_policy_gradient(
    const RowTask& task, Row& row, const PolicyTarget<A>& target, const PolicySums<A>& sums, A weight) {
  constexpr int size = Row::kSize;
  const A c = static_cast<A>(task.coefficient);
  const A inverse_sum = A(1) / sums.sum;
  const A factor = sums.target_sum * inverse_sum;
  const A expected = sums.shifted * inverse_sum; // log p_j + H = x_j - maximum - expected
  const T* logits = task.template prediction<T>();
  row.each_window_of_exponentials(sums.maximum, [&](const A* values, int32_t first) {
    A t[size];
    target.template read<size>(first, t);
    if (weight != 0) { // the entropy's part goes with the target's
      A x[size];
      read_elements<size>(logits, task.width, first, A(0), x);
#pragma unroll
      for (int k = 0; k < size; ++k) {
        t[k] -= weight * product(values[k] * inverse_sum, (x[k] - sums.maximum) - expected);
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

// sum(t) log(sum) - sum_j t_j (x_j - maximum) - w H(p) [+ sum_j t_j log t_j].
template <class T, class A, bool cached>
GRADSCALE_DEVICE void soft_cross_entropy_row(const RowTask& task) {
  const Head& head = task.head().head;
  const PolicyTarget<A> target(task);
  LogitsRow<T, A, cached> row(task.template prediction<T>(), task.width, task.group);
  const PolicySums<A> sums = policy_sums<A>(row, target, task.group);
  const A log_sum = std::log(sums.sum);
  A loss = sums.target_sum * log_sum - sums.correct;
  if (head.subtract_target_entropy) {
    loss += negative_entropy(target, task.width, task.group);
  }
  const A weight = static_cast<A>(head.entropy_weight);
  const A entropy = log_sum - sums.shifted / sums.sum;
  if (weight != 0) {
    loss -= weight * entropy;
  }
  task.store_loss(loss);
  task.store_detail(entropy);
  if (task.segment().gradient != nullptr) {
    write_policy_gradient<T>(task, row, target, sums, weight);
  }
}

} // namespace gradscale
