// Rows of any type, width and support, computed by a group of threads, which reads them in parts of 16 bytes: logits of
// one distribution, and the heads of regression_heads.h. ThreadGroupRows of multi_step_loss.cuh is their kind of rows.
#pragma once

#include "../../cuda/thread_group.cuh"
#include "../../formulas/cross_entropy.h"
#include "../../formulas/targets.h"
#include "../regression_heads.h"
#include "block_of_rows.cuh"

namespace gradscale {

// The row of a tensor.
struct TensorRow {
  void* data; // null: there is none
  Element element;

  GRADSCALE_DEVICE TensorRow(const Rows& rows, int64_t row) : data(rows.data), element(rows.element) {
    if (data != nullptr) {
      data = static_cast<char*>(data) + row * rows.stride * element_size(element);
    }
  }
  template <class T>
  GRADSCALE_DEVICE T* as() const {
    return static_cast<T*>(data);
  }
};

// A row of a segment and the group of threads that owns it. What the threads read again and again is kept here, in
// registers, because the compiler cannot know that stores of gradients do not change the table.
struct RowTask : RowOfThread {
  const BlockOfRows& block;
  int32_t width; // 0 for thread groups after the last row, which only take part in reductions
  RowFactor factor;
  TensorRow prediction, target, gradient;

  GRADSCALE_DEVICE RowTask(const BlockOfRows& block, double* shared)
      : RowOfThread(block.index, block.row_range.threads_per_row, block.pass.batch, shared),
        block(block),
        width(active ? static_cast<int32_t>(block.segment.width) : 0),
        factor(block.factor_of(row)),
        prediction(block.segment.prediction, row),
        target(block.segment.target, row),
        gradient(block.segment.gradient, row) {
  }

  GRADSCALE_DEVICE bool wants_gradient() const {
    return gradient.data != nullptr;
  }

  // Reduces the metrics of the thread group's threads, and stores the results of the row.
  GRADSCALE_DEVICE void store(double loss, double detail, double gradient_square, double largest_logit) const {
    const RowMetrics metrics{group.sum(gradient_square), group.maximum(largest_logit)};
    if (active && group.rank == 0) {
      block.store(row, factor.counts, loss, detail, metrics);
    }
  }

  // Writes `size` elements of the row's gradient, from element `first` on, and returns the sum of their squares.
  template <class T, int size, class A>
  GRADSCALE_DEVICE A write_gradient(int32_t first, A* values) const {
    A square = 0;
#pragma unroll
    for (int k = 0; k < size; ++k) {
      values[k] = factor.counts ? values[k] : A(0);
      square += first + k < width ? values[k] * values[k] : A(0);
    }
    if (gradient.element == kElementOf<T>) {
      write_elements<size>(gradient.as<T>(), width, first, values);
    } else {
      write_elements<size>(gradient.as<A>(), width, first, values);
    }
    return square;
  }
};

// ---- Logits ---------------------------------------------------------------------------------------------------------

// Used where lane_rows.cuh and wide_rows.cuh are not, such as for float64, HLGauss over raw centres, and rows that are
// too wide for registers.
//
// threads_for_row() threads, at most a block, own a row. They read it three times, 16 bytes per thread at a time: for
// the maximum, for the sums, and for the gradient. Bytes: logits and targets are read from memory once and then from
// the cache; gradients are written once.

// Targets of the elements of a row from `first` on, before smoothing; outside of the row they are not used.
template <class A, class Target>
struct BinsOfRow { // a few bins have mass
  static constexpr bool kIsSparse = false;
  Target target;

  GRADSCALE_DEVICE static int32_t chosen() {
    return -1;
  }
  template <int size>
  GRADSCALE_DEVICE void read(int32_t first, A (&t)[size]) const {
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const int32_t j = first + k;
      t[k] = j >= target.begin && j < target.end ? static_cast<A>(target.mass(j)) : A(0);
    }
  }
};

// A few classes have a probability. They are left out of the sums over all elements, and of the gradient that is
// written first.
template <class A>
struct ClassesOfRow {
  static constexpr bool kIsSparse = true;
  const int64_t* classes;
  Rows probabilities;
  int64_t row;
  int32_t count, width;
  ThreadGroup group;

  GRADSCALE_DEVICE ClassesOfRow(const RowTask& task, const Rows& probabilities)
      : classes(task.target.as<const int64_t>()),
        probabilities(probabilities),
        row(task.row),
        count(task.width == 0 ? 0 : static_cast<int32_t>(task.block.segment.target_width)),
        width(task.width),
        group(task.group) {
  }
  GRADSCALE_DEVICE static int32_t chosen() {
    return -1;
  }
  template <int size>
  GRADSCALE_DEVICE void read(int32_t, A (&t)[size]) const {
#pragma unroll
    for (A& own : t) {
      own = 0;
    }
  }
  GRADSCALE_DEVICE A probability(int32_t k) const {
    const A t = static_cast<A>(probabilities.load(row, k));
    return class_of(classes[k], width) < 0 ? static_cast<A>(NAN) : t;
  }
  // Calls function(class, probability) for this thread's entries.
  template <class Function>
  GRADSCALE_DEVICE void each_entry(Function function) const {
    for (int32_t k = group.rank; k < count; k += group.size) {
      function(max_class(k), probability(k));
    }
  }
  // The same with the total probability of a class, once for each class.
  template <class Function>
  GRADSCALE_DEVICE void each_class(Function function) const {
    for (int32_t k = group.rank; k < count; k += group.size) {
      bool is_first = true;
      A total = 0;
      for (int32_t other = 0; other < count; ++other) {
        if (max_class(other) == max_class(k)) {
          is_first = is_first && other >= k;
          total += probability(other);
        }
      }
      if (is_first) {
        function(max_class(k), total);
      }
    }
  }

 private:
  GRADSCALE_DEVICE int32_t max_class(int32_t k) const { // 0 for a class out of range, whose probability is NaN
    const int32_t chosen = class_of(classes[k], width);
    return chosen < 0 ? 0 : chosen;
  }
};

template <class A>
struct ActionsOfRow { // a distribution, or a class
  static constexpr bool kIsSparse = false;
  TensorRow row;
  int32_t width;

  // The class; -1 if there is none, or none in range.
  GRADSCALE_DEVICE int32_t chosen() const {
    return width > 0 && row.element == Element::int64 ? class_of(*row.as<const int64_t>(), width) : -1;
  }
  template <int size>
  GRADSCALE_DEVICE void read(int32_t first, A (&t)[size]) const {
    if (row.element == Element::int64) {
      const int32_t chosen = class_of(*row.as<const int64_t>(), width);
#pragma unroll
      for (int k = 0; k < size; ++k) {
        t[k] = static_cast<A>(class_mass(chosen, first + k));
      }
      return;
    }
    dispatch_element(
        row.element, [&](auto type) { read_elements<size>(row.as<const decltype(type)>(), width, first, A(0), t); });
  }
};

// Computes the cross-entropy of a row with its target. Each thread of the row's group has a part of the row.
template <class T, int options, class Target>
class LogitsLoss {
  using A = Accumulate<T>;
  using Formula = CrossEntropy<A, options>;
  static constexpr int kSize = kVector<T>;

 public:
  using Sums = A[Formula::kSums];

  GRADSCALE_DEVICE LogitsLoss(const RowTask& task, const LogitsRow<T>& row, const Target& target, A maximum)
      : task_(task),
        row_(row),
        target_(target),
        head_(task.block.head),
        smoothing_(head_.label_smoothing, task.block.segment.width),
        maximum_(maximum) {
  }

  // The sums of the row. kWeighted is the sum of the exponentials times positions for heads with a support, and times
  // differences for policies. The term of a class is added last: in a sum that contains it, the small terms of label
  // smoothing would lose digits.
  GRADSCALE_DEVICE void find_sums(Sums& sums) const {
    const int32_t chosen = target_.chosen();
    each_part([&](const A* d, const A* t, int32_t first) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const A correct = Formula::correct(first + k == chosen && chosen >= 0 ? smoothing_.everywhere : t[k], d[k]);
        const A e = exp_nonpositive(d[k]);
        const A weighted = head_.has_support() ? e * row_.position(first + k) : Formula::weighted(e, d[k]);
        Formula::add(sums, e, t[k], correct, weighted);
      }
    });
    if constexpr (Target::kIsSparse) {
      target_.each_entry(
          [&](int32_t j, A t) { Formula::add(sums, A(0), t, Formula::correct(t, difference(j)), A(0)); });
    }
#pragma unroll
    for (A& sum : sums) {
      sum = task_.group.sum(sum);
    }
    if (chosen >= 0) {
      sums[Formula::kCorrect] += Formula::correct(smoothing_.share, difference(chosen));
    }
    if (head_.has_support() || (task_.target.element == Element::int64 && !Target::kIsSparse)) {
      sums[Formula::kMass] = one_or_nan(sums[Formula::kMass]);
    }
    if (head_.has_support() && head_.support.raw) {
      const char* centers = task_.block.table + task_.block.row_range.raw_centers; // in A
      sums[Formula::kWeighted] = raw_moment(row_, maximum_, reinterpret_cast<const A*>(centers));
    }
  }

  // Writes the gradient. Returns the sum of this thread's squares.
  GRADSCALE_DEVICE A write_gradient(const Formula& formula, const Sums& sums) const {
    A square = 0;
    const A sum = sums[Formula::kSum];
    const auto factors = Formula::factors(sums, A(1) / sum, static_cast<A>(task_.factor.coefficient));
    each_part([&](const A* d, const A* t, int32_t first) {
      A gradient[kSize];
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        gradient[k] = formula.gradient(factors, exp_nonpositive(d[k]), d[k], t[k]);
      }
      square += task_.template write_gradient<T, kSize>(first, gradient);
    });
    if constexpr (Target::kIsSparse) {
      task_.group.synchronize(); // the gradient without targets has been written
      target_.each_class([&](int32_t j, A t) {
        const A d = difference(j), e = exp_nonpositive(d);
        const A before = formula.gradient(factors, e, d, A(0));
        A gradient = formula.gradient(factors, e, d, t);
        square += task_.template write_gradient<T, 1>(j, &gradient) - (task_.factor.counts ? before * before : A(0));
      });
    }
    return square;
  }

 private:
  // Calls function(differences, targets, first) for the parts of this thread.
  template <class Function>
  GRADSCALE_DEVICE void each_part(Function function) const {
    row_.each_part([&](A* x, int32_t first) {
      A t[kSize];
      target_.read(first, t);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        t[k] = first + k < task_.width ? smoothing_.smoothed(t[k]) : A(0);
        x[k] -= maximum_;
      }
      function(x, t, first);
    });
  }

  GRADSCALE_DEVICE A difference(int32_t j) const {
    return static_cast<A>(to_accumulate(task_.prediction.template as<const T>()[j])) - maximum_;
  }

  const RowTask& task_;
  const LogitsRow<T>& row_;
  const Target& target_;
  const Head& head_;
  const Smoothing<A> smoothing_;
  const A maximum_;
};

template <class T, int options, class Target>
GRADSCALE_DEVICE void logits_row(const RowTask& task, const Target& target) {
  using A = Accumulate<T>;
  using Formula = CrossEntropy<A, options>;
  const Head& head = task.block.head;
  const LogitsRow<T> row{task.prediction.as<const T>(), task.width, task.group};
  A largest_finite; // of this thread's logits
  const A maximum = row.maximum(largest_finite);
  const LogitsLoss<T, options, Target> loss(task, row, target, maximum);
  const auto formula = Formula::of(head);
  A sums[Formula::kSums] = {};
  loss.find_sums(sums);
  const A detail = head.has_support() ? decoded_row(sums[Formula::kWeighted], sums[Formula::kSum], head.support)
                                      : Formula::entropy(sums);
  const A square = task.wants_gradient() ? loss.write_gradient(formula, sums) : A(0);
  task.store(formula.loss(sums), detail, square, largest_finite);
}

// ---- The heads of regression_heads.h --------------------------------------------------------------------------------

// Calls function(prediction, target, first) for the parts of this thread. Elements outside the row are 0, and
// are added to the sums of the row like others.
template <class RowHead, class T, class A, class Function>
GRADSCALE_DEVICE void each_pair(const RowTask& task, Function function) {
  const Support& transform = task.block.head.support;
  each_part(task.prediction.as<const T>(), task.width, task.group, A(0), [&](const A* x, int32_t first) {
    A t[kVector<T>] = {};
    dispatch_element(task.target.element, [&](auto type) {
      read_elements<kVector<T>>(task.target.as<const decltype(type)>(), task.width, first, A(0), t);
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
  const ThreadGroup& group = task.group;
  RowHead head{{static_cast<double>(task.block.segment.width), &task.block.head}};
  if constexpr (RowHead::kScales) {
    A largest_x = 0, largest_t = 0;
    each_pair<RowHead, T, A>(task, [&](const A* x, const A* t, int32_t) {
#pragma unroll
      for (int k = 0; k < size; ++k) {
        largest_x = larger(largest_x, std::abs(x[k]));
        largest_t = larger(largest_t, std::abs(t[k]));
      }
    });
    head.scale(group.maximum(largest_x), group.maximum(largest_t));
  }
  A factor = RowHead::kGradientWaits ? A(0) : head.factor(task.factor.coefficient);
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
  each_pair<RowHead, T, A>(task, [&](const A* x, const A* t, int32_t first) {
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const auto terms = head.terms(x[k], t[k]);
#pragma unroll
      for (int i = 0; i < RowHead::kSums; ++i) {
        sums.values[i] += terms.values[i];
      }
    }
    if (!RowHead::kGradientWaits && task.wants_gradient()) {
      write_gradient(x, t, first);
    }
  });
#pragma unroll
  for (int i = 0; i < RowHead::kSums; ++i) {
    sums.values[i] = group.sum(sums.values[i]);
  }
  const double loss = head.finish(sums);
  if (RowHead::kGradientWaits && task.wants_gradient()) {
    factor = head.factor(task.factor.coefficient);
    each_pair<RowHead, T, A>(task, write_gradient);
  }
  task.store(loss, 0, square, 0);
}

// A row of one number, which one thread owns.
template <class RowHead, class T, class A>
GRADSCALE_DEVICE void scalar_row(const RowTask& task) {
  static_assert(!RowHead::kTransformsTarget, "a head with a transform has rows of any number of elements");
  const A x = static_cast<A>(to_accumulate(*task.prediction.as<const T>()));
  const Rows& target = task.block.segment.target;
  const A t = target.data == nullptr ? A(0) : static_cast<A>(target.load(task.row));
  RowHead head{{1, &task.block.head}};
  const double loss = head.finish(head.terms(x, t));
  double square = 0;
  if (task.active && task.wants_gradient()) {
    A gradient = head.gradient(x, t) * head.factor(task.factor.coefficient);
    square = task.template write_gradient<T, 1>(0, &gradient);
  }
  task.store(loss, 0, square, 0);
}

} // namespace gradscale
