#include "range_table_builder.h"

namespace gradscale {

namespace {

constexpr const char* kFile = "tensors/l2_loss.cuh";

RangeTableBuilder table_of(const SquaresCall& call) {
  return RangeTableBuilder(call.ranges, call.count, kChunkOfTensor);
}

} // namespace

// The workspace has the sums of the chunks, and behind them the table.
int64_t bytes_for_squares(const SquaresCall& call) {
  const RangeTableBuilder table = table_of(call);
  return table.blocks() * static_cast<int64_t>(sizeof(double)) + table.bytes();
}

void launch_squares(const SquaresCall& call, void* stream) {
  static const Kernel<SumsOfSquares> sums_of_squares(kFile, "sums_of_squares");
  static const Kernel<SquaresTotal> squares_total(kFile, "squares_total");
  const RangeTableBuilder builder = table_of(call);
  auto* sums = reinterpret_cast<double*>(call.workspace);
  if (builder.blocks() > 0) {
    const SumsOfSquares arguments{builder.build(reinterpret_cast<char*>(sums + builder.blocks()), stream), sums};
    launch(sums_of_squares, builder.blocks(), kThreads, stream, arguments);
  }
  launch(squares_total, 1, kThreads, stream, {sums, builder.blocks(), call.factor, call.loss});
}

void launch_squares_backward(const SquaresCall& call, void* stream) {
  static const Kernel<ScaledTensors> scaled_tensors(kFile, "scaled_tensors");
  const RangeTableBuilder builder = table_of(call);
  if (builder.blocks() > 0) {
    const ScaledTensors arguments{builder.build(call.workspace, stream), call.factor, call.grad_output};
    launch(scaled_tensors, builder.blocks(), kThreads, stream, arguments);
  }
}

} // namespace gradscale
