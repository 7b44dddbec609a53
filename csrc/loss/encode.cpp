#include "encode.h"

#include "../formulas/targets.h"
#include "../host/device.h"
#include "../host/tensor_element.h"
#include "device_calls.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

namespace gradscale {

namespace {

template <class T, class Target>
void encode_row(T* row, int64_t width, const Target& target) {
  using A = typename AccumulateType<T>::type;
  const A elsewhere = target.is_nan() ? std::numeric_limits<A>::quiet_NaN() : A(0);
  std::fill(row, row + width, from_accumulate<T, A>(elsewhere));
  target.for_each([&](int32_t bin, double mass) { row[bin] = from_accumulate<T, A>(static_cast<A>(mass)); });
}

void encode_rows(const Encoding& e, int64_t begin, int64_t end) {
  dispatch_element(e.out.element, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = begin; row < end; ++row) {
      const double x = to_accumulate(static_cast<const T*>(e.scalars.data)[row * e.scalars.stride]);
      T* out = static_cast<T*>(e.out.data) + row * e.out.stride;
      if (e.sigma_ratio > 0) {
        encode_row(out, e.width, hl_gauss(x, *e.support, e.sigma_ratio));
      } else {
        encode_row(out, e.width, two_hot(x, *e.support));
      }
    }
  });
}

} // namespace

at::Tensor encode(const Support& support, double sigma_ratio, const at::Tensor& scalars) {
  const at::Tensor dense = scalars.detach().contiguous();
  std::vector<int64_t> shape(dense.sizes().begin(), dense.sizes().end());
  shape.push_back(support.num_bins);
  const at::Tensor out = at::empty(shape, dense.options());
  const Element element = element_of(dense);
  const Encoding encoding{
      {const_cast<void*>(dense.const_data_ptr()), 1, element},
      {out.mutable_data_ptr(), support.num_bins, element},
      support.num_bins,
      &support,
      sigma_ratio};
  if (runs_kernels(dense.device())) {
    const OnDevice on_device(dense.device());
    launch_encode(encoding, dense.numel(), on_device.stream());
  } else {
    const int64_t grain = std::max<int64_t>(1, 16384 / cost_of_row(support.num_bins));
    at::parallel_for(0, dense.numel(), grain, [&](int64_t begin, int64_t end) { encode_rows(encoding, begin, end); });
  }
  return out;
}

} // namespace gradscale
