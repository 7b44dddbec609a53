// Rows of policies and of clipped values: PolicyGradient, GaussianPolicyGradient, ClippedSquaredError.
//
// The thread group of a row reads it twice, once for the log-probability of the action and once for the gradient; a row
// with several choices three times, because the sums of a choice are not kept. Bytes: predictions and actions are read
// from memory once and then from the cache; gradients are written once.
#pragma once

#include "../../formulas/distributions.h"
#include "../policy_heads.h"
#include "thread_group_rows.cuh"

namespace gradscale {

GRADSCALE_DEVICE const Rows* fields_of(const RowTask& task) {
  return task.block.fields + task.block.segment.first_field;
}

// A field of the row; 0 if it was left out.
template <class A>
GRADSCALE_DEVICE A field_of(const RowTask& task, int64_t field) {
  const Rows& rows = fields_of(task)[field];
  return rows.data == nullptr ? A(0) : static_cast<A>(rows.load(task.row));
}

// The score of a row with this log pi(a), which is stored.
template <class A>
GRADSCALE_DEVICE Score<A> score_of(const RowTask& task, A log_prob) {
  const Head& head = task.block.head;
  const Rows& chosen = fields_of(task)[kChosenLogProbs];
  if (!task.block.pass.is_backward && chosen.data != nullptr && task.active && task.group.rank == 0) {
    Slab{chosen.data, chosen.stride, chosen.element == Element::float64}.store(task.row, log_prob);
  }
  const PolicyFields<A> fields{
      field_of<A>(task, kAdvantages), field_of<A>(task, kLogProbs), field_of<A>(task, kReferenceLogProbs)};
  const PolicyScore<A> formula(head);
  const Rows& differences = fields_of(task)[kDifferences];
  if (!task.block.pass.is_backward && differences.data != nullptr && task.active && task.group.rank == 0) {
    const auto difference = formula.difference(log_prob, fields.log_prob);
    const Slab pair{differences.data, 1, differences.element == Element::float64};
    pair.store(2 * task.row, difference.divergence);
    pair.store(2 * task.row + 1, difference.clipped);
  }
  return formula.score(head.surrogate, log_prob, fields);
}

// Stores a row whose prediction is one number.
template <class T, class A>
GRADSCALE_DEVICE void store_scalar(const RowTask& task, const Score<A>& score) {
  A square = 0;
  if (task.active && task.wants_gradient()) {
    A gradient = score.slope * static_cast<A>(task.factor.coefficient);
    square = task.template write_gradient<T, 1>(0, &gradient);
  }
  task.store(score.loss, 0, square, 0);
}

// ---- Values ---------------------------------------------------------------------------------------------------------

template <class T, class A>
GRADSCALE_DEVICE void scored_row(RowOf<ClippedSquaredError<A>>, const RowTask& task) {
  const A value = static_cast<A>(to_accumulate(*task.prediction.as<const T>()));
  const A target = static_cast<A>(task.block.segment.target.load(task.row));
  const ClippedError<A> formula{static_cast<A>(task.block.head.clip_high)};
  store_scalar<T>(task, formula.score(value, target, field_of<A>(task, kSecondField)));
}

// ---- Logits of choices, or log-probabilities ------------------------------------------------------------------------

// A choice of a row, its sums, and the index of its action in the row; -1 if the action is out of range.
template <class T>
struct ChoiceOfRow {
  using A = Accumulate<T>;
  Choice range;
  LogitsRow<T> logits;
  int32_t action;
  A maximum, largest_finite;
  ChoiceSums<A> sums;

  GRADSCALE_DEVICE ChoiceOfRow(const RowTask& task, int32_t index) {
    const Head& head = task.block.head;
    const auto* ends = reinterpret_cast<const int32_t*>(task.block.table + task.block.row_range.choice_ends);
    range = choice_of(head, ends, index, task.block.segment.width);
    const int32_t width = range.end - range.begin;
    logits = {task.prediction.as<const T>() + range.begin, task.width == 0 ? 0 : width, task.group};
    const int32_t chosen = class_of(task.target.as<const int64_t>()[index], width);
    action = chosen < 0 ? -1 : chosen;
    maximum = logits.maximum(largest_finite);
    A others = 0, weighted = 0;
    logits.each_part([&](const A* x, int32_t first) {
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) {
        const A d = x[k] - maximum, e = first + k < width ? exp_nonpositive(d) : A(0);
        others += first + k == action ? A(0) : e;
        weighted += e * CrossEntropy<A, 0>::finite(d);
      }
    });
    sums = {task.group.sum(others), task.group.sum(weighted), 0, static_cast<A>(NAN)};
    if (action >= 0 && task.width != 0) {
      sums.chosen_difference = static_cast<A>(to_accumulate(logits.logits[action])) - maximum;
      sums.chosen_e = exp_nonpositive(sums.chosen_difference);
    }
  }

  // Writes the gradient, and returns the sum of the squares of this thread's elements.
  GRADSCALE_DEVICE A write_gradient(const RowTask& task, A slope) const {
    const ChoiceGradient<A> formula(sums, slope, static_cast<A>(task.block.head.entropy_weight));
    const A coefficient = static_cast<A>(task.factor.coefficient);
    const bool in_own_type = task.gradient.element == kElementOf<T>;
    A square = 0;
    logits.each_part([&](const A* x, int32_t first) {
      A gradient[kVector<T>];
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) {
        const A d = x[k] - maximum, value = formula.at(exp_nonpositive(d), d, first + k == action) * coefficient;
        gradient[k] = task.factor.counts && first + k < logits.width ? value : A(0);
        square += gradient[k] * gradient[k];
      }
      if (in_own_type) {
        write_elements<kVector<T>>(task.gradient.as<T>() + range.begin, logits.width, first, gradient);
      } else {
        write_elements<kVector<T>>(task.gradient.as<A>() + range.begin, logits.width, first, gradient);
      }
    });
    return square;
  }
};

template <class T, class A>
GRADSCALE_DEVICE void scored_row(RowOf<PolicyGradient<A>>, const RowTask& task) {
  if (task.target.data == nullptr) { // the prediction is log pi(a)
    const A log_prob = static_cast<A>(to_accumulate(*task.prediction.as<const T>()));
    store_scalar<T>(task, score_of(task, log_prob));
    return;
  }
  const Head& head = task.block.head;
  const int32_t count = num_choices(head);
  ChoiceOfRow<T> choice(task, 0);
  A log_prob = choice.sums.log_prob(), entropy = choice.sums.entropy(), square = 0;
  A largest_finite = choice.largest_finite;
#pragma unroll 1
  for (int32_t c = 1; c < count; ++c) {
    choice = ChoiceOfRow<T>(task, c);
    log_prob += choice.sums.log_prob();
    entropy += choice.sums.entropy();
    largest_finite = larger(largest_finite, choice.largest_finite);
  }
  const Score<A> score = score_of(task, log_prob);
  if (task.wants_gradient()) {
#pragma unroll 1
    for (int32_t c = 0; c < count; ++c) {
      if (count > 1) {
        choice = ChoiceOfRow<T>(task, c);
      }
      square += choice.write_gradient(task, score.slope);
    }
  }
  const A loss = with_bonus(score.loss, static_cast<A>(head.entropy_weight), entropy);
  task.store(loss, entropy, square, largest_finite);
}

// ---- Normal distributions -------------------------------------------------------------------------------------------

// Calls function(means, log_scales, actions, first) for the parts of this thread.
template <class T, class A, class Function>
GRADSCALE_DEVICE void each_normal(const RowTask& task, Function function) {
  constexpr int size = kVector<T>;
  const TensorRow log_scales(fields_of(task)[kLogStds], task.row);
  each_part(task.prediction.as<const T>(), task.width, task.group, A(0), [&](const A* means, int32_t first) {
    A scales[size], actions[size];
    dispatch_element(log_scales.element, [&](auto type) {
      read_elements<size>(log_scales.as<const decltype(type)>(), task.width, first, A(0), scales);
    });
    dispatch_element(task.target.element, [&](auto type) {
      read_elements<size>(task.target.as<const decltype(type)>(), task.width, first, A(0), actions);
    });
    function(means, scales, actions, first);
  });
}

template <class T, class A>
GRADSCALE_DEVICE void scored_row(RowOf<GaussianPolicyGradient<A>>, const RowTask& task) {
  constexpr int size = kVector<T>;
  A log_prob = 0, entropy = 0;
  each_normal<T, A>(task, [&](const A* means, const A* scales, const A* actions, int32_t first) {
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const auto term = NormalTerm<A>::of(means[k], scales[k], actions[k]);
      log_prob += first + k < task.width ? term.log_prob(term.z, term.log_scale) : A(0);
      entropy += first + k < task.width ? term.entropy(term.log_scale) : A(0);
    }
  });
  log_prob = task.group.sum(log_prob);
  entropy = task.group.sum(entropy);
  const Score<A> score = score_of(task, log_prob);
  const A entropy_weight = static_cast<A>(task.block.head.entropy_weight);
  const TensorRow scale_gradient(fields_of(task)[kLogStdsGradient], task.row);
  A square = 0;
  if (task.wants_gradient() || scale_gradient.data != nullptr) {
    const A coefficient = static_cast<A>(task.factor.coefficient);
    const A slope = score.slope * coefficient, weight = entropy_weight * coefficient; // first: a gradient may overflow
    each_normal<T, A>(task, [&](const A* means, const A* scales, const A* actions, int32_t first) {
      A of_means[size], of_scales[size];
#pragma unroll
      for (int k = 0; k < size; ++k) {
        const auto term = NormalTerm<A>::of(means[k], scales[k], actions[k]);
        const bool counts = task.factor.counts && first + k < task.width;
        of_means[k] = term.mean_gradient(slope);
        of_scales[k] = counts ? term.log_scale_gradient(slope, weight) : A(0);
        square +=
            scale_gradient.data == nullptr || task.block.segment.shares_scales ? A(0) : of_scales[k] * of_scales[k];
      }
      if (task.wants_gradient()) {
        square += task.template write_gradient<T, size>(first, of_means);
      }
      if (scale_gradient.data != nullptr) {
        dispatch_element(scale_gradient.element, [&](auto type) {
          write_elements<size>(scale_gradient.as<decltype(type)>(), task.width, first, of_scales);
        });
      }
    });
  }
  task.store(with_bonus(score.loss, entropy_weight, entropy), entropy, square, 0);
}

} // namespace gradscale
