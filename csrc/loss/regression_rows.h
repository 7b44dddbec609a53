// The driver of regression_heads.h on a CPU.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

template <class RowHead, class A>
void vector_row(const Segment& s, int64_t row, double coefficient, A* scratch) {
  const int64_t width = s.width;
  const Along<A> layout(width, s.prediction, row);
  const auto as_it_is = [](int, Lanes<A> lanes) GRADSCALE_INLINE_LAMBDA { return lanes; };
  A* const targets = scratch + scratch_row(width);
  layout.read(s.prediction, row, 1, scratch, A(0), as_it_is);
  layout.read(s.target, row, 1, targets, A(0), as_it_is);
  const A* x = scratch + layout.lead;
  A* t = targets + layout.lead; // becomes the gradient, but for its factor
  transform_many(s.head->support, width, t);
  RowHead head{{static_cast<double>(width), s.head}};
  if constexpr (RowHead::kScales) {
    const auto largest_of = [=](const A* of) { return largest(width, [=](int64_t j) { return std::abs(of[j]); }); };
    head.scale(largest_of(x), largest_of(t));
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
  s.loss.store(row, head.finish({{first, second, third}}, coefficient));
  if (s.gradient.data == nullptr) {
    return;
  }
  for (int64_t j = 0; j < width && RowHead::kGradientWaits; ++j) {
    t[j] = head.gradient(x[j], t[j]);
  }
  const A factor = head.factor(coefficient);
  layout.write(s.gradient, row, 1, targets, [=](int64_t at) GRADSCALE_INLINE_LAMBDA {
    return load<A>(targets + at) * Lanes<A>(factor);
  });
}

// Rows of one number. A loop over rows vectorises as one over the elements of a row does.
template <class RowHead, class T, class G, class A>
void scalar_rows(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end) {
  constexpr int64_t most = 64;
  A x[most], target[most] = {}, loss[most], gradient[most];
  RowHead head{{1, s.head}};
  for (int64_t first = begin; first < end; first += most) {
    const int64_t count = end - first < most ? end - first : most;
    widen_column<T>(s.prediction, first, count, x);
    if (s.target.data != nullptr) {
      dispatch_element(
          s.target.element, [&](auto type) { widen_column<decltype(type)>(s.target, first, count, target); });
    }
    transform_many(s.head->support, count, target);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      loss[i] = head.finish(head.terms(x[i], target[i]), 1);
      gradient[i] = head.gradient(x[i], target[i]);
    }
    double coefficient[most];
    coefficients.of_rows(first, count, s.step, coefficient);
    for (int64_t i = 0; i < count; ++i) {
      const bool unmasked = coefficients.mask.includes(first + i, s.step);
      loss[i] = unmasked ? loss[i] : A(0);
      gradient[i] = unmasked ? gradient[i] * head.factor(coefficient[i]) : A(0);
    }
    s.loss.store(first, count, loss);
    if (s.gradient.data != nullptr) {
      G* out = static_cast<G*>(s.gradient.data) + first * s.gradient.stride;
      for (int64_t i = 0; i < count; ++i) {
        out[i * s.gradient.stride] = from_accumulate<G, A>(gradient[i]);
      }
    }
  }
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
