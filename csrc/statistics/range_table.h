// The tensors of a launch that has one block for each chunk of each of them, and the arguments of such launches.
#pragma once

#include "../cuda/table.h"
#include "calls.h"

namespace gradscale {

constexpr int64_t kChunkOfTensor = 65536; // bytes

// The number of elements in chunks of so many bytes, and of the chunks that a range has.
GRADSCALE_HOST_DEVICE int64_t elements_of_chunk(const DeviceRange& range, int64_t bytes) {
  return range.element == Element::float64 ? bytes / 8 : (range.element == Element::float32 ? bytes / 4 : bytes / 2);
}

GRADSCALE_HOST_DEVICE int64_t blocks_of_range(const DeviceRange& range, int64_t bytes) {
  const int64_t chunk = elements_of_chunk(range, bytes);
  return (range.size + chunk - 1) / chunk;
}

struct RangeEntry {
  DeviceRange range;
  int64_t first_block;
};

struct RangeTable {
  Table table;
  int64_t count;

  GRADSCALE_HOST_DEVICE const RangeEntry& operator[](int64_t index) const {
    return table.at<RangeEntry>(0)[index];
  }
};

struct SumsOfSquares {
  RangeTable table;
  double* sums; // of the chunks
};

struct SquaresTotal {
  const double* sums;
  int64_t count;
  double factor;
  Slab loss;
};

struct ScaledTensors {
  RangeTable table;
  double factor;
  Slab grad_output;
};

struct ClippedTensors {
  RangeTable table;
  const double* factor;
  bool zeros; // a factor of 0 leaves zeros, whatever the elements were
};

constexpr int64_t kChunkOfStatistics = 1024 * kThreads; // bytes

// Orders of norms that have kernels of their own: 2, 1 and inf.
enum class Order { any, square, sum, maximum };

struct StatisticsArguments {
  RangeTable table;
  ChunkStatistics* chunks;
  double p;
  StatisticsOut out;
};

// ---- Units ----------------------------------------------------------------------------------------------------------

constexpr int64_t kPieceOfUnit = 4096; // numbers: a warp has a piece of a unit
constexpr int64_t kPiecesOfBlock = kThreads / 32;

GRADSCALE_HOST_DEVICE int64_t pieces_of_unit(const UnitRange& range) {
  return (range.length + kPieceOfUnit - 1) / kPieceOfUnit;
}

struct UnitEntry {
  UnitRange range;
  int64_t first_block;
};

struct UnitTable {
  Table table;
  int64_t count;

  GRADSCALE_HOST_DEVICE const UnitEntry& operator[](int64_t index) const {
    return table.at<UnitEntry>(0)[index];
  }
};

struct UnitNormsArguments {
  UnitTable table;
  PowerSum* sums; // of the pieces
  double* norms;
};

struct ClippedUnits {
  UnitTable table;
  const double* factors;
  bool zeros; // a factor of 0 leaves zeros, whatever the elements were
};

} // namespace gradscale
