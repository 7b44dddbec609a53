// The CPU kernel of the multi-step loss, which takes one row (the prediction of one sample at one step) at a time.
// Included once for each instruction set.
//
// A row is read from memory once, widened into a padded scratch row that stays in the first-level cache, and its
// gradient is written once; between the two there is one exponential per element.
#include "regression_heads.h"
#include "row_tools.h"

#include "categorical_rows.h"
#include "policy_rows.h"
#include "regression_rows.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

template <class T, class G, class A>
void run_row(const Segment& s, int64_t row, double coefficient, A* scratch) {
  const Head& head = *s.head;
  switch (head.kind) {
    case Kind::two_hot:
      return categorical_row<T, G>(s, row, coefficient, two_hot(load_scalar(s.target, row), head.support), scratch);
    case Kind::hl_gauss:
      return categorical_row<T, G>(
          s, row, coefficient, hl_gauss(load_scalar(s.target, row), head.support, head.sigma_ratio), scratch);
    case Kind::soft_cross_entropy:
      return soft_cross_entropy_row<T, G>(s, row, coefficient, scratch);
    case Kind::mean_squared_error:
      return vector_row<MeanSquaredError<A>, T, G>(s, row, coefficient, scratch);
    case Kind::negative_cosine:
      return vector_row<NegativeCosine<A>, T, G>(s, row, coefficient, scratch);
    case Kind::binary_cross_entropy:
    case Kind::per_step_loss:
      return; // rows of one number
  }
}

template <class T, class G>
void run_rows_of(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end, double* scratch) {
  using A = typename AccumulateType<T>::type;
  const Kind kind = s.head->kind;
  if (kind == Kind::binary_cross_entropy) {
    return scalar_rows<BinaryCrossEntropy<A>, T, G, A>(s, coefficients, begin, end);
  }
  if (kind == Kind::per_step_loss) {
    return scalar_rows<PerStepLoss<A>, T, G, A>(s, coefficients, begin, end);
  }
  if (kind == Kind::mean_squared_error && s.width == 1) {
    return scalar_rows<MeanSquaredError<A>, T, G, A>(s, coefficients, begin, end);
  }
  A* row_scratch = reinterpret_cast<A*>(scratch);
  for (int64_t row = begin; row < end; ++row) {
    // A masked row adds exactly nothing: it is computed into the outputs that do not depend on its target, and its loss
    // and gradient are zero whatever it holds.
    const bool unmasked = coefficients.mask.keeps(row, s.step);
    run_row<T, G>(s, row, unmasked ? coefficients.at(row, s.step) : 0.0, row_scratch);
    if (!unmasked) {
      s.loss.store(row, 0.0);
      if (s.gradient.data != nullptr) {
        memset(static_cast<G*>(s.gradient.data) + row * s.gradient.stride, 0, s.width * sizeof(G));
      }
    }
  }
}

void run_rows(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end, double* scratch) {
  dispatch_element(s.prediction.element, [&](auto type) {
    using T = decltype(type);
    using A = typename AccumulateType<T>::type;
    if (s.gradient.data == nullptr || s.gradient.element == ElementOf<T>::value) {
      run_rows_of<T, T>(s, coefficients, begin, end, scratch);
    } else {
      run_rows_of<T, A>(s, coefficients, begin, end, scratch);
    }
  });
}

void decode_rows(const Decoding& decoding, int64_t begin, int64_t end, double* scratch) {
  dispatch_element(decoding.logits.element, [&](auto type) {
    using T = decltype(type);
    using A = typename AccumulateType<T>::type;
    if (begin == end) {
      return;
    }
    // The maximum of the next row is found while the exponentials of this one, which wait for theirs, are computed.
    A next = maximum_of<A>(row_of<T>(decoding.logits, begin), decoding.width);
    for (int64_t row = begin; row < end; ++row) {
      const A maximum = next;
      if (row + 1 < end) {
        next = maximum_of<A>(row_of<T>(decoding.logits, row + 1), decoding.width);
      }
      decode_row<T>(decoding, row, maximum, reinterpret_cast<A*>(scratch));
    }
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
