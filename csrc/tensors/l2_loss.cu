#include "l2_loss.cuh"

#include "../device_kernels.h"
#include "../port/table_builder.h"

namespace gradscale {

namespace {

// Blocks of a launch over these tensors; empty ones have none.
int64_t blocks_of(const SquaresCall& call) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    blocks += (call.ranges[i].size + kChunkOfTensor - 1) / kChunkOfTensor;
  }
  return blocks;
}

// The table is behind the sums of the chunks.
RangeTable build(const SquaresCall& call, Stream stream) {
  std::vector<RangeEntry> entries;
  int64_t block = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    if (call.ranges[i].size > 0) {
      entries.push_back({call.ranges[i], block});
      block += (call.ranges[i].size + kChunkOfTensor - 1) / kChunkOfTensor;
    }
  }
  TableBuilder builder;
  builder.add(entries.data(), static_cast<int64_t>(entries.size()));
  char* behind = call.workspace + block * static_cast<int64_t>(sizeof(double));
  return {builder.build(behind, stream), static_cast<int64_t>(entries.size())};
}

} // namespace

int64_t bytes_for_squares(const SquaresCall& call) {
  const auto sums = blocks_of(call) * static_cast<int64_t>(sizeof(double));
  return sums + call.count * static_cast<int64_t>(sizeof(RangeEntry));
}

void launch_squares(const SquaresCall& call, void* stream) {
  const int64_t blocks = blocks_of(call);
  auto* sums = reinterpret_cast<double*>(call.workspace);
  if (blocks > 0) {
    const RangeTable table = build(call, static_cast<Stream>(stream));
    launch("sums_of_squares", sums_of_squares, blocks, kThreads, static_cast<Stream>(stream), table, sums);
  }
  launch(
      "squares_total", squares_total, 1, kThreads, static_cast<Stream>(stream), sums, blocks, call.factor, call.loss);
}

void launch_squares_backward(const SquaresCall& call, void* stream) {
  const int64_t blocks = blocks_of(call);
  if (blocks > 0) {
    const RangeTable table = build(call, static_cast<Stream>(stream));
    launch(
        "scaled_tensors",
        scaled_tensors,
        blocks,
        kThreads,
        static_cast<Stream>(stream),
        table,
        call.factor,
        call.grad_output);
  }
}

} // namespace gradscale
