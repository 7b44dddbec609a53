// Rows of heads with a loop of their own: CategoricalKL, QuantileHuber.
#pragma once

#include "../own_heads.h"
#include "team_rows.cuh"

namespace gradscale {

// Rows of logits of several distributions: CategoricalKL. The team of a row is divided into teams of up to a warp. With
// n teams, a team computes every n-th group of classes, and reads it four times: for maxima, sums, divergence and
// gradient. Bytes: both rows are read once from memory and then from the cache; gradients are written once.

// The number of threads in a team: enough for four classes per thread, but at most a warp or the threads of the row.
GRADSCALE_DEVICE int team_size(int32_t classes, int threads) {
  int size = 1;
  while (4 * size < classes && size < 32 && size < threads) {
    size *= 2;
  }
  return size;
}

// This thread's part of the divergence of a row, and of its metrics.
struct PartOfDivergence {
  double divergence = 0, gradient_square = 0, largest_logit = 0;
};

// A group of classes: pointers to its logits, and the team that computes it.
template <class T, class U>
struct ClassGroup {
  using A = Accumulate<T>;
  const T* x;
  const U* t;
  int32_t classes; // 0 for threads that have no group
  Team team;

  template <class Function>
  GRADSCALE_DEVICE void each(Function function) const {
    for (int32_t c = team.rank; c < classes; c += team.size) {
      function(c, static_cast<A>(to_accumulate(x[c])), static_cast<A>(to_accumulate(t[c])));
    }
  }

  template <Mixture mixture, bool predicts_p>
  GRADSCALE_DEVICE void add_divergence(
      const CategoricalKL<A>& head, A factor, const RowTask& task, int32_t first, PartOfDivergence& part) const {
    A largest_x = -static_cast<A>(INFINITY), largest_t = largest_x, sum_x = 0, sum_t = 0;
    A largest_finite = 0, square = 0;
    each([&](int32_t, A x_logit, A t_logit) {
      largest_finite = larger(largest_finite, finite_magnitude(x_logit));
      largest_x = larger(largest_x, x_logit);
      largest_t = larger(largest_t, t_logit);
    });
    largest_x = team.maximum(largest_x);
    largest_t = team.maximum(largest_t);
    each([&](int32_t, A x_logit, A t_logit) {
      sum_x += exp_nonpositive(x_logit - largest_x);
      sum_t += exp_nonpositive(t_logit - largest_t);
    });
    sum_x = team.sum(sum_x);
    sum_t = team.sum(sum_t);
    const GroupSoftmax<A> softmax_x{largest_x, A(1) / sum_x, std::log(sum_x)};
    const GroupSoftmax<A> softmax_t{largest_t, A(1) / sum_t, std::log(sum_t)};
    const auto terms = [&](A x_logit, A t_logit) {
      const A x_below = x_logit - largest_x, t_below = t_logit - largest_t;
      return head.template terms<mixture, predicts_p>(
          exp_nonpositive(x_below), exp_nonpositive(t_below), x_below, t_below, softmax_x, softmax_t);
    };
    A total = 0, h = 0;
    each([&](int32_t, A x_logit, A t_logit) {
      const DivergenceTerms<A> element = terms(x_logit, t_logit);
      total += element.divergence;
      h += element.h;
    });
    h = team.sum(h);
    each([&](int32_t c, A x_logit, A t_logit) {
      if (task.block.segment.gradient.data != nullptr) {
        const DivergenceTerms<A> element = terms(x_logit, t_logit);
        A gradient = (element.h - element.softmax * h) * factor;
        square += task.template write_gradient<T, 1>(first + c, &gradient);
      }
    });
    part.divergence += total;
    part.gradient_square += square;
    part.largest_logit = larger(part.largest_logit, static_cast<double>(largest_finite));
  }
};

// Returns this thread's part of the divergence. Writes its gradients as if there were no free nats.
template <Mixture mixture, bool predicts_p, class T, class A>
GRADSCALE_DEVICE PartOfDivergence row_divergence(const CategoricalKL<A>& head, const RowTask& task, int threads) {
  const Segment& s = task.block.segment;
  const auto classes = static_cast<int32_t>(s.last_size), groups = static_cast<int32_t>(s.width / s.last_size);
  const int teams = task.team.size / threads, own = task.team.rank / threads;
  const A factor = head.factor(static_cast<double>(INFINITY), task.factor.coefficient);
  PartOfDivergence part;
  dispatch_element(s.target.element, [&](auto type) {
    using U = decltype(type);
    const U* targets = static_cast<const U*>(s.target.data) + task.row * s.target.stride;
    for (int32_t begin = 0; begin < groups; begin += teams) { // all threads of a warp take part in each reduction
      const int32_t group = begin + own, first = group < groups ? group * classes : 0;
      const ClassGroup<T, U> class_group{
          task.template prediction<T>() + first,
          targets + first,
          task.active && group < groups ? classes : 0,
          Team{threads, task.team.rank % threads, nullptr}};
      class_group.template add_divergence<mixture, predicts_p>(head, factor, task, first, part);
    }
  });
  return part;
}

template <Mixture mixture, class T, class A>
GRADSCALE_DEVICE PartOfDivergence row_divergence(const CategoricalKL<A>& head, const RowTask& task, int threads) {
  return head.predicts_p ? row_divergence<mixture, true, T>(head, task, threads)
                         : row_divergence<mixture, false, T>(head, task, threads);
}

template <class T, class A>
GRADSCALE_DEVICE void own_row(const CategoricalKL<A>& head, const RowTask& task) {
  const Segment& s = task.block.segment;
  const int threads = team_size(static_cast<int32_t>(s.last_size), task.team.size);
  PartOfDivergence part;
  switch (head.mixture) {
    case Mixture::none:
      part = row_divergence<Mixture::none, T>(head, task, threads);
      break;
    case Mixture::probabilities:
      part = row_divergence<Mixture::probabilities, T>(head, task, threads);
      break;
    case Mixture::logarithms:
      part = row_divergence<Mixture::logarithms, T>(head, task, threads);
      break;
  }
  const double divergence = task.team.sum(part.divergence);
  const double gradient_square = divergence < head.free_nats ? 0 : part.gradient_square;
  task.store(head.loss(divergence), 0, gradient_square, part.largest_logit);
  if (s.gradient.data != nullptr && divergence < head.free_nats) { // each thread clears what it wrote
    const int32_t classes = static_cast<int32_t>(s.last_size), stride = task.team.size / threads * classes;
    for (int32_t first = task.team.rank / threads * classes; first < task.width; first += stride) {
      for (int32_t c = task.team.rank % threads; c < classes; c += threads) {
        A zero = 0;
        task.template write_gradient<T, 1>(first + c, &zero);
      }
    }
  }
}

// Rows of quantiles: QuantileHuber. A thread of the row's team computes every team.size-th quantile, and loops over
// all targets for each. The threads of a team read the same target at the same time, from the cache. Bytes:
// predictions and targets are read once from memory, gradients are written once. The order of sums depends only on the
// shape.

template <class T, class A>
GRADSCALE_DEVICE void own_row(const QuantileHuber<A>& head, const RowTask& task) {
  const Segment& s = task.block.segment;
  const T* x = task.template prediction<T>();
  const A factor = head.factor(task.factor.coefficient);
  const auto count = static_cast<int32_t>(s.target_width);
  double sum = 0, square = 0;
  dispatch_element(s.target.element, [&](auto type) {
    using U = decltype(type);
    const U* targets = static_cast<const U*>(s.target.data) + task.row * s.target.stride;
    for (int32_t i = task.team.rank; i < task.width; i += task.team.size) {
      const A quantile = static_cast<A>(to_accumulate(x[i]));
      const QuantileWeights<A> weights = head.weights(i);
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
      if (s.gradient.data != nullptr) {
        A gradient = slope * factor;
        square += task.template write_gradient<T, 1>(i, &gradient);
      }
    }
  });
  task.store(task.team.sum(sum), 0, square, 0);
}

} // namespace gradscale
