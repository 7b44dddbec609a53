// The kernels that clip gradients by their norms. A unit is a row or a whole tensor; a piece is 4096 numbers of a unit,
// which are 16 KB of float. One launch processes all units of all tensors.
//
// find_clipping   one block: the norm of all gradients together and the factor that clips them, from their statistics;
// unit_sums       one warp for each piece: elements are read once, 2 KB per warp at a time;
// unit_norms      if a unit has several pieces: one warp adds up their sums, 16 bytes for each piece;
// scaled_units    one warp for each piece: elements are read and written once, or not at all if the factor is 1 and the
//                 result replaces them. It also computes the gradient of l2_loss.
#pragma once

#include "lists.cuh"

namespace gradscale {

GRADSCALE_KERNEL(kThreads, 2) find_clipping(GRADSCALE_ARGUMENT(ClippingCall) call) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const ThreadGroup block = block_threads(shared);
  constexpr int kAtOnce = 4; // tensors of a thread whose loads are issued before the first is used
  double largest = 0;        // NaN if there is a NaN in any tensor, inf if there is an inf
  for (int64_t first = threadIdx.x; first < call.count; first += kAtOnce * kThreads) {
    double norms[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t i = first + k * kThreads < call.count ? first + k * kThreads : first;
      const int64_t nans = call.counts[2 * call.count + i], infs = call.counts[3 * call.count + i];
      norms[k] = call.values[i] + ((nans | infs) == 0 ? 0 : nans > 0 ? NAN : INFINITY);
    }
#pragma unroll
    for (const double norm : norms) {
      largest = larger_or_nan(norm, largest);
    }
  }
  largest = maximum_or_nan(largest, block);
  double powers = 0;
  if (largest > 0 && largest < static_cast<double>(INFINITY)) { // the same for all of the block
    for (int64_t i = threadIdx.x; i < call.count; i += kThreads) {
      powers += power_in_norm(call.values[i] / largest, call.p);
    }
    powers = block.sum(powers);
  }
  if (threadIdx.x == 0) {
    const double total = total_norm(largest, powers, call.p, /*nans=*/largest != largest ? 1 : 0, /*infs=*/0);
    store_clipping(total, max_norm_of(call), call.skip_nonfinite, call.out);
  }
}

// The piece that this warp works on. It does not exist for some warps of the last block of a range.
template <class Range>
struct PieceOfUnit {
  const Range& range;
  bool exists;
  int64_t unit;
  int64_t pieces; // of the unit
  int64_t piece;

  GRADSCALE_DEVICE int64_t begin() const {
    return unit * range.length + piece * kPieceOfUnit;
  }
  GRADSCALE_DEVICE int32_t size() const {
    const int64_t rest = range.length - piece * kPieceOfUnit;
    return static_cast<int32_t>(rest < kPieceOfUnit ? rest : kPieceOfUnit);
  }
};

template <class List>
GRADSCALE_DEVICE auto warp_piece(const List& list) {
  using Piece = PieceOfUnit<typename List::Range>;
  if (is_block_of_singles(list)) {
    const int64_t index = warp_index();
    return Piece{list.ranges[index], index < list.singles, 0, 1, 0};
  }
  const auto& range = list.range_for_block(blockIdx.x);
  const int64_t index = (static_cast<int32_t>(blockIdx.x) - range.first_block) * kWarps + threadIdx.x / 32;
  const int64_t pieces = pieces_per_unit(range);
  if (range.count == 1) { // without divisions
    return Piece{range, index < pieces, 0, pieces, index};
  }
  return Piece{range, index < pieces * range.count, index / pieces, pieces, index % pieces};
}

template <class List, class Range>
GRADSCALE_DEVICE void store_norm(
    const UnitNormsArguments<List>& arguments, const PieceOfUnit<Range>& piece, const PowerSum& sum) {
  if (threadIdx.x % 32 == 0) {
    arguments.norms[piece.range.first + piece.unit] = norm_of(sum.sum, 2) * sum.root * sum.root;
  }
}

template <class List>
GRADSCALE_KERNEL(kThreads, 2)
unit_sums(GRADSCALE_ARGUMENT(UnitNormsArguments<List>) arguments) {
  const auto piece = warp_piece(arguments.list);
  if (!piece.exists) { // the same for all of the warp
    return;
  }
  PowerSum sum{0, 1};
  dispatch_element(piece.range.element, [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(piece.range.data) + piece.begin();
    sum = range_power_sum(data, piece.size(), 2.0, warp_threads());
  });
  if (piece.pieces == 1) {
    store_norm(arguments, piece, sum);
  } else if (threadIdx.x % 32 == 0) {
    arguments.sums[warp_index()] = sum;
  }
}

template <class List>
GRADSCALE_KERNEL(kThreads, 2)
unit_norms(GRADSCALE_ARGUMENT(UnitNormsArguments<List>) arguments) {
  const auto piece = warp_piece(arguments.list);
  if (piece.exists && piece.pieces > 1 && piece.piece == 0) { // the same for all of the warp
    const PowerSum* sums = arguments.sums + warp_index();
    store_norm(arguments, piece, total_power_sum(sums, piece.pieces, 2.0, warp_threads()));
  }
}

// Rows need more registers, for their divisions.
template <class List>
constexpr int kScalingBlocks = std::is_same_v<typename List::Range, WholeRange> ? 4 : 3;

template <class List>
GRADSCALE_KERNEL(kThreads, kScalingBlocks<List>)
scaled_units(GRADSCALE_ARGUMENT(ScaledUnits<List>) arguments) {
  const auto piece = warp_piece(arguments.list);
  if (!piece.exists) {
    return;
  }
  const auto& range = piece.range;
  const double factor = arguments.times * arguments.factors.load(range.first + piece.unit);
  if (factor == 1 && range.data == range.out) {
    return;
  }
  dispatch_element(range.element, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(range.data) + piece.begin();
    T* to = static_cast<T*>(range.out) + piece.begin();
    change_range(from, to, piece.size(), warp_threads(), ScaledElement(multiplied_by(factor, arguments.zeros)));
  });
}

} // namespace gradscale
