// Rows of any kind, type and width on a device, for which lane_rows.cuh has no kernel.
//
// A group of threads has a row: threads_for_row() of them, so that short rows share a warp and long ones take a block.
#pragma once

#include "../kinds.h"
#include "block_rows.cuh"
#include "kl_rows.cuh"
#include "quantile_rows.cuh"
#include "regression_rows.cuh"

namespace gradscale {

// T is the type of predictions.
template <Kind kind, class T, int options>
struct GroupRows {
  static constexpr int kBlocks = 2;
  static constexpr int kSharedBytes = 0;
  static constexpr bool kHasHalves = std::is_same_v<T, BFloat16Bits>;

  GRADSCALE_DEVICE static int32_t rows_of_block(const BlockOfRows& block) {
    return kRowThreads / block.span.threads_per_row;
  }
  GRADSCALE_DEVICE static void run(const BlockOfRows& block) {
    GRADSCALE_SHARED(double, shared, kWarps);
    using A = typename AccumulateType<T>::type;
    const RowOfThread own(block.index, block.span.threads_per_row, block.pass.batch, shared);
    const RowFactor factor = block.factor_of(own.row);
    const int32_t width = own.active ? static_cast<int32_t>(block.segment.width) : 0;
    const RowTask task{block, own.group, own.row, width, own.active, factor.counts, factor.coefficient};
    rows_of_kind<kind, A>(
        block.head,
        [&](auto encode) {
          const auto target = encode(block.template target<double>(own.row));
          logits_row<T, options>(task, BinsOfRow<A, decltype(target)>{target});
        },
        [&] { logits_row<T, options>(task, ActionsOfRow<A>{block.segment.target, own.row, width}); },
        [&](auto of) { vector_row<typename decltype(of)::Head, T, A>(task); },
        [&](auto of) { scalar_row<typename decltype(of)::Head, T, A>(task); },
        [&](auto of) { own_row<T>(typename decltype(of)::Head(block.head, block.segment), task); });
  }
};

// Multiplies the gradients of rows first .. first + count by grad_output: each is read once and written once.
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
        c.gradient_scale(block.segment, row_index) == 0) { // zeros stay zeros, also times infinity
      continue;
    }
    const A factor = static_cast<A>(block.pass.grad_output.load(row_index));
    G* const row = static_cast<G*>(block.segment.gradient.data) + row_index * block.segment.gradient.stride;
    const Windows<G> windows(row, width);
    for (int32_t window = own.group.rank; window < windows.count; window += at_once * own.group.size) {
      A values[at_once][size];
#pragma unroll
      for (int c = 0; c < at_once; ++c) { // all are asked for before the first is waited for
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

// Rows of gradients of type G that are there, and are multiplied.
template <class G>
struct MultipliedRows {
  static constexpr int kBlocks = 4;
  static constexpr int kSharedBytes = 0;
  static constexpr bool kHasHalves = false;

  GRADSCALE_DEVICE static int32_t rows_of_block(const BlockOfRows& block) {
    return kRowThreads / block.span.threads_per_row;
  }
  GRADSCALE_DEVICE static void run(const BlockOfRows& block) {
    const int64_t rows = rows_of_block(block), first = block.index * rows, left = block.pass.batch - first;
    multiply_rows<G>(block, first, left < rows ? left : rows);
  }
};

} // namespace gradscale
