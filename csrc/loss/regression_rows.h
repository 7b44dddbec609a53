// Rows that are compared with their target as numbers or vectors (MeanSquaredError, BinaryCrossEntropy,
// NegativeCosine), and rows that are compared with nothing (PerStepLoss).
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

template <class A>
void transform_row(const Support& transform, int64_t width, A* row) {
  if (transform.transform != Transform::identity) {
    for (int64_t j = 0; j < width; ++j) {
      row[j] = transform_value(transform.transform, row[j], static_cast<A>(transform.eps));
    }
  }
}

// mean_j (x_j - transform(t_j))^2; gradient c 2 (x_j - transform(t_j)) / width.
template <class T, class G, class A>
void mean_squared_error_row(const Segment& s, int64_t row, double coefficient, A* scratch) {
  const int64_t width = s.width;
  A* difference = second_row(scratch, width);
  widen_row(s.target, row, width, difference);
  transform_row(s.head->support, width, difference);
  const T* prediction = row_of<T>(s.prediction, row);
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < width; ++j) {
    difference[j] = static_cast<A>(to_accumulate(prediction[j])) - difference[j];
    sum += difference[j] * difference[j];
  }
  s.loss.store(row, sum / static_cast<A>(width));
  if (s.gradient.data == nullptr) {
    return;
  }
  const A factor = static_cast<A>(2 * coefficient / static_cast<double>(width));
  write_gradient<G, A>(s.gradient, row, width, [=](auto load) { return load(difference) * factor; });
}

// The largest of |x_j|, so that squares of doubles neither overflow nor underflow; those of floats do not in double.
inline double unit_of(const double* x, int64_t width) {
  double largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < width; ++j) {
    largest = std::abs(x[j]) > largest ? std::abs(x[j]) : largest;
  }
  return largest > 0 ? largest : 1;
}

inline double unit_of(const float*, int64_t) {
  return 1;
}

template <class T, class G, class A>
void negative_cosine_row(const Segment& s, int64_t row, double coefficient, A* scratch) {
  const int64_t width = s.width;
  A* target = second_row(scratch, width);
  widen(row_of<T>(s.prediction, row), width, scratch);
  widen_row(s.target, row, width, target);
  const double x_unit = unit_of(scratch, width);
  const double t_unit = unit_of(target, width);
  const double of_x_unit = 1 / x_unit;
  const double of_t_unit = 1 / t_unit;
  double xx = 0, tt = 0, xt = 0;
#pragma omp simd reduction(+ : xx, tt, xt)
  for (int64_t j = 0; j < width; ++j) {
    const double x = scratch[j] * of_x_unit;
    const double t = target[j] * of_t_unit;
    xx += x * x;
    tt += t * t;
    xt += x * t;
  }
  const Cosine cosine = negative_cosine(xx, tt, xt, x_unit, t_unit, s.head->support.eps);
  s.loss.store(row, cosine.loss);
  if (s.gradient.data == nullptr) {
    return;
  }
  const double of_x = cosine.of_x * coefficient;
  const double of_t = cosine.of_t * coefficient;
  for (int64_t j = 0; j < width; ++j) {
    target[j] = static_cast<A>(of_x * scratch[j] + of_t * target[j]);
  }
  write_gradient<G, A>(s.gradient, row, width, [=](auto load) { return load(target); });
}

// Losses and derivatives of `count` rows of one number. A loop over rows vectorises as one over the elements of a row
// does. The factor 2 of a squared error comes with the coefficient.
template <class A>
void scalar_losses(const Head& head, int64_t count, const A* x, A* target, A* loss, A* derivative) {
  const auto compute = [&](auto of_one) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const LossAndDerivative<A> result = of_one(x[i], target[i]);
      loss[i] = result.loss;
      derivative[i] = result.derivative;
    }
  };
  switch (head.kind) {
    case Kind::mean_squared_error:
      transform_row(head.support, count, target);
      return compute([](A of_x, A of_t) {
        const A difference = of_x - of_t;
        return LossAndDerivative<A>{difference * difference, difference};
      });
    case Kind::binary_cross_entropy:
      return compute([](A of_x, A of_t) { return binary_cross_entropy(of_x, of_t); });
    case Kind::per_step_loss:
      return compute([](A of_x, A) { return LossAndDerivative<A>{of_x, A(1)}; });
    case Kind::two_hot:
    case Kind::hl_gauss:
    case Kind::soft_cross_entropy:
    case Kind::negative_cosine:
      return; // their rows are computed one at a time
  }
}

template <class T, class G>
void run_scalar_rows(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end) {
  using A = typename AccumulateType<T>::type;
  constexpr int64_t most = 64;
  A x[most], target[most] = {}, loss[most], derivative[most];
  const double slope = s.head->kind == Kind::mean_squared_error ? 2 : 1;
  for (int64_t first = begin; first < end; first += most) {
    const int64_t count = end - first < most ? end - first : most;
    for (int64_t i = 0; i < count; ++i) {
      x[i] = static_cast<A>(to_accumulate(*row_of<T>(s.prediction, first + i)));
    }
    if (s.target.data != nullptr) {
      widen_column(s.target, first, count, target);
    }
    scalar_losses(*s.head, count, x, target, loss, derivative);
    double factor[most];
    coefficients.of_rows(first, count, s.step, factor);
    for (int64_t i = 0; i < count && coefficients.mask.data != nullptr; ++i) {
      const bool unmasked = coefficients.mask.keeps(first + i, s.step);
      loss[i] = unmasked ? loss[i] : A(0);
      derivative[i] = unmasked ? derivative[i] : A(0);
      factor[i] = unmasked ? factor[i] : 0.0;
    }
    s.loss.store(first, count, loss);
    if (s.gradient.data != nullptr) {
      G* gradient = static_cast<G*>(s.gradient.data) + first * s.gradient.stride;
      for (int64_t i = 0; i < count; ++i) {
        gradient[i * s.gradient.stride] = from_accumulate<G, A>(derivative[i] * static_cast<A>(slope * factor[i]));
      }
    }
  }
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
