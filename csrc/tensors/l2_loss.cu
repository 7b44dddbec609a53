#include "l2_loss.cuh"

#include "range_table.h"

namespace gradscale {

namespace {

RangeTableBuilder table_of(const SquaresCall& call) {
  return RangeTableBuilder(call.ranges, call.count, kChunkOfTensor);
}

} // namespace

// The workspace has the sums of the chunks, and behind them the table.
int64_t bytes_for_squares(const SquaresCall& call) {
  const RangeTableBuilder table = table_of(call);
  return table.blocks() * static_cast<int64_t>(sizeof(double)) + table.bytes();
}

void launch_squares(const SquaresCall& call, void* stream_) {
  const auto stream = static_cast<Stream>(stream_);
  const RangeTableBuilder builder = table_of(call);
  auto* sums = reinterpret_cast<double*>(call.workspace);
  if (builder.blocks() > 0) {
    const RangeTable table = builder.build(reinterpret_cast<char*>(sums + builder.blocks()), stream);
    launch("sums_of_squares", sums_of_squares, builder.blocks(), kThreads, stream, table, sums);
  }
  launch("squares_total", squares_total, 1, kThreads, stream, sums, builder.blocks(), call.factor, call.loss);
}

void launch_squares_backward(const SquaresCall& call, void* stream_) {
  const auto stream = static_cast<Stream>(stream_);
  const RangeTableBuilder builder = table_of(call);
  if (builder.blocks() > 0) {
    const RangeTable table = builder.build(call.workspace, stream);
    launch("scaled_tensors", scaled_tensors, builder.blocks(), kThreads, stream, table, call.factor, call.grad_output);
  }
}

} // namespace gradscale
