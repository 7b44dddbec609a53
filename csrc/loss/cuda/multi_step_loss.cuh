// The kernel of the multi-step loss: one launch for the rows of all heads and steps. Logits and targets are read once,
// gradients written once: bytes = logits + targets + gradients. It is compiled for the kinds of rows of a call, so that
// types and widths are known, and for a table inside or outside of the arguments. A block has rows of one segment,
// which it finds from its index; the kind of rows determines how its threads share the rows.
#pragma once

#include "../kinds.h"
#include "divergence_rows.cuh"
#include "lane_losses.cuh"
#include "own_rows.cuh"
#include "policy_rows.cuh"
#include "thread_group_rows.cuh"
#include "wide_rows.cuh"

namespace gradscale {

// ---- Rows of any kind -----------------------------------------------------------------------------------------------

// Rows of any kind, type and width on a device, for which lane_rows.cuh, wide_rows.cuh and divergence_rows.cuh have no
// kernel.
//
// A group of threads_for_row() threads owns a row, so that short rows share a warp and long ones take a block.

// T is the type of predictions.
template <Kind kind, class T, int options>
struct ThreadGroupRows {
  static constexpr int kBlocks = 4;
  static constexpr int kSharedBytes = 0;

  GRADSCALE_DEVICE static void run(const BlockOfRows& block) {
    GRADSCALE_SHARED(double, shared, kWarps);
    using A = Accumulate<T>;
    const RowTask task(block, shared);
    kind_rows<kind, A>(
        block.head,
        [&](auto encode) {
          const auto target = encode(block.segment.target.load(task.row));
          logits_row<T, options>(task, BinsOfRow<A, decltype(target)>{target});
        },
        [&] {
          const Rows& probabilities = block.fields[block.segment.first_field + kSecondField];
          if (probabilities.data != nullptr) {
            logits_row<T, options>(task, ClassesOfRow<A>(task, probabilities));
          } else {
            logits_row<T, options>(task, ActionsOfRow<A>{task.target, task.width});
          }
        },
        [&](auto type) { vector_row<typename decltype(type)::Head, T, A>(task); },
        [&](auto type) { scalar_row<typename decltype(type)::Head, T, A>(task); },
        [&](auto type) { own_row<T, options>(type, task); },
        [&](auto type) { scored_row<T>(type, task); });
  }
};

// ---- The kernel -----------------------------------------------------------------------------------------------------

// Runs a block with the kind of rows that has this index among the template arguments.
template <class First, class... Rest>
GRADSCALE_DEVICE void run_rows(int32_t index, const BlockOfRows& block) {
  if constexpr (sizeof...(Rest) == 0) {
    First::run(block);
  } else if (index == 0) {
    First::run(block);
  } else {
    run_rows<Rest...>(index - 1, block);
  }
}

// The row range that contains a block. A call has few row ranges, usually one for each head.
GRADSCALE_DEVICE const RowRange& block_row_range(const RowRange* row_ranges, int64_t count, int32_t block) {
  int64_t row_range = 0;
  while (row_range + 1 < count && row_ranges[row_range + 1].first_block <= block) {
    ++row_range;
  }
  return row_ranges[row_range];
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
  GRADSCALE_SHARED(uint4, shared, most_shared_bytes<Rows...>() / 16 + 1);
  const Pass& pass = device.pass;
  if (pass.is_backward && pass.has_gradients && pass.grad_output.stride == 0 && pass.grad_output.load(0) == 1) {
    return;
  }
  if (!pass.is_backward && blockIdx.x == 0 && threadIdx.x == 0) {
    *device.blocks_done = 0;
  }
  const char* const table = device.table.template begin<inside>();
  const auto blocks = static_cast<int32_t>(device.num_blocks);
#pragma unroll 1
  for (auto index = static_cast<int32_t>(blockIdx.x); index < blocks; index += static_cast<int32_t>(gridDim.x)) {
    int32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread)); // what depends on it is not kept for the next block
    const RowRange& row_range =
        block_row_range(reinterpret_cast<const RowRange*>(table + device.row_ranges), device.num_row_ranges, index);
    const int32_t place = index - row_range.first_block;
    // The compiler does not know that numbers of the table are uniform. If it does, it needs fewer registers.
    const int32_t step = place / row_range.blocks_per_segment, head = uniform(row_range.head);
    const BlockOfRows block{
        pass,
        device.rows_per_warp,
        table,
        row_range,
        reinterpret_cast<const Head*>(table + device.heads)[head],
        reinterpret_cast<const Coefficients*>(table + device.coefficients)[head],
        reinterpret_cast<const Segment*>(table + device.segments)[uniform(row_range.first_segment + step)],
        reinterpret_cast<const gradscale::Rows*>(table + device.fields),
        place - step * row_range.blocks_per_segment,
        thread,
        reinterpret_cast<char*>(shared)};
    const bool computes = !pass.is_backward || block.segment.wants_gradient();
    const int32_t row_kind = uniform(computes ? row_range.row_kind : -1);
    if (row_kind >= 0) {
      run_rows<Rows...>(row_kind, block);
    }
    __syncthreads(); // all warps have read what is in shared memory
  }
}

} // namespace gradscale
