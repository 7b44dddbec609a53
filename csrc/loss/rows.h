// The CPU kernel of the multi-step loss, which takes one row (the prediction of one sample at one step) at a time.
// Included once for each instruction set.
//
// A row is read from memory once, widened into a padded scratch row that stays in the first-level cache, and its
// gradient is written once; between the two there is one exponential per element.
#include "kinds.h"
#include "row_tools.h"

#include "categorical_rows.h"
#include "policy_rows.h"
#include "regression_rows.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Calls run(row, coefficient) for the rows, with a coefficient of 0 for a masked one. That adds exactly nothing: it is
// computed into the outputs that do not depend on its target, and its loss and gradient are zero whatever it holds.
template <class G, class Run>
void each_row(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end, Run run) {
  for (int64_t row = begin; row < end; ++row) {
    const bool unmasked = coefficients.mask.includes(row, s.step);
    run(row, unmasked ? coefficients.at(row, s.step) : 0.0);
    if (!unmasked) {
      s.loss.store(row, 0.0);
      if (s.gradient.data != nullptr) {
        memset(static_cast<G*>(s.gradient.data) + row * s.gradient.stride, 0, s.width * sizeof(G));
      }
    }
  }
}

template <class T, class G>
void run_rows_of(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end, double* memory) {
  using A = typename AccumulateType<T>::type;
  A* scratch = reinterpret_cast<A*>(memory);
  const auto each = [&](auto run) { each_row<G>(s, coefficients, begin, end, run); };
  const auto scalar = [&](auto of) { scalar_rows<typename decltype(of)::Head, T, G, A>(s, coefficients, begin, end); };
  dispatch_kind<A>(
      *s.head,
      [&](auto encode) {
        each([&](int64_t row, double coefficient) {
          categorical_row<T, G>(s, row, coefficient, encode(load_scalar(s.target, row)), scratch);
        });
      },
      [&] {
        each([&](int64_t row, double coefficient) { soft_cross_entropy_row<T, G>(s, row, coefficient, scratch); });
      },
      [&](auto of) {
        using RowHead = typename decltype(of)::Head;
        if constexpr (!RowHead::kGradientWaits) {
          if (s.width == 1) {
            return scalar(of);
          }
        }
        each([&](int64_t row, double coefficient) { vector_row<RowHead, T, G>(s, row, coefficient, scratch); });
      },
      scalar);
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
    // The next row's maximum is found while this row's exponentials, which need this row's maximum, are computed.
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
