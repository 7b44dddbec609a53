// Rows of logits over actions with a dense target: SoftCrossEntropy.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Reads the target of a row, smoothed. A class that no logit stands for gives a row of NaN.
template <class A>
void read_target(const Segment& s, int64_t row, A* target) {
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
    const A everywhere = static_cast<A>(s.head->label_smoothing / static_cast<double>(s.width));
    for (int64_t j = 0; j < s.width; ++j) {
      target[j] = target[j] * target_share + everywhere;
    }
  }
}

// sum(t) log(sum) - sum_j t_j (x_j - maximum) - w H(p) [+ sum_j t_j log t_j];
// gradient c (sum(t) p_j - t_j + w p_j (log p_j + H)).
template <class T, class G, class A>
void soft_cross_entropy_row(const Segment& s, int64_t row, double coefficient, A* scratch) {
  const int64_t width = s.width;
  A* target = second_row(scratch, width);
  const T* logits = row_of<T>(s.prediction, row);
  const A maximum = maximum_of<A>(logits, width);
  const Softmax<A> softmax =
      softmax_of<false>(logits, width, maximum, ahead_of<T>(s.prediction, s.gradient, row), scratch);
  read_target(s, row, target);
  const auto [target_sum, correct] = sums_of<A>(logits, width, [=](auto load) {
    return std::make_pair(load(target), product(load(target), load(logits) - maximum));
  });
  const A log_sum = std::log(softmax.sum);
  A loss = target_sum * log_sum - correct;
  if (s.head->subtract_target_entropy) {
    double negative_entropy = 0; // small terms, all alike, would each lose the same digits in a float
    for (int64_t j = 0; j < width; ++j) {
      negative_entropy += target[j] == 0 ? A(0) : target[j] * std::log(target[j]);
    }
    loss += static_cast<A>(negative_entropy);
  }
  const A weight = static_cast<A>(s.head->entropy_weight);
  const A inverse_sum = A(1) / softmax.sum;
  A entropy = 0;
  if (weight != 0) {
    const A* values = softmax.values;
    const A expected = sums_of<A>(logits, width, [=](auto load) { // of x_j - maximum, times the sum
      return std::make_pair(product(load(values), load(logits) - maximum), load(values));
    })[0];
    entropy = log_sum - expected * inverse_sum;
    loss -= weight * entropy;
  }
  s.loss.store(row, loss);
  if (s.gradient.data == nullptr) {
    return;
  }
  const A c = static_cast<A>(coefficient);
  const A* values = softmax.values;
  if (weight != 0) {
    // The entropy's part goes with the target's: w p_j (log p_j + H) - t_j.
    const A constant = entropy - log_sum;
    for (int64_t j = 0; j < width; ++j) {
      const A p = values[j] * inverse_sum;
      target[j] -= weight * product(p, (static_cast<A>(to_accumulate(logits[j])) - maximum) + constant);
    }
  }
  const A factor = target_sum * inverse_sum;
  write_gradient<G, A>(s.gradient, row, width, [=](auto load) { return (load(values) * factor - load(target)) * c; });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
