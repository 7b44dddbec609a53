#include "update_norms.h"

#include "../host/cpu_kernels.h"
#include "../host/tensor_element.h"
#include "chunks.h"
#include "range_statistics.h"

#include <ATen/ops/zeros.h>

#include <cmath>

namespace gradscale {

namespace {

bool taken(const at::Tensor& before, const at::Tensor& after) {
  return ordinary_tensor(before) && ordinary_tensor(after) && before.is_cpu() && after.is_cpu() &&
         has_element(before) && before.scalar_type() != at::kDouble && after.scalar_type() == before.scalar_type() &&
         before.sizes() == after.sizes() && before.strides() == after.strides() &&
         before.is_non_overlapping_and_dense();
}

} // namespace

at::Tensor update_norms(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after) {
  TORCH_CHECK(before.size() == after.size(), "update_norms: ", before.size(), " and ", after.size(), " tensors");
  std::vector<Range> ranges;
  for (size_t i = 0; i < before.size(); ++i) {
    if (!taken(before[i], after[i])) {
      return at::Tensor();
    }
    ranges.push_back({before[i].const_data_ptr(), before[i].numel(), element_of(before[i]), /*is_complex=*/false});
  }
  const std::vector<Range> chunks = chunks_of(ranges);
  std::vector<const void*> afters;
  for (size_t i = 0; i < after.size(); ++i) {
    const auto* data = static_cast<const char*>(after[i].const_data_ptr());
    for (int64_t begin = 0; begin < after[i].numel(); begin += kChunk) {
      afters.push_back(data + begin * after[i].element_size());
    }
  }
  std::vector<UpdateSquares> squares(chunks.size());
  const UpdateOfRange update = for_this_machine(update_kernel);
  for_each_chunk(chunks, [&](int64_t i) { squares[i] = update(chunks[i], afters[i]); });
  const auto count = static_cast<int64_t>(before.size());
  at::Tensor norms = at::zeros({2, count}, at::kDouble);
  auto* out = norms.mutable_data_ptr<double>();
  size_t next = 0;
  for (int64_t i = 0; i < count; ++i) {
    UpdateSquares sum{};
    for (int64_t begin = 0; begin < ranges[i].size; begin += kChunk, ++next) {
      sum.before += squares[next].before;
      sum.update += squares[next].update;
    }
    out[i] = std::sqrt(sum.before);
    out[count + i] = std::sqrt(sum.update);
  }
  return norms;
}

} // namespace gradscale
