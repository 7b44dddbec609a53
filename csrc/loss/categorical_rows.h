// Rows of logits over the bins of a support: their decoded values, and cross-entropy with the target that a scalar
// becomes over the bins (TwoHot, HLGauss).
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

inline const float* raw_centers(const Support& support, float) {
  return support.raw_centers_float;
}

inline const double* raw_centers(const Support& support, double) {
  return support.raw_centers;
}

// sum_j e_j c_j over the centres transformed back. Bins at equal distance from the middle are taken together: over a
// symmetric support each pair is exactly antisymmetric, so that equal e_j give exactly 0.
template <class A>
A raw_moment(const A* values, const Support& support) {
  const A* centers = raw_centers(support, A());
  const int64_t last = support.num_bins - 1;
  const int64_t pairs = support.num_bins / 2;
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < pairs; ++j) {
    sum += pair_moment(centers[j], centers[last - j], values[j], values[last - j]);
  }
  return last % 2 == 0 ? sum + values[pairs] * centers[pairs] : sum;
}

// The expectation in transformed coordinates, or of the raw centres.
template <class A>
A expectation(const Softmax<A>& softmax, const Support& support) {
  return support.raw ? raw_moment(softmax.values, support) / softmax.sum
                     : expectation_from_moment(softmax.moment / softmax.sum, support);
}

template <class A>
A decoded_value(A expected, const Support& support) {
  return support.raw ? expected : inverse_transform_value(support.transform, expected, static_cast<A>(support.eps));
}

// log(sum) - sum_j t_j (x_j - maximum); gradient c (p_j - t_j). Only the bins begin..end have mass, apart from
// the label smoothing that every bin gets. Writes the gradient, and leaves the sums of the row in a lane of `sums`.
template <class T, class G, class A, class Target>
void categorical_row(
    const Segment& s,
    const Group& group,
    int64_t lane,
    A maximum,
    const Target& target,
    A* scratch,
    GroupSums<A>& sums) {
  const int64_t row = group.first + lane;
  const T* logits = row_of<T>(s.prediction, row);
  const Support& support = s.head->support;
  const Softmax<A> softmax = softmax_of<true>(logits, s.width, maximum, ahead_of<T>(s, row), scratch);
  A* mass = second_row(scratch, s.width);
  const double target_share = 1 - s.head->label_smoothing;
  const A everywhere = static_cast<A>(s.head->label_smoothing / static_cast<double>(s.width));
  A correct = 0;
  A nan = 0; // a NaN target makes the whole row NaN
  target.for_each([&](int32_t j, double of_bin) {
    mass[j] = static_cast<A>(target_share * of_bin);
    nan += A(0) * mass[j];
    // An illegal bin (-inf) without mass costs nothing.
    correct += product(mass[j], static_cast<A>(to_accumulate(logits[j])) - maximum);
  });
  if (everywhere != 0) {
    const auto shifted = [=](auto load) {
      const auto difference = load(logits) - maximum;
      return std::make_tuple(difference, difference, difference); // of which one sum is taken
    };
    correct += everywhere * sums_of<A>(logits, s.width, shifted)[0];
  }
  sums.exponentials[lane] = softmax.sum;
  sums.moment[lane] = support.raw && s.detail.data != nullptr ? raw_moment(softmax.values, support) : softmax.moment;
  sums.target[lane] = A(1) + nan;
  sums.correct[lane] = correct;
  if (s.gradient.data == nullptr) {
    return;
  }
  const A c = static_cast<A>(group.coefficients[lane]);
  const A inverse_sum = A(1) / softmax.sum;
  const A factor = c * inverse_sum + nan;
  const A offset = c * everywhere;
  const A* values = softmax.values;
  write_gradient<G, A>(s.gradient, row, s.width, [=](auto load) { return load(values) * factor - offset; });
  G* gradient = static_cast<G*>(s.gradient.data) + row * s.gradient.stride;
  for (int32_t j = target.begin; j < target.end; ++j) {
    gradient[j] = from_accumulate<G, A>((values[j] * inverse_sum - (mass[j] + everywhere)) * c);
  }
}

template <class T, class G, class A, class Target>
[[gnu::noinline]] void categorical_rows(const Segment& s, const Group& group, const Target* targets, A* scratch) {
  const GroupSums<A> sums = row_by_row<T, A>(s, group, [&](int64_t i, A maximum, GroupSums<A>& of_rows) {
    categorical_row<T, G>(s, group, i, maximum, targets[i], scratch, of_rows);
  });
  store_losses(s, group, sums);
  store_decoded(s, group, sums);
}

// Decodes a row of logits. Where a gradient is wanted, it is written instead of the value: the derivative g'(E) p_j
// (c_j - E) times grad_output, with E the expectation, c_j the centres and g the inverse transform.
template <class T, class A>
void decode_row(const Decoding& d, int64_t row, A maximum, A* scratch) {
  const Support& support = *d.support;
  Ahead ahead = ahead_of<T>(d.logits, d.gradient, row);
  ahead.read = row_of<T>(d.logits, row + 2); // the next row was read for its maximum
  const Softmax<A> softmax = softmax_of<true>(row_of<T>(d.logits, row), d.width, maximum, ahead, scratch);
  const A expected = expectation(softmax, support);
  if (d.gradient.data == nullptr) {
    d.out.store(row, decoded_value(expected, support));
    return;
  }
  const A slope =
      support.raw ? A(1) : inverse_transform_slope(support.transform, expected, static_cast<A>(support.eps));
  A factor = static_cast<A>(d.grad_output.load(row)) * slope / softmax.sum;
  const A* values = softmax.values;
  const A* centers = raw_centers(support, A());
  A middle = expected;
  if (!support.raw) { // in halves of bins, as whole numbers: the gradient of a softmax that is 1 in a bin is exactly 0
    A* places = second_row(scratch, d.width);
    for (int64_t j = 0; j < d.width; ++j) {
      places[j] = static_cast<A>(2 * j + 1 - d.width);
    }
    centers = places;
    middle = softmax.moment / softmax.sum;
    factor *= static_cast<A>(0.5 * bin_width(support));
  }
  write_gradient<T, A>(
      d.gradient, row, d.width, [=](auto load) { return load(values) * factor * (load(centers) - middle); });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
