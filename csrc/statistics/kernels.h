// Passes over many tensors: their arguments on a CPU and on a device, as plain numbers and pointers.
#pragma once

#include "../cpu/range.h"
#include "../cuda/threads.h"
#include "../formulas/element.h"
#include "../formulas/statistics.h"

namespace gradscale {

// The elements of a tensor.
struct TensorRange : Range {
  int64_t implicit_zeros = 0; // for statistics: zeros that a sparse tensor does not store; -1 if there is no tensor
};

// ---- On a CPU: a range of elements at a time ------------------------------------------------------------------------

constexpr int64_t kChunk = 16320; // elements: 64 KB of float

// Computes the statistics of at most kChunk real numbers. Meanwhile prefetches `next`: memory of the same size that the
// caller reads next, or the range itself.
using StatisticsOfRange = void (*)(const Range&, double p, const void* next, ChunkStatistics& out);
extern const StatisticsOfRange statistics_kernel;

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

// ---- Lists of ranges ------------------------------------------------------------------------------------------------

// The ranges of a launch. They are a part of the kernel's argument, of which the driver, or the CUDA graph that is
// being captured, keeps its own copy: no memory on the device has to be filled before the launch, or kept for a graph.
// A list that is too long is divided among launches; a list of few ranges has a smaller type, because an argument is
// copied whole.
//
// First come the `singles`, each of which one warp processes; kWarps of them share a block. Each of the other ranges
// owns as many consecutive blocks as it needs.
template <class AnyRange, int bytes>
struct RangeList {
  using Range = AnyRange;
  static constexpr int kBytes = bytes;
  static constexpr int kCapacity = bytes / static_cast<int>(sizeof(Range));

  int32_t count;
  int32_t singles;
  Range ranges[kCapacity];

  GRADSCALE_HOST_DEVICE int64_t blocks_of_singles() const {
    return (singles + kWarps - 1) / kWarps;
  }
  // The range that owns a block after the blocks of the singles.
  GRADSCALE_HOST_DEVICE const Range& range_for_block(int64_t block) const {
    int32_t low = singles;
    int32_t high = count;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (ranges[middle].first_block <= block ? low : high) = middle;
    }
    return ranges[low];
  }
};

constexpr int kFewRanges = 8000;   // bytes
constexpr int kManyRanges = 32000; // the arguments of a kernel are at most 32764 bytes

// ---- Tensors --------------------------------------------------------------------------------------------------------

// A tensor in a list. 32 bytes, so that a launch has up to 1000 of them.
struct ListedTensor {
  static constexpr const char* kName = "ListedTensor";

  const void* data;
  int64_t size;
  int64_t implicit_zeros; // as in TensorRange
  int32_t first_block;
  Element element : 8;
  uint32_t index : 24; // among all tensors of the call
};

constexpr int64_t kSingleTensor = 16384; // bytes of the largest tensor that one warp processes: 16 loads of each lane
constexpr int64_t kMostTensors = 1 << 24;

// The number of elements in a chunk of `bytes` bytes.
GRADSCALE_HOST_DEVICE int64_t elements_per_chunk(const ListedTensor& tensor, int64_t bytes) {
  return tensor.element == Element::float64 ? bytes / 8 : (tensor.element == Element::float32 ? bytes / 4 : bytes / 2);
}

// The number of blocks of a tensor, one for each chunk of `bytes` bytes.
GRADSCALE_HOST_DEVICE int64_t tensor_blocks(const ListedTensor& tensor, int64_t bytes) {
  const int64_t chunk = elements_per_chunk(tensor, bytes);
  return (tensor.size + chunk - 1) / chunk;
}

constexpr int64_t kChunkOfSquares = 65536; // bytes

// The squares of a list of tensors: a sum for each single, then one for each chunk of the others.
template <class List>
struct SquaresArguments {
  List list;
  double* sums;
};

// loss = factor * the sum of all squares.
struct SquaresTotal {
  const double* sums;
  int64_t count;
  double factor;
  Slab loss;
};

constexpr int64_t kChunkOfStatistics = 1024 * kThreads; // bytes

template <class List>
struct StatisticsArguments {
  List list;
  ChunkStatistics* chunks; // of the tensors that have several, in the order of their blocks
  double p;
  StatisticsOut out;
};

// ---- Units ----------------------------------------------------------------------------------------------------------

// A contiguous tensor of `count` units of `length` numbers each. A unit is a row or the whole tensor.
struct UnitRange {
  static constexpr const char* kName = "UnitRange";

  const void* data;
  void* out; // the result, of the same type; may be `data`
  int64_t count;
  int64_t length; // at least 1
  int64_t first;  // the index of the first unit among the norms or factors of all units
  Element element;
  int32_t first_block;
};

// A contiguous tensor that is one unit; its norm or factor is the first one. A launch has up to 1000 of them.
struct WholeRange {
  static constexpr const char* kName = "WholeRange";
  static constexpr int64_t count = 1;
  static constexpr int64_t first = 0;

  const void* data;
  void* out;
  int64_t length;
  Element element;
  int32_t first_block;
};

constexpr int64_t kPieceOfUnit = 4096; // numbers; a warp computes one piece

template <class AnyUnits>
GRADSCALE_HOST_DEVICE int64_t pieces_per_unit(const AnyUnits& range) {
  return (range.length + kPieceOfUnit - 1) / kPieceOfUnit;
}

template <class List>
struct UnitNormsArguments {
  List list;
  PowerSum* sums; // of the pieces
  double* norms;
};

template <class List>
struct ScaledUnits {
  List list;
  Slab factors;
  double times; // of each factor
  bool zeros;   // a factor of 0 sets all elements to 0, even NaN and inf
};

} // namespace gradscale
