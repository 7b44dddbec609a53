// The rows of policies and of clipped values, 16 at a time: the score of a row, which is the slope of all its
// gradients, is computed for all 16 rows in the lanes of a vector.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// A field of 16 rows; 0 if it was left out.
template <class A>
struct FieldOfRows {
  alignas(64) A at[kLanes] = {};

  FieldOfRows(const Rows& rows, const RowBatch& row_batch) {
    if (rows.data != nullptr) {
      widen_column(rows, row_batch.first, row_batch.count, at);
    }
  }
};

// Adds the square of a number of each row.
template <class A>
void add_squares(const A* values, double* squares) {
#pragma omp simd
  for (int64_t i = 0; i < kLanes; ++i) {
    squares[i] += squared(values[i]);
  }
}

// Stores the losses, entropies and log-probabilities of rows with this log pi(a), and returns their slopes.
// `entropy` is null for predictions that have none.
template <class A>
void score_rows(
    const Pass& pass, const Segment& s, const RowBatch& row_batch, const A* log_prob, const A* entropy, A* slopes) {
  const Rows* fields = pass.fields + s.first_field;
  const FieldOfRows<A> advantage(fields[kAdvantages], row_batch), old(fields[kLogProbs], row_batch),
      reference(fields[kReferenceLogProbs], row_batch);
  const PolicyScore<A> formula(*s.head);
  const A entropy_weight = static_cast<A>(s.head->entropy_weight);
  A losses[kLanes];
  const auto run = [&](auto surrogate, auto has_reference) {
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      const PolicyFields<A> row{advantage.at[i], old.at[i], reference.at[i]};
      Score<A> score = formula.template surrogate_of<surrogate.value>(log_prob[i], row);
      if constexpr (has_reference.value) {
        formula.add_divergence(log_prob[i], row, score);
      }
      losses[i] = score.loss;
      slopes[i] = score.slope;
    }
  };
  const auto with_reference = [&](auto surrogate) {
    formula.kl_weight == A(0) ? run(surrogate, std::false_type()) : run(surrogate, std::true_type());
  };
  switch (s.head->surrogate) {
    case Surrogate::ppo:
      with_reference(std::integral_constant<Surrogate, Surrogate::ppo>());
      break;
    case Surrogate::log:
      with_reference(std::integral_constant<Surrogate, Surrogate::log>());
      break;
    case Surrogate::cispo:
      with_reference(std::integral_constant<Surrogate, Surrogate::cispo>());
      break;
  }
  const Rows& differences = fields[kDifferences];
  if (differences.data != nullptr) {
    A divergences[kLanes], clipped[kLanes];
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      const auto difference = formula.difference(log_prob[i], old.at[i]);
      divergences[i] = difference.divergence;
      clipped[i] = difference.clipped;
    }
    const Slab first{differences.data, 2, differences.element == Element::float64};
    first.store(row_batch.first, row_batch.count, divergences);
    first.from(1).store(row_batch.first, row_batch.count, clipped);
  }
  for (int64_t i = 0; i < kLanes && entropy != nullptr; ++i) {
    losses[i] = with_bonus(losses[i], entropy_weight, entropy[i]);
  }
  s.loss.store(row_batch.first, row_batch.count, losses);
  if (s.detail.data != nullptr) {
    s.detail.store(row_batch.first, row_batch.count, entropy);
  }
  const Rows& chosen = fields[kChosenLogProbs];
  if (chosen.data != nullptr) {
    Slab{chosen.data, chosen.stride, chosen.element == Element::float64}.store(
        row_batch.first, row_batch.count, log_prob);
  }
}

// Writes one number of each row's gradient, multiplied by the row's coefficient.
template <class A>
void write_scalars(const Segment& s, const RowBatch& row_batch, const A* gradients) {
  A values[kLanes];
#pragma omp simd
  for (int64_t i = 0; i < kLanes; ++i) {
    values[i] = gradients[i] * static_cast<A>(row_batch.coefficients[i]);
  }
  for (int64_t i = 0; i < row_batch.count; ++i) {
    s.metrics[row_batch.first + i] = {s.gradient.data == nullptr ? 0 : squared(values[i]), 0};
  }
  if (s.gradient.data == nullptr) {
    return;
  }
  dispatch_rows<A>(s.gradient, [&](auto type) {
    using G = decltype(type);
    G* to = static_cast<G*>(s.gradient.data) + row_batch.first * s.gradient.stride;
    for (int64_t i = 0; i < row_batch.count; ++i) {
      to[i * s.gradient.stride] = from_accumulate<G, A>(values[i]);
    }
  });
}

// ---- Values ---------------------------------------------------------------------------------------------------------

template <class A>
void scored_rows(RowOf<ClippedSquaredError<A>>, const Pass& pass, const Segment& s, const RowBatch& row_batch, A*) {
  const FieldOfRows<A> value(s.prediction, row_batch), target(s.target, row_batch),
      old(pass.fields[s.first_field + kSecondField], row_batch);
  const ClippedError<A> formula{static_cast<A>(s.head->clip_high)};
  A losses[kLanes], gradients[kLanes];
#pragma omp simd
  for (int64_t i = 0; i < kLanes; ++i) {
    const Score<A> score = formula.score(value.at[i], target.at[i], old.at[i]);
    losses[i] = score.loss;
    gradients[i] = score.slope;
  }
  s.loss.store(row_batch.first, row_batch.count, losses);
  write_scalars(s, row_batch, gradients);
}

// ---- Logits of choices, or log-probabilities ------------------------------------------------------------------------

// The action of a choice, or -1 if it is out of range.
inline int32_t action_of(const Segment& s, int64_t row, int32_t index, Choice choice) {
  return class_of(row_of<int64_t>(s.target, row)[index], choice.end - choice.begin);
}

// The sums of a choice for 16 rows.
template <class A>
struct ChoiceLanes {
  alignas(64) A others[kLanes];
  alignas(64) A weighted[kLanes];
  alignas(64) A chosen_e[kLanes];
  alignas(64) A chosen_difference[kLanes];

  ChoiceSums<Lanes<A>> lanes() const {
    return {load_lanes(others), load_lanes(weighted), load_lanes(chosen_e), load_lanes(chosen_difference)};
  }
};

// Short rows: column j holds element j of 16 rows, first its logits, then their exponentials, then the gradient without
// the row's coefficient. The target is 1 for the chosen element of each choice.
template <class A>
struct ShortChoices {
  Columns<A> x, differences, target;
  Lanes<A> largest_logits;

  void read_actions(const Segment& s, const RowBatch& row_batch, int32_t index, Choice choice, ChoiceLanes<A>& sums) {
    std::fill(target.at[choice.begin], target.at[choice.end], A(0));
    for (int64_t i = 0; i < kLanes; ++i) {
      const int32_t action = action_of(s, row_batch.first + (i < row_batch.count ? i : 0), index, choice);
      sums.chosen_difference[i] = action < 0 ? static_cast<A>(NAN) : A(0);
      if (action >= 0) {
        target.at[choice.begin + action][i] = A(1);
      }
    }
  }

  void exponentiate(Choice choice, ChoiceLanes<A>& sums) {
    using Formula = CrossEntropy<Lanes<A>, 0>;
    const Lanes<A> one = A(1);
    Lanes<A> maximum = -static_cast<A>(INFINITY);
    for (int32_t j = choice.begin; j < choice.end; ++j) {
      maximum = larger(x.column(j), maximum); // ignores NaN
      largest_logits = larger(finite_magnitude(x.column(j)), largest_logits);
    }
    Lanes<A> others = A(0), weighted = A(0), chosen_e = A(0), chosen_difference = load_lanes(sums.chosen_difference);
    for (int32_t j = choice.begin; j < choice.end; ++j) {
      const Lanes<A> d = x.column(j) - maximum, e = exp_nonpositive(d), t = target.column(j);
      others += e * (one - t);
      weighted += Formula::weighted(e, d);
      chosen_e += e * t;
      chosen_difference += Formula::correct(t, d);
      differences.store_column(j, d);
      x.store_column(j, e);
    }
    store_lanes(sums.others, others);
    store_lanes(sums.weighted, weighted);
    store_lanes(sums.chosen_e, chosen_e);
    store_lanes(sums.chosen_difference, chosen_difference);
  }

  // As ChoiceGradient::at(), for 16 rows.
  void differentiate(Choice choice, const ChoiceLanes<A>& sums, const A* slopes, A entropy_weight) {
    const ChoiceGradient<Lanes<A>> gradient(sums.lanes(), load_lanes(slopes), entropy_weight);
    const Lanes<A> one = A(1), weight = gradient.entropy_weight * gradient.inverse_sum;
    for (int32_t j = choice.begin; j < choice.end; ++j) {
      const Lanes<A> e = x.column(j), t = target.column(j);
      Lanes<A> value = gradient.slope_of_p * (e * (one - t) - t * gradient.others);
      if (entropy_weight != A(0)) {
        value += weight * (e * (CrossEntropy<Lanes<A>, 0>::finite(differences.column(j)) - gradient.expected));
      }
      x.store_column(j, value);
    }
  }

  void write_gradient(const Segment& s, const RowBatch& row_batch) {
    alignas(64) A coefficients[kLanes], magnitudes[kLanes];
    double squares[kLanes] = {};
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      coefficients[i] = static_cast<A>(row_batch.coefficients[i]);
    }
    store_lanes(magnitudes, largest_logits);
    const Lanes<A> factors = load_lanes(coefficients);
    for (int64_t j = 0; j < s.width && s.gradient.data != nullptr; ++j) {
      x.store_column(j, x.column(j) * factors);
      add_squares(x.at[j], squares);
    }
    for (int64_t i = 0; i < row_batch.count; ++i) {
      s.metrics[row_batch.first + i] = {squares[i], magnitudes[i]};
    }
    if (s.gradient.data != nullptr) {
      write_columns(s.gradient, row_batch, s.width, x);
    }
  }
};

template <class A>
[[gnu::noinline]] void short_choices(const Pass& pass, const Segment& s, const RowBatch& row_batch) {
  const Head& head = *s.head;
  const int32_t count = num_choices(head);
  ShortChoices<A> rows;
  rows.largest_logits = A(0);
  read_columns(s.prediction, row_batch, s.width, rows.x);
  ChoiceLanes<A> sums[kShortRow];
  A log_prob[kLanes] = {}, entropy[kLanes] = {}, slopes[kLanes];
  for (int32_t c = 0; c < count; ++c) {
    const Choice choice = choice_of(head, head.choice_ends, c, s.width);
    rows.read_actions(s, row_batch, c, choice, sums[c]);
    rows.exponentiate(choice, sums[c]);
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      const A others = sums[c].others[i], chosen_e = sums[c].chosen_e[i];
      const A log_sum = ChoiceSums<A>::log_sum(others, chosen_e);
      log_prob[i] += sums[c].chosen_difference[i] - log_sum;
      entropy[i] += log_sum - sums[c].weighted[i] / (others + chosen_e);
    }
  }
  score_rows(pass, s, row_batch, log_prob, entropy, slopes);
  for (int32_t c = 0; c < count && s.gradient.data != nullptr; ++c) {
    rows.differentiate(
        choice_of(head, head.choice_ends, c, s.width), sums[c], slopes, static_cast<A>(head.entropy_weight));
  }
  rows.write_gradient(s, row_batch);
}

// A choice of a longer row. Its exponentials begin at `values`.
template <class A>
struct LongChoice {
  A* values;
  int64_t before; // as in Softmax
  A maximum;
  ChoiceSums<A> sums;
};

// Stores the exponentials of a choice in `values`, and adds up those that were not chosen.
template <bool in_range, class T, class A>
ChoiceSums<A> sums_of_others(
    const T* logits, int64_t width, A maximum, int32_t action, Ahead ahead, int64_t before, A* values) {
  const Lanes<A> zero = A(0);
  Lanes<A> others = zero, weighted = zero;
  each_tile(width, [&](int64_t begin, int64_t end) {
    Lanes<A> tile_others = zero, tile_weighted = zero;
    const auto add = [&](int64_t j, auto lanes, Lanes<A> d, Lanes<A> e) {
      Lanes<A> counted = kept(lanes, e, zero);
      if (j <= action && action < j + kLanes) { // in one vector of the row
        const auto lane = static_cast<int>(action - j);
        counted = kept(FirstLanes{lane}, counted, kept(LanesFrom{lane + 1}, counted, zero));
      }
      tile_others += counted;
      tile_weighted += CrossEntropy<Lanes<A>, 0>::weighted(counted, d);
    };
    each_exponential<in_range>(logits, begin, end, maximum, ahead, before, values, add);
    others += tile_others;
    weighted += tile_weighted;
  });
  return {total(in_order(others, before)), total(in_order(weighted, before)), 0, static_cast<A>(NAN)};
}

template <class T, class A>
LongChoice<A> exponentiate(const Segment& s, int64_t row, Choice choice, int32_t action, A* scratch, A& largest_logit) {
  const T* logits = row_of<T>(s.prediction, row) + choice.begin;
  const int64_t width = choice.end - choice.begin;
  const Extremes<A> extremes = extremes_of<A>(logits, width);
  const A magnitude = std::max(-extremes.smallest, extremes.largest);
  largest_logit = std::max(largest_logit, std::isfinite(magnitude) ? magnitude : largest_finite<A>(logits, width));
  const int64_t before = elements_before_vectors(logits, width);
  A* values = exponentials_in(scratch, before);
  const Ahead ahead = ahead_of<T>(s, row);
  ChoiceSums<A> sums = in_range_of(extremes, [&](auto in_range) {
    return sums_of_others<in_range.value>(logits, width, extremes.largest, action, ahead, before, values);
  });
  if (action >= 0) {
    sums.chosen_difference = static_cast<A>(to_accumulate(logits[action])) - extremes.largest;
    sums.chosen_e = values[action];
    sums.weighted += CrossEntropy<A, 0>::weighted(sums.chosen_e, sums.chosen_difference);
  }
  return {values, before, extremes.largest, sums};
}

// Writes the gradient of a choice, and returns the sum of its squares.
template <class T, class A>
double differentiate(
    const Segment& s, int64_t row, Choice choice, int32_t action, const LongChoice<A>& own, A slope, A coefficient) {
  const T* logits = row_of<T>(s.prediction, row) + choice.begin;
  const int64_t width = choice.end - choice.begin;
  const ChoiceGradient<A> formula(own.sums, slope, static_cast<A>(s.head->entropy_weight));
  Rows gradient = s.gradient;
  gradient.data = static_cast<char*>(gradient.data) + choice.begin * element_size(gradient.element);
  A* values = own.values;
  Lanes<A> scale = formula.slope_of_p;
  if (formula.entropy_weight != A(0)) {
    A* out = second_row(values, width);
    const Lanes<A> weight = formula.entropy_weight * formula.inverse_sum, expected = formula.expected;
    each_vector<1>(0, width, own.before, [&](int64_t j, auto lanes, auto) {
      const Lanes<A> e = load_lanes(values + j), d = load_lanes(logits + j, lanes) - Lanes<A>(own.maximum);
      store_lanes(out + j, e * (scale + weight * (CrossEntropy<Lanes<A>, 0>::finite(d) - expected)));
    });
    if (action >= 0) {
      out[action] = formula.at(values[action], own.sums.chosen_difference, true);
    }
    values = out;
    scale = A(1);
  } else if (action >= 0) {
    values[action] = -own.sums.others;
  }
  return write_gradient(gradient, row, width, coefficient, [=](auto load) { return load(values) * scale; });
}

template <class T, class A>
[[gnu::noinline]] void long_choices(const Pass& pass, const Segment& s, int64_t row, double coefficient, A* scratch) {
  const Head& head = *s.head;
  const int32_t count = num_choices(head);
  const RowBatch own{row, 1, {coefficient}, {}};
  A log_prob[kLanes] = {}, entropy[kLanes] = {}, slopes[kLanes], largest_logit = 0;
  LongChoice<A> choice{};
  for (int32_t c = 0; c < count; ++c) {
    const Choice range = choice_of(head, head.choice_ends, c, s.width);
    choice = exponentiate<T>(s, row, range, action_of(s, row, c, range), scratch, largest_logit);
    log_prob[0] += choice.sums.log_prob();
    entropy[0] += choice.sums.entropy();
  }
  score_rows(pass, s, own, log_prob, entropy, slopes);
  double squares = 0;
  if (slopes[0] == A(0) && head.entropy_weight == 0) { // a clipped row, which needs no exponentials again
    pass.clear_gradients(s, row);
    s.metrics[row] = {0, largest_logit};
    return;
  }
  for (int32_t c = 0; c < count && s.gradient.data != nullptr; ++c) {
    const Choice range = choice_of(head, head.choice_ends, c, s.width);
    const int32_t action = action_of(s, row, c, range);
    if (count > 1) { // the exponentials of another choice have taken their place
      choice = exponentiate<T>(s, row, range, action, scratch, largest_logit);
    }
    squares += differentiate<T>(s, row, range, action, choice, slopes[0], static_cast<A>(coefficient));
  }
  s.metrics[row] = {squares, largest_logit};
}

template <class A>
void scored_rows(RowOf<PolicyGradient<A>>, const Pass& pass, const Segment& s, const RowBatch& row_batch, A* scratch) {
  if (s.target.data == nullptr) { // the prediction is log pi(a)
    const FieldOfRows<A> log_prob(s.prediction, row_batch);
    A slopes[kLanes];
    score_rows(pass, s, row_batch, log_prob.at, static_cast<const A*>(nullptr), slopes);
    write_scalars(s, row_batch, slopes);
  } else if (s.width <= kShortRow) {
    short_choices<A>(pass, s, row_batch);
  } else {
    dispatch_rows<A>(s.prediction, [&](auto type) {
      for (int64_t i = 0; i < row_batch.count; ++i) {
        long_choices<decltype(type)>(pass, s, row_batch.first + i, row_batch.coefficients[i], scratch);
      }
    });
  }
}

// ---- Normal distributions -------------------------------------------------------------------------------------------

// Dimensions of 16 rows, kShortRow at a time: column d holds a dimension of all rows.
template <class A>
struct NormalColumns {
  Columns<A> z, log_scales, inverse_scales; // of NormalTerm; then the gradients of the first two

  void read(const Pass& pass, const Segment& s, const RowBatch& row_batch, int64_t begin, int64_t count) {
    const auto from = [=](Rows rows) {
      rows.data = static_cast<char*>(rows.data) + begin * element_size(rows.element);
      return rows;
    };
    Columns<A>& actions = inverse_scales;
    read_columns(from(s.prediction), row_batch, count, z);
    read_columns(from(pass.fields[s.first_field + kLogStds]), row_batch, count, log_scales);
    read_columns(from(s.target), row_batch, count, actions);
    A common[kShortRow] = {}; // the inverse scales of all rows
    if (s.shares_scales) {
      for (int64_t j = 0; j < count; ++j) {
        common[j] = log_scales.at[j][0];
      }
#pragma omp simd
      for (int64_t j = 0; j < kShortRow; ++j) {
        common[j] = exponential(-common[j]);
      }
    }
    for (int64_t j = 0; j < count; ++j) {
      const auto compute = [&](auto inverse_scale) {
#pragma omp simd
        for (int64_t i = 0; i < kLanes; ++i) {
          const auto term = NormalTerm<A>::of(z.at[j][i], log_scales.at[j][i], actions.at[j][i], inverse_scale(i));
          z.at[j][i] = term.z;
          inverse_scales.at[j][i] = term.inverse_scale;
        }
      };
      if (s.shares_scales) {
        compute([&](int64_t) { return common[j]; });
      } else {
        compute([&](int64_t i) { return exponential(-log_scales.at[j][i]); });
      }
    }
  }
  NormalTerm<Lanes<A>> at(int64_t j) const {
    return {inverse_scales.column(j), z.column(j), log_scales.column(j)};
  }

  // Replaces z and log_scales by the gradients of means and log_stds, and adds the squares of those that are counted.
  void differentiate(
      int64_t count, Lanes<A> slope, Lanes<A> weight, bool counts_means, bool counts_scales, double* squares) {
    for (int64_t j = 0; j < count; ++j) {
      const NormalTerm<Lanes<A>> term = at(j);
      z.store_column(j, term.mean_gradient(slope));
      log_scales.store_column(j, term.log_scale_gradient(slope, weight));
      if (counts_means) {
        add_squares(z.at[j], squares);
      }
      if (counts_scales) {
        add_squares(log_scales.at[j], squares);
      }
    }
  }
};

// Writes the gradients of `count` dimensions, from dimension `begin` on.
template <class A>
void write_dimensions(Rows rows, const RowBatch& row_batch, int64_t begin, int64_t count, const Columns<A>& gradients) {
  if (rows.data != nullptr) {
    rows.data = static_cast<char*>(rows.data) + begin * element_size(rows.element);
    write_columns(rows, row_batch, count, gradients);
  }
}

// Writes the sums over the unmasked rows of a row batch.
template <class A>
void write_sums(
    const Rows& rows, const RowBatch& row_batch, int64_t begin, int64_t count, const Columns<A>& gradients) {
  A* to = static_cast<A*>(rows.data) + row_batch.first / kLanes * rows.stride + begin;
  A counts[kLanes], counted[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    counts[i] = row_batch.unmasked[i] ? A(1) : A(0);
  }
  for (int64_t j = 0; j < count; ++j) {
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      counted[i] = counts[i] == A(0) ? A(0) : gradients.at[j][i];
    }
    to[j] = total(load_lanes(counted));
  }
}

template <class A>
[[gnu::noinline]] void normal_rows(const Pass& pass, const Segment& s, const RowBatch& row_batch) {
  const Rows log_scale_gradient = pass.fields[s.first_field + kLogStdsGradient];
  const bool is_kept = s.width <= kShortRow; // from the sums to the gradient
  NormalColumns<A> columns;
  A log_prob[kLanes] = {}, entropy[kLanes] = {}, slopes[kLanes];
  const auto each_part = [&](bool reads, auto function) {
    for (int64_t begin = 0; begin < s.width; begin += kShortRow) {
      const int64_t count = std::min(s.width - begin, kShortRow);
      if (reads) {
        columns.read(pass, s, row_batch, begin, count);
      }
      function(begin, count);
    }
  };
  each_part(true, [&](int64_t, int64_t count) {
    Lanes<A> log_probs(A(0)), entropies(A(0)); // of a part: a sum of hundreds of terms, one by one, loses digits
    for (int64_t j = 0; j < count; ++j) {
      const NormalTerm<Lanes<A>> term = columns.at(j);
      log_probs += NormalTerm<Lanes<A>>::log_prob(term.z, term.log_scale);
      entropies += NormalTerm<Lanes<A>>::entropy(term.log_scale);
    }
    store_lanes(log_prob, load_lanes(log_prob) + log_probs);
    store_lanes(entropy, load_lanes(entropy) + entropies);
  });
  score_rows(pass, s, row_batch, log_prob, entropy, slopes);
  for (int64_t i = 0; i < row_batch.count; ++i) {
    s.metrics[row_batch.first + i] = {};
  }
  if (!s.wants_gradient()) {
    return;
  }
  A coefficients[kLanes];
#pragma omp simd
  for (int64_t i = 0; i < kLanes; ++i) {
    coefficients[i] = static_cast<A>(row_batch.coefficients[i]); // first: a gradient may overflow
  }
  const Lanes<A> factors = load_lanes(coefficients), slope = load_lanes(slopes) * factors;
  const Lanes<A> weight = Lanes<A>(static_cast<A>(s.head->entropy_weight)) * factors; // of the entropy
  const bool counts_scales = log_scale_gradient.data != nullptr && !s.shares_scales;
  double squares[kLanes] = {};
  each_part(!is_kept, [&](int64_t begin, int64_t count) {
    columns.differentiate(count, slope, weight, s.gradient.data != nullptr, counts_scales, squares);
    write_dimensions(s.gradient, row_batch, begin, count, columns.z);
    if (s.sums_scales && log_scale_gradient.data != nullptr) {
      write_sums(log_scale_gradient, row_batch, begin, count, columns.log_scales);
    } else {
      write_dimensions(log_scale_gradient, row_batch, begin, count, columns.log_scales);
    }
  });
  for (int64_t i = 0; i < row_batch.count; ++i) {
    s.metrics[row_batch.first + i].gradient_square = squares[i];
  }
}

template <class A>
void scored_rows(RowOf<GaussianPolicyGradient<A>>, const Pass& pass, const Segment& s, const RowBatch& row_batch, A*) {
  normal_rows<A>(pass, s, row_batch);
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
