// Launches the kernels that process many tensors.
#include "../cuda/table_builder.h"
#include "calls.h"

#include <algorithm>
#include <cmath>

namespace gradscale {

namespace {

// Assigns consecutive blocks to each range, in the order of the ranges.
template <class Range>
class BlockTableBuilder {
 public:
  template <class BlocksOf>
  BlockTableBuilder(const Range* ranges, int64_t count, BlocksOf blocks_of) {
    for (int64_t i = 0; i < count; ++i) {
      entries_.push_back({ranges[i], blocks_});
      blocks_ += blocks_of(ranges[i]);
    }
  }

  int64_t blocks() const {
    return blocks_;
  }
  int64_t bytes() const {
    return static_cast<int64_t>(entries_.size() * sizeof(entries_[0]));
  }
  // Builds the table. `device_memory` has bytes() bytes at a multiple of 8, for a table that does not fit in a kernel's
  // arguments.
  BlockTable<Range> build(char* device_memory, Stream stream) const {
    TableBuilder builder;
    builder.add(entries_.data(), static_cast<int64_t>(entries_.size()));
    return {builder.build(device_memory, stream), static_cast<int64_t>(entries_.size())};
  }

 private:
  int64_t blocks_ = 0;
  std::vector<typename BlockTable<Range>::Entry> entries_;
};

// Assigns one block to each chunk of `chunk_bytes` bytes.
BlockTableBuilder<DeviceRange> table_of(const DeviceRange* ranges, int64_t count, int64_t chunk_bytes) {
  return {ranges, count, [=](const DeviceRange& range) { return range_blocks(range, chunk_bytes); }};
}

// Assigns one warp to each piece of a unit.
BlockTableBuilder<UnitRange> table_of(const UnitRange* ranges, int64_t count) {
  return {ranges, count, [](const UnitRange& range) {
            return (range.count * pieces_per_unit(range) + kPiecesOfBlock - 1) / kPiecesOfBlock;
          }};
}

} // namespace

// ---- Squares --------------------------------------------------------------------------------------------------------

namespace {

constexpr const char* kSquaresFile = "statistics/l2_loss.cuh";

auto table_of(const SquaresCall& call) {
  return table_of(call.ranges, call.count, kChunkOfTensor);
}

} // namespace

// The workspace has the sums of the chunks, followed by the table.
int64_t bytes_for_squares(const SquaresCall& call) {
  const auto table = table_of(call);
  return table.blocks() * static_cast<int64_t>(sizeof(double)) + table.bytes();
}

void launch_squares(const SquaresCall& call, void* stream) {
  static const Kernel<SumsOfSquares> sums_of_squares(kSquaresFile, "sums_of_squares");
  static const Kernel<SquaresTotal> squares_total(kSquaresFile, "squares_total");
  const auto builder = table_of(call);
  auto* sums = reinterpret_cast<double*>(call.workspace);
  if (builder.blocks() > 0) {
    const SumsOfSquares arguments{builder.build(reinterpret_cast<char*>(sums + builder.blocks()), stream), sums};
    launch(sums_of_squares, builder.blocks(), kThreads, stream, arguments);
  }
  launch(squares_total, 1, kThreads, stream, {sums, builder.blocks(), call.factor, call.loss});
}

void launch_squares_backward(const SquaresCall& call, void* stream) {
  static const Kernel<ScaledTensors> scaled_tensors(kSquaresFile, "scaled_tensors");
  const auto builder = table_of(call);
  if (builder.blocks() > 0) {
    const ScaledTensors arguments{builder.build(call.workspace, stream), call.factor, call.grad_output};
    launch(scaled_tensors, builder.blocks(), kThreads, stream, arguments);
  }
}

// ---- Statistics -----------------------------------------------------------------------------------------------------

namespace {

auto table_of(const StatisticsCall& call) {
  return table_of(call.ranges, call.out.count, kChunkOfStatistics);
}

const Kernel<StatisticsArguments>& kernel_for_order(double p) {
  constexpr const char* file = "statistics/statistics.cuh";
  static const Kernel<StatisticsArguments> any(file, "chunk_statistics<Order::any>");
  static const Kernel<StatisticsArguments> square(file, "chunk_statistics<Order::square>");
  static const Kernel<StatisticsArguments> sum(file, "chunk_statistics<Order::sum>");
  static const Kernel<StatisticsArguments> maximum(file, "chunk_statistics<Order::maximum>");
  return p == 2 ? square : (p == 1 ? sum : (std::isinf(p) ? maximum : any));
}

} // namespace

// The workspace has the statistics of the chunks, followed by the table.
int64_t bytes_for_statistics(const StatisticsCall& call) {
  const auto table = table_of(call);
  return table.blocks() * static_cast<int64_t>(sizeof(ChunkStatistics)) + table.bytes();
}

void launch_statistics(const StatisticsCall& call, void* stream) {
  static const Kernel<StatisticsArguments> tensor_statistics("statistics/statistics.cuh", "tensor_statistics");
  static_assert(sizeof(ChunkStatistics) % 8 == 0);
  const auto builder = table_of(call);
  auto* chunks = reinterpret_cast<ChunkStatistics*>(call.workspace);
  const RangeTable table = builder.build(reinterpret_cast<char*>(chunks + builder.blocks()), stream);
  const StatisticsArguments arguments{table, chunks, call.p, call.out};
  launch(kernel_for_order(call.p), builder.blocks(), kThreads, stream, arguments);
  launch(tensor_statistics, call.out.count, kThreads, stream, arguments);
}

// ---- Clipping, and the norms of units -------------------------------------------------------------------------------

namespace {

constexpr const char* kClippingFile = "statistics/clip_gradients.cuh";

// True if any unit has several pieces.
bool has_pieces(const UnitNormsCall& call) {
  return std::any_of(
      call.ranges, call.ranges + call.count, [](const UnitRange& range) { return pieces_per_unit(range) > 1; });
}

int64_t sum_bytes(const UnitNormsCall& call, int64_t blocks) {
  return has_pieces(call) ? blocks * kPiecesOfBlock * static_cast<int64_t>(sizeof(PowerSum)) : 0;
}

} // namespace

// The workspace has the sums of the pieces, followed by the table.
int64_t bytes_for_unit_norms(const UnitNormsCall& call) {
  const auto builder = table_of(call.ranges, call.count);
  return sum_bytes(call, builder.blocks()) + builder.bytes();
}

void launch_unit_norms(const UnitNormsCall& call, void* stream) {
  static const Kernel<UnitNormsArguments> unit_sums(kClippingFile, "unit_sums");
  static const Kernel<UnitNormsArguments> unit_norms(kClippingFile, "unit_norms");
  const auto builder = table_of(call.ranges, call.count);
  if (builder.blocks() > 0) {
    const UnitTable table = builder.build(call.workspace + sum_bytes(call, builder.blocks()), stream);
    const UnitNormsArguments arguments{table, reinterpret_cast<PowerSum*>(call.workspace), call.norms};
    launch(unit_sums, builder.blocks(), kThreads, stream, arguments);
    if (has_pieces(call)) {
      launch(unit_norms, builder.blocks(), kThreads, stream, arguments);
    }
  }
}

void launch_clipping(const ClippingCall& call, void* stream) {
  static const Kernel<ClippingCall> find_clipping(kClippingFile, "find_clipping");
  launch(find_clipping, 1, kThreads, stream, call);
}

int64_t bytes_for_clip_units(const ClipUnitsCall& call) {
  return table_of(call.ranges, call.count).bytes();
}

void launch_clip_units(const ClipUnitsCall& call, void* stream) {
  static const Kernel<ClippedUnits> clipped_units(kClippingFile, "clipped_units");
  const auto builder = table_of(call.ranges, call.count);
  if (builder.blocks() > 0) {
    const ClippedUnits arguments{builder.build(call.workspace, stream), call.factors, call.zeros};
    launch(clipped_units, builder.blocks(), kThreads, stream, arguments);
  }
}

} // namespace gradscale
