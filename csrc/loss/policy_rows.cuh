// The rows of policy_rows.h on a device: logits over actions.
#pragma once

#include "row_tools.cuh"

namespace gradscale {

// The target of a policy: a distribution, or a class as one; smoothed.
template <class A>
class PolicyTarget {
 public:
  GRADSCALE_DEVICE explicit PolicyTarget(const RowTask& task)
      : rows_(task.segment.target_rows()),
        row_(task.row),
        width_(task.width),
        target_share_(static_cast<A>(1 - task.head.head.label_smoothing)),
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

} // namespace gradscale
