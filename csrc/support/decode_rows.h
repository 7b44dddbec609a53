// The CPU kernel that decodes rows. Included once for each instruction set.
#include "expectation.h"
#include "support_calls.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

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
      d.gradient, row, d.width, factor, [=](auto load) { return load(values) * (load(centers) - middle); });
}

void decode_rows(const Decoding& decoding, int64_t begin, int64_t end, double* scratch) {
  dispatch_element(decoding.logits.element, [&](auto type) {
    using T = decltype(type);
    using A = typename AccumulateType<T>::type;
    if (begin == end) {
      return;
    }
    // The next row's maximum is found while this row's exponentials, which need this row's maximum, are computed.
    A next = extremes_of<A>(row_of<T>(decoding.logits, begin), decoding.width).largest;
    for (int64_t row = begin; row < end; ++row) {
      const A maximum = next;
      if (row + 1 < end) {
        next = extremes_of<A>(row_of<T>(decoding.logits, row + 1), decoding.width).largest;
      }
      decode_row<T>(decoding, row, maximum, reinterpret_cast<A*>(scratch));
    }
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
