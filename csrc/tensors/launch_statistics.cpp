#include "range_table_builder.h"

namespace gradscale {

namespace {

RangeTableBuilder table_of(const StatisticsCall& call) {
  return RangeTableBuilder(call.ranges, call.out.count, kChunkOfStatistics);
}

const Kernel<StatisticsArguments>& kernel_of_order(double p) {
  constexpr const char* file = "tensors/statistics.cuh";
  static const Kernel<StatisticsArguments> any(file, "chunk_statistics<Order::any>");
  static const Kernel<StatisticsArguments> square(file, "chunk_statistics<Order::square>");
  static const Kernel<StatisticsArguments> sum(file, "chunk_statistics<Order::sum>");
  static const Kernel<StatisticsArguments> maximum(file, "chunk_statistics<Order::maximum>");
  return p == 2 ? square : (p == 1 ? sum : (std::isinf(p) ? maximum : any));
}

} // namespace

// The workspace has the statistics of the chunks, and behind them the table.
int64_t bytes_for_statistics(const StatisticsCall& call) {
  const RangeTableBuilder table = table_of(call);
  return table.blocks() * static_cast<int64_t>(sizeof(ChunkStatistics)) + table.bytes();
}

void launch_statistics(const StatisticsCall& call, void* stream) {
  static const Kernel<StatisticsArguments> tensor_statistics("tensors/statistics.cuh", "tensor_statistics");
  static_assert(sizeof(ChunkStatistics) % 8 == 0);
  const RangeTableBuilder builder = table_of(call);
  auto* chunks = reinterpret_cast<ChunkStatistics*>(call.workspace);
  const RangeTable table = builder.build(reinterpret_cast<char*>(chunks + builder.blocks()), stream);
  const StatisticsArguments arguments{table, chunks, call.p, call.out};
  launch(kernel_of_order(call.p), builder.blocks(), kThreads, stream, arguments);
  launch(tensor_statistics, call.out.count, kThreads, stream, arguments);
}

} // namespace gradscale
