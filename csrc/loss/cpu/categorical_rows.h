// Rows of logits over the bins of a support: cross-entropy with a target over the bins that encodes a scalar (TwoHot,
// HLGauss).
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

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
    const auto differences = [=](auto load) { return std::array<Lanes<A>, 1>{load(logits) - maximum}; };
    correct += everywhere * sums_of<A>(logits, s.width, differences)[0];
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

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
