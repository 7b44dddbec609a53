// Launches the kernels that process many tensors.
#include "../cuda/table_builder.h"
#include "tensors.h"

#include <algorithm>
#include <cmath>

namespace gradscale {

namespace {

// The blocks of a launch over ranges, in the order of the ranges, and their table on a device.
template <class Range>
class Blocks {
 public:
  template <class BlocksOf>
  Blocks(const std::vector<Range>& ranges, const OnDevice& device, BlocksOf blocks_of) {
    std::vector<typename BlockTable<Range>::Entry> entries;
    for (const Range& range : ranges) {
      entries.push_back({range, count});
      count += blocks_of(range);
    }
    const auto size = static_cast<int64_t>(entries.size());
    builder_.add(entries.data(), size);
    table = {builder_.build(device), size};
  }

  int64_t count = 0;
  BlockTable<Range> table;

 private:
  TableBuilder builder_; // owns the memory of the table
};

// One block for each chunk of `chunk_bytes` bytes.
Blocks<DeviceRange> blocks_of_chunks(
    const std::vector<DeviceRange>& ranges, const OnDevice& device, int64_t chunk_bytes) {
  return {ranges, device, [=](const DeviceRange& range) { return range_blocks(range, chunk_bytes); }};
}

// One warp for each piece of a unit.
Blocks<UnitRange> blocks_of_pieces(const std::vector<UnitRange>& ranges, const OnDevice& device) {
  return {ranges, device, [](const UnitRange& range) {
            return (range.count * pieces_per_unit(range) + kPiecesOfBlock - 1) / kPiecesOfBlock;
          }};
}

constexpr const char* kSquaresFile = "statistics/l2_loss.cuh";
constexpr const char* kStatisticsFile = "statistics/statistics.cuh";
constexpr const char* kClippingFile = "statistics/clip_gradients.cuh";

} // namespace

// ---- Squares --------------------------------------------------------------------------------------------------------

void launch_squares(const std::vector<DeviceRange>& ranges, double factor, const Slab& loss, const OnDevice& device) {
  const auto blocks = blocks_of_chunks(ranges, device, kChunkOfTensor);
  const at::Tensor memory = device.memory(blocks.count * static_cast<int64_t>(sizeof(double)));
  auto* sums = static_cast<double*>(memory.mutable_data_ptr());
  device.launch(kSquaresFile, "sums_of_squares", blocks.count, kThreads, SumsOfSquares{blocks.table, sums});
  device.launch(kSquaresFile, "squares_total", 1, kThreads, SquaresTotal{sums, blocks.count, factor, loss});
}

// ---- Statistics -----------------------------------------------------------------------------------------------------

void launch_statistics(
    const std::vector<DeviceRange>& ranges, double p, const StatisticsOut& out, const OnDevice& device) {
  const auto blocks = blocks_of_chunks(ranges, device, kChunkOfStatistics);
  const at::Tensor memory = device.memory(blocks.count * static_cast<int64_t>(sizeof(ChunkStatistics)));
  const StatisticsArguments arguments{blocks.table, static_cast<ChunkStatistics*>(memory.mutable_data_ptr()), p, out};
  const std::string name = p == 2 || std::isinf(p) ? "chunk_statistics<true>" : "chunk_statistics<false>";
  device.launch(kStatisticsFile, name, blocks.count, kThreads, arguments);
  device.launch(kStatisticsFile, "tensor_statistics", out.count, kThreads, arguments);
}

// ---- Clipping, and the norms of units -------------------------------------------------------------------------------

void launch_unit_norms(const std::vector<UnitRange>& ranges, double* norms, const OnDevice& device) {
  const auto blocks = blocks_of_pieces(ranges, device);
  const at::Tensor memory = device.memory(blocks.count * kPiecesOfBlock * static_cast<int64_t>(sizeof(PowerSum)));
  const UnitNormsArguments arguments{blocks.table, static_cast<PowerSum*>(memory.mutable_data_ptr()), norms};
  device.launch(kClippingFile, "unit_sums", blocks.count, kThreads, arguments);
  const auto has_pieces = [](const UnitRange& range) { return pieces_per_unit(range) > 1; };
  if (std::any_of(ranges.begin(), ranges.end(), has_pieces)) {
    device.launch(kClippingFile, "unit_norms", blocks.count, kThreads, arguments);
  }
}

void launch_clipping(const ClippingCall& call, const OnDevice& device) {
  device.launch(kClippingFile, "find_clipping", 1, kThreads, call);
}

void launch_scaled_units(
    const std::vector<UnitRange>& ranges, const Slab& factors, double times, bool zeros, const OnDevice& device) {
  const auto blocks = blocks_of_pieces(ranges, device);
  const ScaledUnits arguments{blocks.table, factors, times, zeros};
  device.launch(kClippingFile, "scaled_units", blocks.count, kThreads, arguments);
}

} // namespace gradscale
