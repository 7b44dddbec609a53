// The kernel of the multi-step loss: one launch for the rows of all heads and steps. Logits and targets are read once,
// gradients written once: bytes = logits + targets + gradients. It is compiled for the different kinds of rows of a
// call, so that types and widths are known, and for whether the table is inside of the arguments. A block has rows of
// one segment, which it finds by arithmetic; how its threads share them, a kind of rows says.
#pragma once

#include "lane_losses.cuh"
#include "rows.cuh"

namespace gradscale {

template <class Rows>
GRADSCALE_DEVICE void run_or_multiply(const BlockOfRows& block) {
  if constexpr (Rows::kHasHalves) {
    if (block.multiplies_halves()) {
      const int64_t rows = Rows::rows_of_block(block);
      const int64_t first = block.index * rows;
      const int64_t left = block.pass.batch - first;
      multiply_rows<BFloat16Bits>(block, first, left < rows ? left : rows);
      return;
    }
  }
  Rows::run(block);
}

// Runs the call's kind of rows number `index`.
template <class First, class... Rest>
GRADSCALE_DEVICE void run_rows(int32_t index, const BlockOfRows& block) {
  if constexpr (sizeof...(Rest) == 0) {
    run_or_multiply<First>(block);
  } else if (index == 0) {
    run_or_multiply<First>(block);
  } else {
    run_rows<Rest...>(index - 1, block);
  }
}

// The span that has a block. A call has few: one for each head, as a rule.
GRADSCALE_DEVICE const Span& span_of_block(const Span* spans, int64_t count, int32_t block) {
  int64_t span = 0;
  while (span + 1 < count && spans[span + 1].first_block <= block) {
    ++span;
  }
  return spans[span];
}

template <class... Rows>
GRADSCALE_HOST_DEVICE constexpr int fewest_blocks() {
  int fewest = INT32_MAX;
  ((fewest = Rows::kBlocks < fewest ? Rows::kBlocks : fewest), ...);
  return fewest;
}

template <class... Rows>
GRADSCALE_HOST_DEVICE constexpr int most_shared_bytes() {
  int most = 0;
  ((most = Rows::kSharedBytes > most ? Rows::kSharedBytes : most), ...);
  return most;
}

template <bool inside, class... Rows>
GRADSCALE_KERNEL(kRowThreads, fewest_blocks<Rows...>())
loss_rows(GRADSCALE_ARGUMENT(DevicePass) device) {
  GRADSCALE_SHARED(Words16, shared, most_shared_bytes<Rows...>() / 16 + 1);
  const Pass& pass = device.pass;
  const bool backward = pass.grad_output.data != nullptr;
  if (backward && pass.has_gradients && pass.grad_output.stride == 0 && pass.grad_output.load(0) == 1) {
    return;
  }
  if (!backward && blockIdx.x == 0 && threadIdx.x == 0) {
    *device.blocks_done = 0;
  }
  const char* const table = device.table.template begin<inside>();
  const auto index = static_cast<int32_t>(blockIdx.x);
  const Span& span = span_of_block(reinterpret_cast<const Span*>(table + device.spans), device.num_spans, index);
  const int32_t of_span = index - span.first_block;
  const int32_t step = of_span / span.blocks_of_segment;
  const BlockOfRows block{
      pass,
      device.rows_of_warp,
      table,
      span,
      reinterpret_cast<const Head*>(table + device.heads)[span.head],
      reinterpret_cast<const Coefficients*>(table + device.coefficients)[span.head],
      reinterpret_cast<const Segment*>(table + device.segments)[span.first_segment + step],
      of_span - step * span.blocks_of_segment,
      reinterpret_cast<char*>(shared)};
  run_rows<Rows...>(span.kind_of_rows, block);
}

} // namespace gradscale
