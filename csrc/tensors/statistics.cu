#include "statistics.cuh"

#include "range_table.h"

namespace gradscale {

namespace {

RangeTableBuilder table_of(const StatisticsCall& call) {
  return RangeTableBuilder(call.ranges, call.out.count, kChunkOfStatistics);
}

} // namespace

// The workspace has the statistics of the chunks, and behind them the table.
int64_t bytes_for_statistics(const StatisticsCall& call) {
  const RangeTableBuilder table = table_of(call);
  return table.blocks() * static_cast<int64_t>(sizeof(ChunkStatistics)) + table.bytes();
}

void launch_statistics(const StatisticsCall& call, void* stream_) {
  static_assert(sizeof(ChunkStatistics) % 8 == 0);
  const auto stream = static_cast<Stream>(stream_);
  const RangeTableBuilder builder = table_of(call);
  auto* chunks = reinterpret_cast<ChunkStatistics*>(call.workspace);
  const RangeTable table = builder.build(reinterpret_cast<char*>(chunks + builder.blocks()), stream);
  launch("chunk_statistics", chunk_statistics, builder.blocks(), kThreads, stream, table, call.p, chunks);
  launch("tensor_statistics", tensor_statistics, call.out.count, kThreads, stream, table, chunks, call.p, call.out);
}

} // namespace gradscale
