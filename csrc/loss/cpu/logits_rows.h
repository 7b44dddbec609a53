// Rows of the logits of one distribution.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Rows of logits over the bins of a support: cross-entropy with a target over the bins that encodes a scalar (TwoHot,
// HLGauss).

// Loss log(sum) - sum_j t_j (x_j - maximum); gradient c (p_j - t_j). Only the bins begin to end - 1 have mass, apart
// from the label smoothing that every bin gets. Writes the gradient, and stores the sums of the row in a lane of
// `sums`.
template <class T, class G, class A, class Target>
void categorical_row(
    const Segment& s,
    const Group& group,
    int64_t lane,
    Extremes<A> extremes,
    const Target& target,
    A* scratch,
    GroupSums<A>& sums) {
  const int64_t row = group.first + lane;
  const T* logits = row_of<T>(s.prediction, row);
  const Support& support = s.head->support;
  const Softmax<A> softmax = softmax_of<true>(logits, s.width, extremes, ahead_of<T>(s, row), scratch);
  const A maximum = extremes.largest;
  A* values = softmax.values;
  A* mass = second_row(scratch, s.width);
  const double target_share = 1 - s.head->label_smoothing;
  const A everywhere = static_cast<A>(s.head->label_smoothing / static_cast<double>(s.width));
  A correct = 0;
  A nan = 0; // a NaN target makes the whole row NaN
  target.for_each([&](int32_t j, double bin_mass) {
    mass[j] = static_cast<A>(target_share * bin_mass);
    nan += A(0) * mass[j];
    // An illegal bin (-inf) without mass costs nothing.
    correct += product(mass[j], static_cast<A>(to_accumulate(logits[j])) - maximum);
  });
  if (everywhere != 0) {
    const auto smoothed = [=](auto load) { return std::array<Lanes<A>, 1>{everywhere * (load(logits) - maximum)}; };
    correct += sums_of<A>(logits, s.width, smoothed)[0];
  }
  sums.exponentials[lane] = softmax.sum;
  sums.moment[lane] = support.raw && s.detail.data != nullptr ? raw_moment(values, support) : softmax.moment;
  sums.target[lane] = A(1) + nan;
  sums.correct[lane] = correct;
  if (s.gradient.data == nullptr) {
    return;
  }
  for (int32_t j = target.begin; j < target.end; ++j) {
    values[j] -= mass[j] * softmax.sum;
  }
  const A factor = static_cast<A>(group.coefficients[lane]) / softmax.sum + nan;
  const Lanes<A> offset = everywhere * softmax.sum;
  s.metrics[row].gradient_square =
      write_gradient<G>(s.gradient, row, s.width, factor, [=](auto load) { return load(values) - offset; });
}

template <class T, class G, class A, class Target>
[[gnu::noinline]] void categorical_rows(const Segment& s, const Group& group, const Target* targets, A* scratch) {
  const GroupSums<A> sums = row_by_row<T, A>(s, group, [&](int64_t i, Extremes<A> extremes, GroupSums<A>& row_sums) {
    categorical_row<T, G>(s, group, i, extremes, targets[i], scratch, row_sums);
  });
  store_losses(s, group, sums);
  store_decoded(s, group, sums);
}

// Rows of logits over actions with a dense target: SoftCrossEntropy.

// Returns the smoothed target of a row: the row itself if it needs no conversion, otherwise `target`, to which it is
// written. A class index out of range gives a row of NaN.
template <class A>
const A* read_target(const Segment& s, int64_t row, A* target) {
  if (s.target.element == kElementOf<A> && s.head->label_smoothing == 0) {
    return row_of<A>(s.target, row);
  }
  if (s.target.element == Element::int64) {
    const int64_t chosen = *row_of<int64_t>(s.target, row);
    const bool valid = chosen >= 0 && chosen < s.width;
    for (int64_t j = 0; j < s.width; ++j) {
      target[j] = valid ? A(0) : static_cast<A>(NAN);
    }
    if (valid) {
      target[chosen] = A(1);
    }
  } else {
    widen_row(s.target, row, s.width, target);
  }
  if (s.head->label_smoothing != 0) {
    const A target_share = static_cast<A>(1 - s.head->label_smoothing);
    const A uniform_share = static_cast<A>(s.head->label_smoothing / static_cast<double>(s.width));
    for (int64_t j = 0; j < s.width; ++j) {
      target[j] = target[j] * target_share + uniform_share;
    }
  }
  return target;
}

// sum_j t_j log t_j with t_j = target(j). The sum is a double: in float, many small equal terms would all be rounded
// the same way.
template <class Target>
double negative_entropy(int64_t width, Target target) {
  double sum = 0;
  for (int64_t j = 0; j < width; ++j) {
    const auto t = target(j);
    sum += t == 0 ? t : t * std::log(t);
  }
  return sum;
}

// Calls function(formula of the gradient). Without an entropy bonus, the formula ignores the differences of logits.
template <class A, class Function>
void with_entropy(const Segment& s, Function function) {
  if (s.head->entropy_weight != 0) {
    function(CrossEntropy<Lanes<A>, kEntropy>{static_cast<A>(s.head->entropy_weight)});
  } else {
    function(CrossEntropy<Lanes<A>, 0>{});
  }
}

template <class T, class G, class A>
void soft_cross_entropy_row(
    const Segment& s, const Group& group, int64_t lane, Extremes<A> extremes, A* scratch, GroupSums<A>& sums) {
  const int64_t row = group.first + lane;
  const int64_t width = s.width;
  const T* logits = row_of<T>(s.prediction, row);
  const Softmax<A> softmax = softmax_of<false>(logits, width, extremes, ahead_of<T>(s, row), scratch);
  const A* target = read_target(s, row, second_row(scratch, width));
  const A maximum = extremes.largest;
  const A* values = softmax.values;
  const auto [moment, mass, correct] = sums_of<A>(logits, width, [=](auto load) {
    const Lanes<A> difference = load(logits) - maximum, t = load(target);
    return std::array{load(values) * CrossEntropy<Lanes<A>, 0>::finite(difference), t, product(t, difference)};
  });
  sums.exponentials[lane] = softmax.sum;
  sums.moment[lane] = moment;
  sums.target[lane] = mass;
  sums.correct[lane] = correct;
  if (s.head->subtract_target_entropy) {
    sums.correct[lane] -= static_cast<A>(negative_entropy(width, [=](int64_t j) { return target[j]; }));
  }
  if (s.gradient.data == nullptr) {
    return;
  }
  const A inverse_sum = A(1) / softmax.sum, c = static_cast<A>(group.coefficients[lane]);
  const CrossEntropyFactors<Lanes<A>> factors{A(1), inverse_sum * mass, inverse_sum, moment * inverse_sum};
  with_entropy<A>(s, [&](auto formula) {
    s.metrics[row].gradient_square = write_gradient<G>(s.gradient, row, width, c, [=](auto load) {
      return formula.gradient(factors, load(values), load(logits) - maximum, load(target));
    });
  });
}

// Not inlined, because loops that share a function with the loops of other heads get too few registers.
template <class T, class G, class A>
[[gnu::noinline]] void soft_cross_entropy_rows(const Segment& s, const Group& group, A* scratch) {
  GroupSums<A> sums = row_by_row<T, A>(s, group, [&](int64_t i, Extremes<A> extremes, GroupSums<A>& group_sums) {
    soft_cross_entropy_row<T, G>(s, group, i, extremes, scratch, group_sums);
  });
  store_entropies(s, group, sums);
  store_losses(s, group, sums);
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
