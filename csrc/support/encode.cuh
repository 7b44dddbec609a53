// The kernel that turns scalars into distributions over the bins of a support. A group of threads writes each row once,
// as in loss_rows: bytes = scalars + rows.
#pragma once

#include "../cuda/rows.cuh"
#include "support_calls.h"

namespace gradscale {

template <class T, class Target>
GRADSCALE_DEVICE void encode_row(T* row, int32_t width, const Target& target, const Group& group) {
  using A = typename AccumulateType<T>::type;
  constexpr int size = kVector<T>;
  const A elsewhere = target.is_nan() ? static_cast<A>(NAN) : A(0);
  const Windows<T> windows(row, width);
  for (int32_t window = group.rank; window < windows.count; window += group.size) {
    A values[size];
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const int32_t j = windows.first(window) + k;
      values[k] = j >= target.begin && j < target.end ? static_cast<A>(target.mass(j)) : elsewhere;
    }
    write_elements<size>(row, width, windows.first(window), values);
  }
}

GRADSCALE_KERNEL(kThreads, 2) encode_rows(GRADSCALE_ARGUMENT(EncodeArguments) arguments) {
  const Encoding& e = arguments.encoding;
  const RowOfThread own(blockIdx.x, arguments.threads_per_row, arguments.count, nullptr);
  if (!own.active) {
    return;
  }
  dispatch_element(e.scalars.element, [&](auto type) {
    using T = decltype(type);
    const double x = to_accumulate(static_cast<const T*>(e.scalars.data)[own.row * e.scalars.stride]);
    T* row = static_cast<T*>(e.out.data) + own.row * e.out.stride;
    if (e.sigma_ratio > 0) {
      encode_row(row, static_cast<int32_t>(e.width), hl_gauss(x, arguments.support, e.sigma_ratio), own.group);
    } else {
      encode_row(row, static_cast<int32_t>(e.width), two_hot(x, arguments.support), own.group);
    }
  });
}

} // namespace gradscale
