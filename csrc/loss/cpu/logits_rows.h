// Rows of the logits of one distribution.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

template <class T>
Ahead ahead_of(const Segment& s, int64_t row) {
  return ahead_of<T>(s.prediction, s.gradient, row);
}

// Not inlined, because loops that share a function with the loops of other heads get too few registers.
template <class T, class A, class Run>
[[gnu::noinline]] void run_row_by_row(
    const Segment& s, const RowBatch& row_batch, const Run& run, RowBatchSums<A>& sums) {
  for (int64_t i = row_batch.count; i < kLanes; ++i) {
    for (auto& sum : sums.at) {
      sum[i] = 1;
    }
  }
  for (int64_t i = 0; i < row_batch.count; ++i) {
    const T* logits = row_of<T>(s.prediction, row_batch.first + i);
    const Extremes<A> extremes = extremes_of<A>(logits, s.width);
    const A magnitude = std::max(-extremes.smallest, extremes.largest); // NaN if `smallest` is NaN
    s.metrics[row_batch.first + i] = {0, std::isfinite(magnitude) ? magnitude : largest_finite<A>(logits, s.width)};
    run(T(), i, extremes, sums);
  }
}

// Calls run(T(), lane, extremes of its logits, sums), where T is the type of the logits, for each row of a row batch.
template <class A, class Run>
RowBatchSums<A> row_by_row(const Segment& s, const RowBatch& row_batch, const Run& run) {
  RowBatchSums<A> sums;
  dispatch_rows<A>(s.prediction, [&](auto type) { run_row_by_row<decltype(type)>(s, row_batch, run, sums); });
  return sums;
}

// Rows of logits over the bins of a support: cross-entropy with a target over the bins that encodes a scalar (TwoHot,
// HLGauss).

// A sparse target: only the bins begin to end - 1 have mass, apart from the label smoothing that every bin gets. Writes
// the gradient, and stores the sums of the row in a lane of `sums`.
template <class T, class A, class Target>
void categorical_row(
    const Segment& s,
    const RowBatch& row_batch,
    int64_t lane,
    Extremes<A> extremes,
    const Target& target,
    A* scratch,
    RowBatchSums<A>& sums) {
  using Formula = CrossEntropy<A, 0>;
  const int64_t row = row_batch.first + lane;
  const T* logits = row_of<T>(s.prediction, row);
  const Support& support = s.head->support;
  const Softmax<A> softmax = softmax_of<true>(logits, s.width, extremes, ahead_of<T>(s, row), scratch);
  const A maximum = extremes.largest;
  A* values = softmax.values;
  A* mass = second_row(values, s.width);
  const Smoothing<double> smoothing(s.head->label_smoothing, s.width);
  const A everywhere = static_cast<A>(smoothing.everywhere);
  A correct = 0;
  A nan = 0; // a NaN target makes the whole row NaN
  target.for_each([&](int32_t j, double bin_mass) {
    mass[j] = static_cast<A>(smoothing.share * bin_mass);
    nan += A(0) * mass[j];
    correct += Formula::correct(mass[j], static_cast<A>(to_accumulate(logits[j])) - maximum);
  });
  if (everywhere != 0) {
    const auto smoothed = [=](auto load) { return std::array<Lanes<A>, 1>{everywhere * (load(logits) - maximum)}; };
    correct += sums_of<A>(s.width, softmax.before, smoothed)[0];
  }
  sums.at[Formula::kSum][lane] = softmax.sum;
  sums.at[Formula::kMass][lane] = A(1) + nan;
  sums.at[Formula::kWeighted][lane] =
      support.raw && s.detail.data != nullptr ? raw_moment(values, support) : softmax.moment;
  sums.at[Formula::kCorrect][lane] = correct;
  if (s.gradient.data == nullptr) {
    return;
  }
  // The gradient times the sum of exponentials, for a target times this sum; the factor divides by it.
  const auto gradient = [](auto e, auto t) {
    using E = decltype(e);
    return CrossEntropy<E, 0>::gradient({E(1), E(1), E(1), E(0)}, e, t);
  };
  for (int32_t j = target.begin; j < target.end; ++j) {
    values[j] = gradient(values[j], mass[j] * softmax.sum);
  }
  const A factor = static_cast<A>(row_batch.coefficients[lane]) / softmax.sum + nan;
  const Lanes<A> offset = everywhere * softmax.sum;
  s.metrics[row].gradient_square =
      write_gradient(s.gradient, row, s.width, factor, [=](auto load) { return gradient(load(values), offset); });
}

template <class A, class Target>
void categorical_rows(const Segment& s, const RowBatch& row_batch, const Target* targets, A* scratch) {
  const RowBatchSums<A> sums =
      row_by_row<A>(s, row_batch, [&](auto type, int64_t i, Extremes<A> extremes, RowBatchSums<A>& row_sums) {
        categorical_row<decltype(type)>(s, row_batch, i, extremes, targets[i], scratch, row_sums);
      });
  store_losses<false>(s, row_batch, sums, CrossEntropy<A, 0>{});
  store_decoded(s, row_batch, sums);
}

// Rows of logits over actions with a dense target: SoftCrossEntropy.

// The probabilities of the classes that have one; without data if the target is a class, or has one for each logit.
inline const Rows& probabilities_of(const Pass& pass, const Segment& s) {
  return pass.fields[s.first_field + kSecondField];
}

inline bool is_class(const Pass& pass, const Segment& s) {
  return s.target.element == Element::int64 && probabilities_of(pass, s).data == nullptr;
}

// Calls add(class, probability) for the classes of a row that have one. A class out of range, which is masked, is -1.
template <class A, class Add>
void each_class(const Pass& pass, const Segment& s, int64_t row, Add add) {
  const Rows& probabilities = probabilities_of(pass, s);
  const int64_t* classes = row_of<int64_t>(s.target, row);
  for (int64_t k = 0; k < s.target_width; ++k) {
    add(class_of(classes[k], s.width), static_cast<A>(probabilities.load(row, k)));
  }
}

// Returns the smoothed target of a row: the row itself if it needs no conversion, otherwise `target`, to which it is
// written. It does not contain the mass of a class, which add_class() adds. A class index out of range gives a row of
// NaN.
template <class A>
const A* read_target(const Pass& pass, const Segment& s, int64_t row, A* target) {
  if (s.target.element == kElementOf<A> && s.head->label_smoothing == 0) {
    return row_of<A>(s.target, row);
  }
  if (s.target.element == Element::int64 && !is_class(pass, s)) {
    std::fill(target, target + s.width, A(0));
    each_class<A>(pass, s, row, [&](int32_t chosen, A probability) {
      target[std::max(chosen, 0)] += chosen < 0 ? static_cast<A>(NAN) : probability;
    });
    return target;
  }
  if (s.target.element == Element::int64) {
    const int32_t chosen = class_of(*row_of<int64_t>(s.target, row), s.width);
    std::fill(target, target + s.width, chosen < 0 ? static_cast<A>(NAN) : A(0));
  } else {
    widen_row(s.target, row, s.width, target);
  }
  if (s.head->label_smoothing != 0) {
    const Smoothing<A> smoothing(s.head->label_smoothing, s.width);
    for (int64_t j = 0; j < s.width; ++j) {
      target[j] = smoothing.smoothed(target[j]);
    }
  }
  return target;
}

// Adds the class of a row to its target and sums. The class comes last, because the small terms of label smoothing
// would lose digits in a sum that contains it, and the sum of the masses is 1.
template <class T, class A>
void add_class(const Segment& s, int64_t row, A maximum, A* target, A& mass, A& correct) {
  mass = one_or_nan(mass);
  const int32_t chosen = class_of(*row_of<int64_t>(s.target, row), s.width);
  if (chosen >= 0) {
    const Smoothing<A> smoothing(s.head->label_smoothing, s.width);
    const A class_part = smoothing.share * class_mass(chosen, chosen);
    const A logit = static_cast<A>(to_accumulate(row_of<T>(s.prediction, row)[chosen]));
    target[chosen] += class_part;
    correct += CrossEntropy<A, 0>::correct(class_part, logit - maximum);
  }
}

// sum_j t_j log t_j with t_j = target(j). The sum is a double: in float, many small equal terms would all be rounded
// the same way. Of classes with a probability, each is a term of its own, also if one comes twice.
template <class A, class Target>
A negative_entropy(const Pass& pass, const Segment& s, int64_t row, Target target) {
  double sum = 0;
  const auto add = [&](A t) { sum += CrossEntropy<A, 0>::negative_entropy(t); };
  if (s.target.element == Element::int64 && !is_class(pass, s)) {
    each_class<A>(pass, s, row, [&](int32_t, A probability) { add(probability); });
  } else {
    for (int64_t j = 0; j < s.width; ++j) {
      add(target(j));
    }
  }
  return static_cast<A>(sum);
}

// Calls function(formula), with the entropy bonus if there is one. Without it, the gradient ignores the differences of
// logits. A is the type of sums, or Lanes of that type.
template <class A, int options = 0, class Function>
void with_entropy(const Segment& s, Function function) {
  if (s.head->entropy_weight != 0) {
    function(CrossEntropy<A, (options | kEntropy)>::of(*s.head));
  } else {
    function(CrossEntropy<A, options>::of(*s.head));
  }
}

// Stores the losses and entropies of a policy's rows.
template <class A>
void store_policy(const Segment& s, const RowBatch& row_batch, const RowBatchSums<A>& sums) {
  with_entropy<A, kSubtractsEntropy>(s, [&](auto formula) { store_losses<true>(s, row_batch, sums, formula); });
}

template <class T, class A>
void soft_cross_entropy_row(
    const Pass& pass,
    const Segment& s,
    const RowBatch& row_batch,
    int64_t lane,
    Extremes<A> extremes,
    A* scratch,
    RowBatchSums<A>& sums) {
  using Formula = CrossEntropy<Lanes<A>, 0>;
  const int64_t row = row_batch.first + lane;
  const int64_t width = s.width;
  const T* logits = row_of<T>(s.prediction, row);
  const Softmax<A> softmax = softmax_of<false>(logits, width, extremes, ahead_of<T>(s, row), scratch);
  A* own_target = second_row(softmax.values, width);
  const A* target = read_target(pass, s, row, own_target);
  const A maximum = extremes.largest;
  const A* values = softmax.values;
  auto [moment, mass, correct] = sums_of<A>(width, softmax.before, [=](auto load) {
    const Lanes<A> difference = load(logits) - maximum, t = load(target);
    return std::array{Formula::weighted(load(values), difference), t, Formula::correct(t, difference)};
  });
  if (is_class(pass, s)) {
    add_class<T>(s, row, maximum, own_target, mass, correct);
  }
  A row_sums[Formula::kSums];
  row_sums[Formula::kSum] = softmax.sum;
  row_sums[Formula::kMass] = mass;
  row_sums[Formula::kWeighted] = moment;
  row_sums[Formula::kCorrect] = correct;
  for (int k = 0; k < Formula::kSums; ++k) {
    sums.at[k][lane] = row_sums[k];
  }
  sums.at[Formula::kNegativeEntropy][lane] =
      s.head->subtract_target_entropy ? negative_entropy<A>(pass, s, row, [=](int64_t j) { return target[j]; }) : A(0);
  if (s.gradient.data == nullptr) {
    return;
  }
  const A c = static_cast<A>(row_batch.coefficients[lane]);
  const auto row_factors = CrossEntropy<A, 0>::factors(row_sums, A(1) / softmax.sum, A(1));
  // Not in a function, which would hide from compilers that the coefficient is 1.
  const CrossEntropyFactors<Lanes<A>> factors{
      A(1), row_factors.per_exponential, row_factors.inverse_sum, row_factors.expected};
  static_assert(sizeof(row_factors) == 4 * sizeof(A), "add the new factor to the lines above");
  with_entropy<Lanes<A>>(s, [&](auto formula) {
    s.metrics[row].gradient_square = write_gradient(s.gradient, row, width, c, [=](auto load) {
      return formula.gradient(factors, load(values), load(logits) - maximum, load(target));
    });
  });
}

template <class A>
void soft_cross_entropy_rows(const Pass& pass, const Segment& s, const RowBatch& row_batch, A* scratch) {
  const RowBatchSums<A> sums =
      row_by_row<A>(s, row_batch, [&](auto type, int64_t i, Extremes<A> extremes, RowBatchSums<A>& row_sums) {
        soft_cross_entropy_row<decltype(type)>(pass, s, row_batch, i, extremes, scratch, row_sums);
      });
  store_policy(s, row_batch, sums);
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
