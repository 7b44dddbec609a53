// Rows of logits of any type, support and width, computed by a group of threads. They are used where lane_rows.cuh
// is not, such as for float64, raw supports, and rows that are too wide for the registers of a warp.
//
// threads_for_row() threads, at most a block, own a row. They read it three times, 16 bytes per thread at a time: for
// the maximum, for the sums, and for the gradient. Bytes: logits and targets are read from memory once and then from
// the cache; gradients are written once.
#pragma once

#include "../../cuda/rows.cuh"
#include "../../formulas/cross_entropy.h"
#include "block_of_rows.cuh"

namespace gradscale {

// Targets of the elements of a row from `first` on, before smoothing; outside of the row they are not used.
template <class A, class Target>
struct BinsOfRow { // a few bins have mass
  Target target;

  template <int size>
  GRADSCALE_DEVICE void read(int32_t first, A (&t)[size]) const {
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const int32_t j = first + k;
      t[k] = j >= target.begin && j < target.end ? static_cast<A>(target.mass(j)) : A(0);
    }
  }
};

template <class A>
struct ActionsOfRow { // a distribution, or a class as a one-hot distribution; a class out of range gives NaN
  Rows rows;
  int64_t row;
  int32_t width;

  template <int size>
  GRADSCALE_DEVICE void read(int32_t first, A (&t)[size]) const {
    if (rows.element == Element::int64) {
      const int64_t chosen = static_cast<const int64_t*>(rows.data)[row * rows.stride];
#pragma unroll
      for (int k = 0; k < size; ++k) {
        t[k] = chosen < 0 || chosen >= width ? static_cast<A>(NAN) : (first + k == chosen ? A(1) : A(0));
      }
    }
    dispatch_element(rows.element, [&](auto type) {
      using U = decltype(type);
      read_elements<size>(static_cast<const U*>(rows.data) + row * rows.stride, width, first, A(0), t);
    });
  }
};

// Cross-entropy of a row with its target. kWeighted is the sum of the exponentials times positions for heads with a
// support, and times differences for policies.
template <class T, int options, class Target>
GRADSCALE_DEVICE void logits_row(const RowTask& task, const Target& target) {
  using A = typename AccumulateType<T>::type;
  using Entropy = CrossEntropy<A, options>;
  constexpr int size = kVector<T>;
  const Head& head = task.head();
  const LogitsRow<T> row{task.template prediction<T>(), task.width, task.group};
  const Entropy entropy{static_cast<A>(head.entropy_weight)};
  const A target_share = static_cast<A>(1 - head.label_smoothing);
  const A everywhere = bin_smoothing<A>(task); // label_smoothing / width
  A largest_finite;                            // of this thread's logits
  const A maximum = row.maximum(largest_finite);

  // Calls function(differences, targets, first) for the 16-byte windows of this thread.
  const auto each_window = [&](auto function) {
    row.each_window([&](A* x, int32_t first) {
      A t[size];
      target.read(first, t);
#pragma unroll
      for (int k = 0; k < size; ++k) {
        const bool inside = first + k >= 0 && first + k < task.width;
        t[k] = inside ? t[k] * target_share + everywhere : A(0);
        x[k] -= maximum;
      }
      function(x, t, first);
    });
  };

  A sums[Entropy::kSums] = {};
  each_window([&](const A* d, const A* t, int32_t first) {
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const A weight = head.has_support() ? row.position(first + k) : Entropy::finite(d[k]);
      Entropy::add(sums, exp_nonpositive(d[k]), t[k], product(t[k], d[k]), weight);
    }
  });
#pragma unroll
  for (A& sum : sums) {
    sum = task.group.sum(sum);
  }
  if (head.has_support() && head.support.raw) {
    sums[Entropy::kWeighted] = raw_moment(row, maximum, task.block.template raw_centers<A>());
  }
  const A sum = sums[Entropy::kSum];
  task.store_loss(entropy.loss(sums));
  task.store_detail(
      head.has_support() ? decoded_row(sums[Entropy::kWeighted], sum, head.support) : Entropy::entropy(sums));
  A square = 0;
  if (task.segment().gradient.data != nullptr) {
    const auto factors = Entropy::factors(sums, A(1) / sum, static_cast<A>(task.coefficient));
    each_window([&](const A* d, const A* t, int32_t first) {
      A gradient[size];
#pragma unroll
      for (int k = 0; k < size; ++k) {
        gradient[k] = entropy.gradient(factors, exp_nonpositive(d[k]), d[k], t[k]);
      }
      square += task.template write_gradient<T, size>(first, gradient);
    });
  }
  task.store_metrics(square, largest_finite);
}

} // namespace gradscale
