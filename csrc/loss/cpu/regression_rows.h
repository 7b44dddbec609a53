// The loops over rows on the CPU for the heads of regression_heads.h.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// A row in type A: the row itself, or a copy in `scratch`.
template <class A>
const A* widened(const Rows& rows, int64_t row, int64_t width, A* scratch) {
  if (rows.element == kElementOf<A>) {
    return row_of<A>(rows, row);
  }
  widen_row(rows, row, width, scratch);
  return scratch;
}

template <class RowHead, class A>
void vector_row(const Segment& s, int64_t row, double coefficient, A* scratch) {
  const int64_t width = s.width;
  const A* x = widened(s.prediction, row, width, scratch);
  A* t = second_row(scratch, width); // the target, then the gradient without its factor
  widen_row(s.target, row, width, t);
  transform_many</*inverse=*/false>(s.head->support, width, t);
  RowHead head{{static_cast<double>(width), s.head}};
  if constexpr (RowHead::kScales) {
    const auto max_norm = [=](const A* y) { return largest(width, [=](int64_t j) { return std::abs(y[j]); }); };
    head.scale(max_norm(x), max_norm(t));
  }
  typename RowHead::Sum first = 0, second = 0, third = 0; // compilers do not vectorise reductions into arrays
#pragma omp simd reduction(+ : first, second, third)
  for (int64_t j = 0; j < width; ++j) {
    const auto terms = head.terms(x[j], t[j]);
    first += terms.values[0];
    second += terms.values[1];
    third += terms.values[2];
    if (!RowHead::kGradientWaits) {
      t[j] = head.gradient(x[j], t[j]);
    }
  }
  s.loss.store(row, head.finish({{first, second, third}}));
  s.metrics[row] = {};
  if (s.gradient.data == nullptr) {
    return;
  }
  for (int64_t j = 0; j < width && RowHead::kGradientWaits; ++j) {
    t[j] = head.gradient(x[j], t[j]);
  }
  const A factor = head.factor(coefficient);
  s.metrics[row].gradient_square = write_gradient(s.gradient, row, width, factor, [=](auto load) { return load(t); });
}

// Rows of one element, vectorised over rows. Whole vectors are computed, because scalar code for the remaining rows
// may round differently.
template <class RowHead, class A>
void scalar_rows(const Pass& pass, const Segment& s, int64_t begin, int64_t end) {
  constexpr int64_t tile = 64;
  A x[tile] = {}, target[tile] = {}, loss[tile], gradient[tile];
  RowHead head{{1, s.head}};
  for (int64_t first = begin; first < end; first += tile) {
    const int64_t count = end - first < tile ? end - first : tile;
    widen_column(s.prediction, first, count, x);
    if (s.target.data != nullptr) {
      widen_column(s.target, first, count, target);
    }
    transform_many</*inverse=*/false>(s.head->support, count, target);
    const int64_t lanes = padded_width(count);
#pragma omp simd
    for (int64_t i = 0; i < lanes; ++i) {
      loss[i] = head.finish(head.terms(x[i], target[i]));
      gradient[i] = head.gradient(x[i], target[i]);
    }
    for (int64_t i = 0; i < count; ++i) {
      const RowFactor factor = pass.row_factor(s, first + i);
      loss[i] = factor.counts ? loss[i] : A(0);
      gradient[i] = factor.counts ? gradient[i] * head.factor(factor.coefficient) : A(0);
      s.metrics[first + i] = {s.gradient.data == nullptr ? 0 : squared(gradient[i]), 0};
    }
    s.loss.store(first, count, loss);
    if (s.gradient.data != nullptr) {
      dispatch_rows<A>(s.gradient, [&](auto type) {
        using G = decltype(type);
        G* out = static_cast<G*>(s.gradient.data) + first * s.gradient.stride;
        for (int64_t i = 0; i < count; ++i) {
          out[i * s.gradient.stride] = from_accumulate<G, A>(gradient[i]);
        }
      });
    }
  }
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
