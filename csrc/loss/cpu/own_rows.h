// The rows of heads with a loop of their own: CategoricalKL, QuantileHuber.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Rows of logits of several distributions: CategoricalKL. The rows of prediction and target are widened into scratch,
// where terms of the gradient then replace them. Loops are vectorised over the classes of a group.

// The softmax of a group. If `replaces`, the exponentials replace the logits in x, and log_sum is not computed.
template <bool replaces, class A>
GroupSoftmax<A> group_softmax(int64_t classes, A* x) {
  A maximum = -static_cast<A>(INFINITY);
#pragma omp simd reduction(max : maximum)
  for (int64_t j = 0; j < classes; ++j) {
    maximum = x[j] > maximum ? x[j] : maximum; // ignores NaN
  }
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < classes; ++j) {
    const A e = exp_nonpositive(x[j] - maximum);
    x[j] = replaces ? e : x[j];
    sum += e;
  }
  return {maximum, A(1) / sum, replaces ? A(0) : std::log(sum)};
}

// Returns the divergence of a group, and leaves h_c - s_c sum(h) in x.
template <Mixture mixture, bool predicts_p, class A>
[[gnu::noinline]] A group_divergence(const CategoricalKL<A>& head, int64_t classes, A* x, A* t) {
  constexpr bool replaces = mixture == Mixture::probabilities;
  const GroupSoftmax<A> x_softmax = group_softmax<replaces>(classes, x),
                        t_softmax = group_softmax<replaces>(classes, t);
  A divergence = 0, sum = 0;
#pragma omp simd reduction(+ : divergence, sum)
  for (int64_t j = 0; j < classes; ++j) {
    const A x_below = x[j] - x_softmax.maximum, t_below = t[j] - t_softmax.maximum;
    const A x_exponential = replaces ? x[j] : exp_nonpositive(x_below);
    const A t_exponential = replaces ? t[j] : exp_nonpositive(t_below);
    const DivergenceTerms<A> terms =
        head.template terms<mixture, predicts_p>(x_exponential, t_exponential, x_below, t_below, x_softmax, t_softmax);
    divergence += terms.divergence;
    sum += terms.h;
    x[j] = terms.softmax;
    t[j] = terms.h;
  }
#pragma omp simd
  for (int64_t j = 0; j < classes; ++j) {
    x[j] = t[j] - x[j] * sum;
  }
  return divergence;
}

template <Mixture mixture, class A>
A group_divergence(const CategoricalKL<A>& head, int64_t classes, A* x, A* t) {
  return head.predicts_p ? group_divergence<mixture, true>(head, classes, x, t)
                         : group_divergence<mixture, false>(head, classes, x, t);
}

template <class A>
A group_divergence(const CategoricalKL<A>& head, int64_t classes, A* x, A* t) {
  switch (head.mixture) {
    case Mixture::probabilities:
      return group_divergence<Mixture::probabilities>(head, classes, x, t);
    case Mixture::logarithms:
      return group_divergence<Mixture::logarithms>(head, classes, x, t);
    case Mixture::none:
      break;
  }
  return group_divergence<Mixture::none>(head, classes, x, t);
}

template <class A>
void own_row(const CategoricalKL<A>& head, const Pass&, const Segment& s, int64_t row, double coefficient, A* x) {
  A* t = second_row(x, s.width);
  widen_row(s.prediction, row, s.width, x);
  s.metrics[row] = {0, largest_finite<A>(x, s.width)};
  widen_row(s.target, row, s.width, t);
  double divergence = 0;
  for (int64_t first = 0; first < s.width; first += s.last_size) {
    divergence += group_divergence(head, s.last_size, x + first, t + first);
  }
  s.loss.store(row, head.loss(divergence));
  if (s.gradient.data == nullptr) {
    return;
  }
  const A factor = head.factor(divergence, coefficient);
  s.metrics[row].gradient_square = write_gradient(s.gradient, row, s.width, factor, [=](auto load) { return load(x); });
}

// The rows of QuantileHuber. Each lane holds one quantile and loops over all targets, so that pairs are not stored and
// the order of summation is the same for all instruction sets.

// One quantile per lane, and its sums over the targets.
template <class A>
struct QuantileLanes {
  alignas(64) A x[kLanes];
  alignas(64) A above[kLanes];
  alignas(64) A below[kLanes];
  alignas(64) A loss[kLanes];
  alignas(64) A slope[kLanes]; // the negative derivative
};

template <class A>
[[gnu::noinline]] void add_pairs(
    const QuantileHuber<A>& head, const A* targets, int64_t count, QuantileLanes<A>& lanes) {
  for (int64_t begin = 0; begin < count; begin += head.kPartialSum) {
    const int64_t end = begin + head.kPartialSum < count ? begin + head.kPartialSum : count;
    A loss[kLanes] = {}, slope[kLanes] = {};
    for (int64_t j = begin; j < end; ++j) {
      const A target = targets[j];
#pragma omp simd
      for (int k = 0; k < kLanes; ++k) {
        head.add(target - lanes.x[k], lanes.above[k], lanes.below[k], loss[k], slope[k]);
      }
    }
#pragma omp simd
    for (int k = 0; k < kLanes; ++k) {
      lanes.loss[k] += loss[k];
      lanes.slope[k] += slope[k];
    }
  }
}

// Writes the gradients of `count` quantiles. Returns the sum of their squares.
template <class G, class A>
double write_slopes(const QuantileLanes<A>& lanes, int64_t count, A factor, G* out) {
  double squares = 0;
  for (int64_t k = 0; k < count; ++k) {
    const A value = lanes.slope[k] * factor;
    out[k] = from_accumulate<G, A>(value);
    squares += squared(value);
  }
  return squares;
}

template <class A>
void own_row(
    const QuantileHuber<A>& head, const Pass& pass, const Segment& s, int64_t row, double coefficient, A* targets) {
  const Rows& fractions = pass.fields[s.first_field + kSecondField];
  A* x = second_row(targets, s.target_width);
  widen_row(s.prediction, row, s.width, x);
  widen_row(s.target, row, s.target_width, targets);
  const A factor = head.factor(coefficient);
  double loss = 0, squares = 0;
  for (int64_t first = 0; first < s.width; first += kLanes) {
    const int64_t count = s.width - first < kLanes ? s.width - first : kLanes;
    QuantileLanes<A> lanes{};
    for (int64_t k = 0; k < count; ++k) {
      const QuantileWeights<A> weights = head.weights(fractions, row, first + k);
      lanes.x[k] = x[first + k];
      lanes.above[k] = weights.above;
      lanes.below[k] = weights.below;
    }
    add_pairs(head, targets, s.target_width, lanes);
    for (int64_t k = 0; k < count; ++k) {
      loss += lanes.loss[k];
    }
    if (s.gradient.data != nullptr) {
      dispatch_rows<A>(s.gradient, [&](auto type) {
        auto* out = static_cast<decltype(type)*>(s.gradient.data) + row * s.gradient.stride + first;
        squares += write_slopes(lanes, count, factor, out);
      });
    }
  }
  s.loss.store(row, loss);
  s.metrics[row] = {squares, 0};
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
