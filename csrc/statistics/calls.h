// Passes over many tensors: their arguments on a CPU and on a device, as plain numbers and pointers.
#pragma once

#include "../cpu/range.h"
#include "../cuda/table.h"
#include "../formulas/element.h"
#include "../formulas/statistics.h"

namespace gradscale {

// The elements of a tensor.
struct TensorRange : Range {
  int64_t implicit_zeros = 0; // for statistics: zeros that a sparse tensor does not store; -1 if there is no tensor
};

// ---- On a CPU: a range of elements at a time ------------------------------------------------------------------------

// Computes the statistics of at most 2^31 - 1 real numbers. Meanwhile prefetches `next`: memory of the same size
// that the caller reads next, or the range itself.
using StatisticsOfRange = void (*)(const Range&, double p, const void* next, ChunkStatistics& out);
extern const StatisticsOfRange statistics_kernel;

// Squared norms of the real numbers `before`, and of their update, `after` - `before`. Sums of squares of double may
// overflow.
struct UpdateSquares {
  double before;
  double update;
};

using UpdateOfRange = UpdateSquares (*)(const Range& before, const void* after);
extern const UpdateOfRange update_kernel;

// ---- On a device ----------------------------------------------------------------------------------------------------

// out = (total norm, factor, 1 if the factor is not 1, else 0), from statistics.
struct ClippingCall {
  const double* values;
  const int64_t* counts;
  int64_t count;
  double p;
  double max_norm;
  const double* max_norm_on_device; // or null: max_norm
  bool skip_nonfinite;
  double* out;
};

GRADSCALE_HOST_DEVICE double max_norm_of(const ClippingCall& call) {
  return call.max_norm_on_device == nullptr ? call.max_norm : *call.max_norm_on_device;
}

// A contiguous tensor of `count` units of `length` numbers each. A unit is a row or the whole tensor.
struct UnitRange {
  const void* data;
  void* out; // the result, of the same type; may be `data`
  int64_t count;
  int64_t length; // at least 1
  Element element;
  int64_t first; // the index of the first unit among the norms or factors of all units
};

// ---- The arguments of kernels ---------------------------------------------------------------------------------------

constexpr int64_t kChunkOfTensor = 65536; // bytes

// The number of elements in a chunk of `bytes` bytes.
GRADSCALE_HOST_DEVICE int64_t elements_per_chunk(const TensorRange& range, int64_t bytes) {
  return range.element == Element::float64 ? bytes / 8 : (range.element == Element::float32 ? bytes / 4 : bytes / 2);
}

// The number of blocks of a range, one for each chunk of `bytes` bytes.
GRADSCALE_HOST_DEVICE int64_t range_blocks(const TensorRange& range, int64_t bytes) {
  const int64_t chunk = elements_per_chunk(range, bytes);
  return (range.size + chunk - 1) / chunk;
}

// The ranges of a launch. Each range has as many consecutive blocks as it needs.
template <class Range>
struct BlockTable {
  struct Entry {
    Range range;
    int64_t first_block;
  };

  Table table;
  int64_t count;

  // The entry that owns a block. Empty ranges own no blocks: the last of the ranges that begin at a block owns it.
  GRADSCALE_HOST_DEVICE const Entry& entry_for_block(int64_t block) const {
    const auto* entries = table.at<Entry>(0);
    int64_t low = 0;
    int64_t high = count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (entries[middle].first_block <= block ? low : high) = middle;
    }
    return entries[low];
  }
  GRADSCALE_HOST_DEVICE const Entry& operator[](int64_t index) const {
    return table.at<Entry>(0)[index];
  }
};

using RangeTable = BlockTable<TensorRange>;
using UnitTable = BlockTable<UnitRange>;

// The chunk that a block works on.
struct ChunkOfTensor {
  const RangeTable::Entry& entry;
  int64_t begin;
  int32_t size;
};

// The chunk of a block. `bytes` is the size of a full chunk.
GRADSCALE_HOST_DEVICE ChunkOfTensor chunk_of_block(const RangeTable& table, int64_t block, int64_t bytes) {
  const RangeTable::Entry& entry = table.entry_for_block(block);
  const int64_t chunk = elements_per_chunk(entry.range, bytes);
  const int64_t begin = (block - entry.first_block) * chunk;
  const int64_t rest = entry.range.size - begin;
  return {entry, begin, static_cast<int32_t>(rest < chunk ? rest : chunk)};
}

// loss = factor * the sum of squares.
struct Squares {
  RangeTable table;
  double* sums;  // of the chunks
  int64_t count; // of chunks
  double factor;
  Slab loss;
};

constexpr int64_t kChunkOfStatistics = 1024 * kThreads; // bytes

struct StatisticsArguments {
  RangeTable table;
  ChunkStatistics* chunks;
  double p;
  StatisticsOut out;
};

// ---- Units ----------------------------------------------------------------------------------------------------------

constexpr int64_t kPieceOfUnit = 4096; // numbers; a warp computes one piece
constexpr int64_t kPiecesOfBlock = kThreads / 32;

GRADSCALE_HOST_DEVICE int64_t pieces_per_unit(const UnitRange& range) {
  return (range.length + kPieceOfUnit - 1) / kPieceOfUnit;
}

struct UnitNormsArguments {
  UnitTable table;
  PowerSum* sums; // of the pieces
  double* norms;
};

struct ScaledUnits {
  UnitTable table;
  Slab factors;
  double times; // of each factor
  bool zeros;   // a factor of 0 sets all elements to 0, even NaN and inf
};

} // namespace gradscale
