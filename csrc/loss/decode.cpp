#include "decode.h"

#include "../tensor_element.h"
#include "../variants/kernels.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>

namespace gradscale {

at::Tensor decode(const at::Tensor& logits, const Support& support) {
  const at::Tensor rows = logits.contiguous();
  const int64_t width = support.num_bins;
  const int64_t count = rows.numel() / width;
  const bool is_double = rows.scalar_type() == at::kDouble;
  const at::Tensor out =
      at::empty(rows.sizes().slice(0, rows.dim() - 1), rows.options().dtype(is_double ? at::kDouble : at::kFloat));
  const Rows logits_rows{const_cast<void*>(rows.const_data_ptr()), width, element_of(rows)};
  const Slab values{out.mutable_data_ptr(), 1, is_double};
  const DecodeRows run = kernels().decode_rows;
  const int64_t grain = std::max<int64_t>(1, 32768 / (width + kLanes));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    std::unique_ptr<double[]> scratch(new double[scratch_elements(width)]);
    run(logits_rows, width, support, values, begin, end, scratch.get());
  });
  return out;
}

} // namespace gradscale
