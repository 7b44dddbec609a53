// The kernels that decode rows of logits to scalars, or compute the gradient of that. Logits are read once, and a
// gradient is written once. A group of threads has a row, as in loss_rows.
#pragma once

#include "categorical_rows.cuh"
#include "device_arguments.h"

namespace gradscale {

// Decodes one row. The table has the raw centres, where there are some, and nothing else.
template <class T, class A, bool cached>
GRADSCALE_DEVICE void decode_row(const DecodeArguments& arguments, const void* raw_centers, const RowOfThread& own) {
  constexpr int size = kVector<T>;
  const Decoding& d = arguments.decoding;
  const Support& support = arguments.support;
  const T* logits = static_cast<const T*>(d.logits.data) + own.row * d.logits.stride;
  const int32_t width = own.active ? static_cast<int32_t>(d.width) : 0;
  LogitsRow<T, A, cached> values(logits, width, own.group);
  const CategoricalSums<A> sums = categorical_sums<A>(values, width, support, raw_centers, own.group);
  const A expected = sums.expected;
  if (d.gradient.data == nullptr) {
    if (own.active && own.group.rank == 0) {
      d.out.store(own.row, decoded_value(expected, support));
    }
    return;
  }
  const A slope =
      support.raw ? A(1) : inverse_transform_slope(support.transform, expected, static_cast<A>(support.eps));
  const A factor = static_cast<A>(d.grad_output.load(own.row)) * slope / sums.sum;
  const A* centers = static_cast<const A*>(raw_centers);
  T* gradient = static_cast<T*>(d.gradient.data) + own.row * d.gradient.stride;
  values.each_window_of_exponentials(sums.maximum, [&](const A* e, int32_t first) {
    A of_logit[size];
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const int32_t j = first + k;
      const bool inside = j >= 0 && j < width;
      const A c = support.raw ? (inside ? centers[j] : A(0)) : expectation_from_moment(A(2 * j + 1 - width), support);
      of_logit[k] = e[k] * factor * (c - expected);
    }
    write_elements<size>(gradient, width, first, 0, 0, of_logit);
  });
}

template <class A>
GRADSCALE_DEVICE void decode_block(const DecodeArguments& arguments, const void* raw_centers, double* shared) {
  const RowOfThread own(blockIdx.x, arguments.threads_per_row, arguments.count, shared);
  dispatch_element(arguments.decoding.logits.element, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(typename AccumulateType<T>::type) == sizeof(A)) {
      if (fits_registers<T>(arguments.decoding.width, own.group)) {
        decode_row<T, A, true>(arguments, raw_centers, own);
      } else {
        decode_row<T, A, false>(arguments, raw_centers, own);
      }
    }
  });
}

template <class A>
GRADSCALE_KERNEL(kThreads, 2)
decode_rows(GRADSCALE_ARGUMENT(DecodeArguments) arguments) {
  GRADSCALE_SHARED(double, shared, kWarps);
  decode_block<A>(arguments, nullptr, shared);
}

template <class A>
GRADSCALE_KERNEL(kThreads, 2)
decode_rows_raw(GRADSCALE_ARGUMENT(RawDecodeArguments) arguments) {
  GRADSCALE_SHARED(double, shared, kWarps);
  decode_block<A>(arguments.decode, arguments.centers.template at<char>(0), shared);
}

} // namespace gradscale
