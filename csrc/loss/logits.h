// The rows of heads of logits: TwoHot, HLGauss and SoftCrossEntropy, and rows to decode. What is one number a row is
// computed for groups of 16 rows (row_groups.h), the elements of rows by cpu/logit_rows.h.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// A target that is read from memory, with mass in any element.
struct Distribution {};

// sum_j t_j log t_j. Small terms, all alike, would each lose the same digits in a float.
template <class A>
A negative_entropy(const A* t, int64_t stride, int64_t width) {
  double sum = 0;
  for (int64_t j = 0; j < width; ++j) {
    const A mass = t[j * stride];
    sum += mass == 0 ? mass : mass * std::log(mass);
  }
  return static_cast<A>(sum);
}

template <class Layout, class Run>
GRADSCALE_HOST_DEVICE void each_rows(const Group& group, Run run) {
  for (int64_t i = 0; i < group.count; i += Layout::kRows) {
    run({i, group.first + i, group.count - i < Layout::kRows ? group.count - i : Layout::kRows});
  }
}

// Leaves targets over all elements, smoothed, in `t`.
template <class Layout, class Target, class A>
GRADSCALE_HOST_DEVICE void spread_targets(
    const Layout& layout, const Segment& s, const RowsOfGroup& rows, const Target* targets, A* t) {
  const A share = static_cast<A>(1 - s.head->label_smoothing);
  const A everywhere = static_cast<A>(s.head->label_smoothing / static_cast<double>(s.width));
  if constexpr (std::is_same_v<Target, Distribution>) {
    const auto smoothed = [=](int, Lanes<A> mass)
                              GRADSCALE_INLINE_LAMBDA { return mass * Lanes<A>(share) + Lanes<A>(everywhere); };
    layout.read(s.target, rows.first, rows.count, t, A(0), smoothed);
  } else {
    layout.fill(t, everywhere);
    for (int64_t r = 0; r < rows.count; ++r) {
      targets[rows.index + r].for_each(
          [&](int32_t j, double mass) { t[layout.at(j, r)] += share * static_cast<A>(mass); });
    }
  }
}

template <Weight weight, bool has_entropy, class Layout, class Target, class A>
GRADSCALE_HOST_DEVICE void logit_rows(
    const Segment& s,
    const Group& group,
    const RowsOfGroup& rows,
    const Target* targets,
    RowMemory<A> memory,
    SumsOfRows<A>& all) {
  const Layout layout(s.width, s.prediction, rows.first);
  constexpr bool may_be_sparse = Layout::kRows == 1 && !has_entropy && !std::is_same_v<Target, Distribution>;
  const bool sparse = may_be_sparse && s.head->label_smoothing == 0; // few elements have mass
  const Lanes<A> maximum = read_logits(layout, s.prediction, rows, memory);
  const Ahead ahead = ahead_of(s.prediction, s.gradient, rows.first, memory.e);
  Sums<A> sums;
  if (sparse) {
    sums = sums_of<weight, false>(layout, maximum, memory, ahead);
  } else {
    spread_targets(layout, s, rows, targets, memory.t);
    sums = sums_of<weight, true>(layout, maximum, memory, ahead);
    if constexpr (weight == Weight::place) {
      sums.target = Lanes<A>(A(1)) + Lanes<A>(A(0)) * sums.target; // 1 but for rounding
    }
  }
  if (weight == Weight::place && s.head->support.raw && s.detail.data != nullptr) {
    sums.weighted = raw_moments(layout, rows, memory.e, s.head->support);
  }
  if constexpr (may_be_sparse) {
    if (sparse) {
      add_target(layout, targets[rows.index], maximum, memory, sums);
    }
  }
  keep<Layout>(sums, rows, all);
  if (weight == Weight::difference && s.head->subtract_target_entropy && !sparse) {
    for (int64_t r = 0; r < rows.count; ++r) {
      all.correct[rows.index + r] -= negative_entropy(memory.t + layout.at(0, r), Layout::kRows, s.width);
    }
  }
  if (s.gradient.data == nullptr) {
    return;
  }
  A coefficients[Layout::kRows];
  for (int64_t r = 0; r < Layout::kRows; ++r) {
    coefficients[r] = static_cast<A>(group.coefficients[rows.index + r]);
  }
  const Lanes<A> c = Layout::of_rows(coefficients);
  const Gradient<A, has_entropy> gradient(sums, c, static_cast<A>(s.head->entropy_weight));
  const auto write = [&](auto target) GRADSCALE_INLINE_LAMBDA {
    layout.write(s.gradient, rows.first, rows.count, memory.e, [&](int64_t at) GRADSCALE_INLINE_LAMBDA {
      return gradient(load<A>(memory.e + at), load<A>(memory.x + at) - maximum, target(at));
    });
  };
  if (sparse) {
    write([](int64_t) GRADSCALE_INLINE_LAMBDA { return Lanes<A>(A(0)); });
  } else {
    write([&](int64_t at) GRADSCALE_INLINE_LAMBDA { return load<A>(memory.t + at); });
  }
}

// Not inlined: loops that share a function with those of other heads get too few registers.
template <Weight weight, bool has_entropy, class Layout, class Target, class A>
[[gnu::noinline]] void logit_group(const Segment& s, const Group& group, RowMemory<A> memory) {
  Target targets[kLanes];
  if constexpr (!std::is_same_v<Target, Distribution>) {
    read_targets(s, group, targets);
  }
  SumsOfRows<A> sums;
  each_rows<Layout>(group, [&](const RowsOfGroup& rows) GRADSCALE_INLINE_LAMBDA {
    logit_rows<weight, has_entropy, Layout>(s, group, rows, targets, memory, sums);
  });
  if (weight == Weight::place) {
    store_decoded(s.detail, s.head->support, group, sums);
  } else {
    store_entropies(s, group, sums);
  }
  store_losses(s, group, sums);
}

// Decodes rows of logits. Where a gradient is wanted, it is written instead of the values: the derivative
// g'(E) p_j (c_j - E) times grad_output, with E the expectation, c_j the centres and g the inverse transform.
template <class Layout, class A>
[[gnu::noinline]] void decode_group(const Decoding& d, const Group& group, RowMemory<A> memory) {
  const Support& support = *d.support;
  SumsOfRows<A> all;
  each_rows<Layout>(group, [&](const RowsOfGroup& rows) GRADSCALE_INLINE_LAMBDA {
    const Layout layout(d.width, d.logits, rows.first);
    const Lanes<A> maximum = read_logits(layout, d.logits, rows, memory);
    const Ahead ahead = ahead_of(d.logits, d.gradient, rows.first, memory.e);
    Sums<A> sums = sums_of<Weight::place, false>(layout, maximum, memory, ahead);
    if (support.raw) {
      sums.weighted = raw_moments(layout, rows, memory.e, support);
    }
    keep<Layout>(sums, rows, all);
    if (d.gradient.data == nullptr) {
      return;
    }
    A factor[Layout::kRows] = {}, middle[Layout::kRows] = {};
    for (int64_t r = 0; r < rows.count; ++r) {
      const A sum = all.exponentials[rows.index + r];
      middle[r] = all.weighted[rows.index + r] / sum;
      factor[r] = static_cast<A>(d.grad_output.load(rows.first + r)) * slope_of_centers(middle[r], support) / sum;
    }
    const Lanes<A> factors = Layout::of_rows(factor), middles = Layout::of_rows(middle);
    layout.write(d.gradient, rows.first, rows.count, memory.e, [&](int64_t at) GRADSCALE_INLINE_LAMBDA {
      return load<A>(memory.e + at) * factors * (load<A>(memory.t + at - layout.lead) - middles);
    });
  });
  if (d.gradient.data == nullptr) {
    store_decoded(d.out, support, group, all);
  }
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
