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
class LogitsLoss {
  using A = typename AccumulateType<T>::type;
  using Entropy = CrossEntropy<A, options>;
  static constexpr int kSize = kVector<T>;

 public:
  GRADSCALE_DEVICE LogitsLoss(const RowTask& task, const Target& target)
      : task_(task),
        head_(task.head()),
        target_(target),
        row_{task.template prediction<T>(), task.width, task.group},
        entropy_{static_cast<A>(head_.entropy_weight)},
        share_(static_cast<A>(1 - head_.label_smoothing)),
        everywhere_(bin_smoothing<A>(task)),
        maximum_(row_.maximum(largest_finite_)) {
  }

  GRADSCALE_DEVICE void compute() const {
    A sums[Entropy::kSums] = {};
    add_row(sums);
    const A sum = sums[Entropy::kSum], weighted = sums[Entropy::kWeighted];
    task_.store_loss(entropy_.loss(sums));
    task_.store_detail(head_.has_support() ? decoded_row(weighted, sum, head_.support) : Entropy::entropy(sums));
    A square = 0;
    if (task_.segment().gradient.data != nullptr) {
      const auto factors = Entropy::factors(sums, A(1) / sum, static_cast<A>(task_.coefficient));
      each_window([&](const A* d, const A* t, int32_t first) {
        A gradient[kSize];
#pragma unroll
        for (int k = 0; k < kSize; ++k) {
          gradient[k] = entropy_.gradient(factors, exp_nonpositive(d[k]), d[k], t[k]);
        }
        square += task_.template write_gradient<T, kSize>(first, gradient);
      });
    }
    task_.store_metrics(square, largest_finite_);
  }

 private:
  // Calls function(differences, targets, first) for the 16-byte windows of this thread.
  template <class Function>
  GRADSCALE_DEVICE void each_window(Function function) const {
    row_.each_window([&](A* x, int32_t first) {
      A t[kSize];
      target_.read(first, t);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const bool inside = first + k >= 0 && first + k < task_.width;
        t[k] = inside ? t[k] * share_ + everywhere_ : A(0);
        x[k] -= maximum_;
      }
      function(x, t, first);
    });
  }

  GRADSCALE_DEVICE void add_row(A (&sums)[Entropy::kSums]) const {
    each_window([&](const A* d, const A* t, int32_t first) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const A weight = head_.has_support() ? row_.position(first + k) : Entropy::finite(d[k]);
        Entropy::add(sums, exp_nonpositive(d[k]), t[k], product(t[k], d[k]), weight);
      }
    });
#pragma unroll
    for (A& sum : sums) {
      sum = task_.group.sum(sum);
    }
    if (head_.has_support() && head_.support.raw) {
      sums[Entropy::kWeighted] = raw_moment(row_, maximum_, task_.block.template raw_centers<A>());
    }
  }

  const RowTask& task_;
  const Head& head_;
  const Target& target_;
  LogitsRow<T> row_;
  Entropy entropy_;
  A share_;          // 1 - label_smoothing
  A everywhere_;     // label_smoothing / width
  A largest_finite_; // of this thread's logits
  A maximum_;
};

template <class T, int options, class Target>
GRADSCALE_DEVICE void logits_row(const RowTask& task, const Target& target) {
  LogitsLoss<T, options, Target>(task, target).compute();
}

} // namespace gradscale
