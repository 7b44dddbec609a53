// Rows of heads with a loop of their own: CategoricalKL, where divergence_rows.cuh has no kernel, and QuantileHuber.
#pragma once

#include "../kinds.h"
#include "divergence_rows.cuh"
#include "thread_group_rows.cuh"

namespace gradscale {

// Rows of logits of several distributions: CategoricalKL. The thread group of a row is divided into n parts of up to a
// warp, and a part computes every n-th group of classes. A thread keeps four classes in registers; groups of more than
// 128 classes are read four times: for maxima, sums, divergence and gradient. Bytes: both rows are read once from
// memory and then from the cache; gradients are written once.

constexpr int kClasses = 4; // of a thread

// The number of threads in a part: enough for kClasses classes per thread, but at most a warp or the threads of the
// row.
GRADSCALE_DEVICE int part_size(int32_t classes, int threads) {
  int size = 1;
  while (kClasses * size < classes && size < 32 && size < threads) {
    size *= 2;
  }
  return size;
}

// This thread's part of the divergence of a row, and of its metrics.
struct PartOfDivergence {
  double divergence = 0, gradient_square = 0, largest_logit = 0;
};

// A group of classes of a row, and the threads that compute it.
struct ClassGroup {
  int32_t first;   // class of the row
  int32_t classes; // 0 for threads that have no classes
  ThreadGroup group;

  // The classes of this thread among those from `begin` on.
  template <class U, class A>
  GRADSCALE_DEVICE void read(const U* row, int32_t begin, A (&logits)[kClasses]) const {
#pragma unroll
    for (int k = 0; k < kClasses; ++k) {
      const int32_t c = begin + k * group.size;
      const auto logit = static_cast<A>(to_accumulate(row[first + (c < classes ? c : 0)])); // without a branch
      logits[k] = c < classes ? logit : -static_cast<A>(INFINITY);
    }
  }

  // True if a thread's classes fit into its registers.
  GRADSCALE_DEVICE bool fits_in_registers() const {
    return classes <= kClasses * group.size;
  }
};

// kClasses classes of a thread: the logits of both distributions, their exponentials, and the terms of the divergence.
// Each step needs the steps before it.
template <Mixture mixture, bool predicts_p, class T, class A>
struct ClassesOfThread {
  const CategoricalKL<A>& head;
  const RowTask& task;
  const ClassGroup& own;
  A x[kClasses], t[kClasses]; // logits, then their differences from the maximum
  A x_exponential[kClasses], t_exponential[kClasses];
  DivergenceTerms<A> terms[kClasses];
  A largest_x = -static_cast<A>(INFINITY), largest_t = largest_x;
  GroupSoftmax<A> softmax_x{}, softmax_t{};

  enum Step { kNone, kLogits, kExponentials, kTerms };

  GRADSCALE_DEVICE void take(Step step, int32_t begin) {
    if (step == kLogits) {
      own.read(task.prediction.as<const T>(), begin, x);
      dispatch_element(
          task.target.element, [&](auto type) { own.read(task.target.as<const decltype(type)>(), begin, t); });
      return;
    }
#pragma unroll
    for (int k = 0; k < kClasses; ++k) {
      if (step == kExponentials) {
        x_exponential[k] = exp_nonpositive(x[k] -= largest_x);
        t_exponential[k] = exp_nonpositive(t[k] -= largest_t);
      } else {
        terms[k] = head.template terms<mixture, predicts_p>(
            x_exponential[k], t_exponential[k], x[k], t[k], softmax_x, softmax_t);
      }
    }
  }

  // Takes the steps up to `last`, then calls function(class, k) for this thread's classes, of which some may be behind
  // the last. Classes that are kept have taken the steps up to `done` before.
  template <class Function>
  GRADSCALE_DEVICE void each(Step done, Step last, Function function) {
    const bool keeps = own.fits_in_registers();
#pragma unroll 1
    for (int32_t begin = own.group.rank; begin < own.classes; begin += kClasses * own.group.size) {
#pragma unroll
      for (int step = kLogits; step <= last; ++step) {
        if (step > done || !keeps) {
          take(static_cast<Step>(step), begin);
        }
      }
#pragma unroll
      for (int k = 0; k < kClasses; ++k) {
        function(begin + k * own.group.size, k);
      }
    }
  }

  // Adds the divergence of the group, and writes its gradient times `factor`.
  GRADSCALE_DEVICE void add_divergence(A factor, PartOfDivergence& part) {
    A largest_finite = 0;
    each(kNone, kLogits, [&](int32_t, int k) {
      largest_finite = larger(largest_finite, finite_magnitude(x[k]));
      largest_x = larger(largest_x, x[k]);
      largest_t = larger(largest_t, t[k]);
    });
    largest_x = own.group.maximum(largest_x);
    largest_t = own.group.maximum(largest_t);
    A sum_x = 0, sum_t = 0;
    each(kLogits, kExponentials, [&](int32_t, int k) {
      sum_x += x_exponential[k];
      sum_t += t_exponential[k];
    });
    sum_x = own.group.sum(sum_x);
    sum_t = own.group.sum(sum_t);
    softmax_x = {largest_x, A(1) / sum_x, std::log(sum_x)};
    softmax_t = {largest_t, A(1) / sum_t, std::log(sum_t)};
    A total = 0, h = 0, square = 0;
    each(kExponentials, kTerms, [&](int32_t c, int k) {
      total += c < own.classes ? terms[k].divergence : A(0);
      h += c < own.classes ? terms[k].h : A(0);
    });
    if (task.wants_gradient()) {
      h = own.group.sum(h);
      each(kTerms, kTerms, [&](int32_t c, int k) {
        A gradient = (terms[k].h - terms[k].softmax * h) * factor;
        if (c < own.classes) {
          square += task.template write_gradient<T, 1>(own.first + c, &gradient);
        }
      });
    }
    part.divergence += total;
    part.gradient_square += square;
    part.largest_logit = larger(part.largest_logit, static_cast<double>(largest_finite));
  }
};

// Returns this thread's part of the divergence. Writes its gradients as if there were no free nats.
template <Mixture mixture, bool predicts_p, class T, class A>
GRADSCALE_DEVICE PartOfDivergence row_divergence(const CategoricalKL<A>& head, const RowTask& task, int threads) {
  const Segment& s = task.block.segment;
  const auto classes = static_cast<int32_t>(s.last_size), class_groups = static_cast<int32_t>(s.width / s.last_size);
  const int parts = task.group.size / threads, own = task.group.rank / threads;
  const A factor = head.factor(static_cast<double>(INFINITY), task.factor.coefficient);
  PartOfDivergence part;
#pragma unroll 1
  for (int32_t begin = 0; begin < class_groups; begin += parts) { // all threads of a warp take part in each reduction
    const bool has_classes = task.active && begin + own < class_groups;
    const ClassGroup own_classes{
        has_classes ? (begin + own) * classes : 0,
        has_classes ? classes : 0,
        ThreadGroup{threads, task.group.rank % threads, nullptr}};
    ClassesOfThread<mixture, predicts_p, T, A>{head, task, own_classes}.add_divergence(factor, part);
  }
  return part;
}

template <class T, int options, class A>
GRADSCALE_DEVICE void own_row(RowOf<CategoricalKL<A>>, const RowTask& task) {
  constexpr Mixture mixture = mixture_of(options);
  const Segment& s = task.block.segment;
  const CategoricalKL<A> head(task.block.head, s.last_size, mixture);
  const int threads = part_size(static_cast<int32_t>(s.last_size), task.group.size);
  const PartOfDivergence part = row_divergence < mixture, (options & kPredictsP) != 0, T > (head, task, threads);
  const double divergence = task.group.sum(part.divergence);
  const double gradient_square = divergence < head.free_nats ? 0 : part.gradient_square;
  task.store(head.loss(divergence), 0, gradient_square, part.largest_logit);
  if (task.wants_gradient() && divergence < head.free_nats) { // each thread clears what it wrote
    const int32_t classes = static_cast<int32_t>(s.last_size), stride = task.group.size / threads * classes;
    for (int32_t first = task.group.rank / threads * classes; first < task.width; first += stride) {
      for (int32_t c = task.group.rank % threads; c < classes; c += threads) {
        A zero = 0;
        task.template write_gradient<T, 1>(first + c, &zero);
      }
    }
  }
}

// Rows of quantiles: QuantileHuber. A thread of the row's thread group computes every group.size-th quantile, and loops
// over all targets for each. The threads of a thread group read the same target at the same time, from the cache.
// Bytes: predictions and targets are read once from memory, gradients are written once. The order of sums depends only
// on the shape.

template <class T, int options, class A>
GRADSCALE_DEVICE void own_row(RowOf<QuantileHuber<A>>, const RowTask& task) {
  const Segment& s = task.block.segment;
  const QuantileHuber<A> head(task.block.head, s);
  const T* x = task.prediction.as<const T>();
  const Rows& fractions = task.block.fields[s.first_field + kSecondField];
  const A factor = head.factor(task.factor.coefficient);
  const auto count = static_cast<int32_t>(s.target_width);
  double sum = 0, square = 0;
  dispatch_element(task.target.element, [&](auto type) {
    const auto* targets = task.target.as<const decltype(type)>();
    for (int32_t i = task.group.rank; i < task.width; i += task.group.size) {
      const A quantile = static_cast<A>(to_accumulate(x[i]));
      const QuantileWeights<A> weights = head.weights(fractions, task.row, i);
      A loss = 0, slope = 0;
      for (int32_t begin = 0; begin < count; begin += head.kPartialSum) {
        const int32_t end = begin + head.kPartialSum < count ? begin + head.kPartialSum : count;
        A loss_part = 0, slope_part = 0;
        for (int32_t j = begin; j < end; ++j) {
          const A u = static_cast<A>(to_accumulate(targets[j])) - quantile;
          head.add(u, weights.above, weights.below, loss_part, slope_part);
        }
        loss += loss_part;
        slope += slope_part;
      }
      sum += loss;
      if (task.wants_gradient()) {
        A gradient = slope * factor;
        square += task.template write_gradient<T, 1>(i, &gradient);
      }
    }
  });
  task.store(task.group.sum(sum), 0, square, 0);
}

} // namespace gradscale
