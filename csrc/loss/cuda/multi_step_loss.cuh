// The kernel of the multi-step loss: one launch for the rows of all heads and steps. Logits and targets are read once,
// gradients written once: bytes = logits + targets + gradients. It is compiled for the kinds of rows of a call, so that
// types and widths are known, and for a table inside or outside of the arguments. A block has rows of one segment,
// which it finds from its index; the kind of rows determines how its threads share the rows.
#pragma once

#include "../kinds.h"
#include "block_rows.cuh"
#include "lane_losses.cuh"
#include "own_rows.cuh"
#include "regression_rows.cuh"

namespace gradscale {

// ---- Rows of any kind -----------------------------------------------------------------------------------------------

// Rows of any kind, type and width on a device, for which lane_rows.cuh has no kernel.
//
// A group of threads_for_row() threads owns a row, so that short rows share a warp and long ones take a block.

// T is the type of predictions.
template <Kind kind, class T, int options>
struct GroupRows {
  static constexpr int kBlocks = 2;
  static constexpr int kSharedBytes = 0;
  static constexpr bool kHasHalves = std::is_same_v<T, BFloat16Bits>;

  GRADSCALE_DEVICE static int32_t rows_per_block(const BlockOfRows& block) {
    return kRowThreads / block.span.threads_per_row;
  }
  GRADSCALE_DEVICE static void run(const BlockOfRows& block) {
    GRADSCALE_SHARED(double, shared, kWarps);
    using A = typename AccumulateType<T>::type;
    const RowOfThread own(block.index, block.span.threads_per_row, block.pass.batch, shared);
    const RowFactor factor = block.factor_of(own.row);
    const int32_t width = own.active ? static_cast<int32_t>(block.segment.width) : 0;
    const RowTask task{block, own.group, own.row, width, own.active, factor.counts, factor.coefficient};
    kind_rows<kind, A>(
        block.head,
        [&](auto encode) {
          const auto target = encode(block.template target<double>(own.row));
          logits_row<T, options>(task, BinsOfRow<A, decltype(target)>{target});
        },
        [&] { logits_row<T, options>(task, ActionsOfRow<A>{block.segment.target, own.row, width}); },
        [&](auto type) { vector_row<typename decltype(type)::Head, T, A>(task); },
        [&](auto type) { scalar_row<typename decltype(type)::Head, T, A>(task); },
        [&](auto type) { own_row<T>(typename decltype(type)::Head(block.head, block.segment), task); });
  }
};

// Multiplies the gradients of `count` rows, from row `first` on, by grad_output. Each is read once and written once.
template <class G>
GRADSCALE_DEVICE void multiply_rows(const BlockOfRows& block, int64_t first, int64_t count) {
  using A = typename AccumulateType<G>::type;
  constexpr int size = kVector<G>, at_once = 2;
  const RowOfThread own(0, block.span.threads_per_row, count, nullptr);
  const auto width = static_cast<int32_t>(block.segment.width);
  for (int64_t i = own.row; own.active && i < count; i += blockDim.x / own.group.size) {
    const int64_t row_index = first + i;
    const Coefficients& c = block.coefficients;
    if (!c.mask.includes(row_index, block.segment.step) || block.is_skipped(row_index) ||
        c.gradient_scale(block.segment, row_index) == 0) { // zeros stay zeros, also if grad_output is infinite
      continue;
    }
    const A factor = static_cast<A>(block.pass.grad_output.load(row_index));
    G* const row = static_cast<G*>(block.segment.gradient.data) + row_index * block.segment.gradient.stride;
    const Windows<G> windows(row, width);
    for (int32_t window = own.group.rank; window < windows.count; window += at_once * own.group.size) {
      A values[at_once][size];
#pragma unroll
      for (int c = 0; c < at_once; ++c) { // all loads are issued before the first is waited for
        read_elements<size>(row, width, windows.first(window + c * own.group.size), A(0), values[c]);
      }
#pragma unroll
      for (int c = 0; c < at_once; ++c) {
#pragma unroll
        for (int k = 0; k < size; ++k) {
          values[c][k] *= factor;
        }
        write_elements<size>(row, width, windows.first(window + c * own.group.size), values[c]);
      }
    }
  }
}

// Rows of existing gradients of type G, which are multiplied by grad_output.
template <class G>
struct MultipliedRows {
  static constexpr int kBlocks = 4;
  static constexpr int kSharedBytes = 0;
  static constexpr bool kHasHalves = false;

  GRADSCALE_DEVICE static int32_t rows_per_block(const BlockOfRows& block) {
    return kRowThreads / block.span.threads_per_row;
  }
  GRADSCALE_DEVICE static void run(const BlockOfRows& block) {
    const int64_t rows = rows_per_block(block), first = block.index * rows, left = block.pass.batch - first;
    multiply_rows<G>(block, first, left < rows ? left : rows);
  }
};

// ---- The kernel -----------------------------------------------------------------------------------------------------

template <class Rows>
GRADSCALE_DEVICE void run_or_multiply(const BlockOfRows& block) {
  if constexpr (Rows::kHasHalves) {
    if (block.multiplies_halves()) {
      const int64_t rows = Rows::rows_per_block(block);
      const int64_t first = block.index * rows;
      const int64_t left = block.pass.batch - first;
      multiply_rows<BFloat16Bits>(block, first, left < rows ? left : rows);
      return;
    }
  }
  Rows::run(block);
}

// Runs a block with the kind of rows that has this index among the template arguments.
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

// The span that contains a block. A call has few spans, usually one for each head.
GRADSCALE_DEVICE const Span& block_span(const Span* spans, int64_t count, int32_t block) {
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
  const Span& span = block_span(reinterpret_cast<const Span*>(table + device.spans), device.num_spans, index);
  const int32_t place = index - span.first_block;
  const int32_t step = place / span.blocks_per_segment;
  const BlockOfRows block{
      pass,
      device.rows_per_warp,
      table,
      span,
      reinterpret_cast<const Head*>(table + device.heads)[span.head],
      reinterpret_cast<const Coefficients*>(table + device.coefficients)[span.head],
      reinterpret_cast<const Segment*>(table + device.segments)[span.first_segment + step],
      place - step * span.blocks_per_segment,
      reinterpret_cast<char*>(shared)};
  run_rows<Rows...>(span.row_kind, block);
}

} // namespace gradscale
