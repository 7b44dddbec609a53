// The kernels for units of gradients: rows or whole tensors, of as many tensors as there are.
//
// unit_sums       one warp for each piece of a unit, of 16 KB of float: read once, 2 KB of a warp at a time;
// unit_norms      if a unit has several pieces: one warp adds up their sums, 16 bytes for each piece;
// clipped_units   one warp for each piece: read once, written once, and neither where the factor is 1.
#pragma once

#include "range_table.cuh"

namespace gradscale {

// The piece that this warp works on.
struct PieceOfUnit {
  const UnitTable::Entry& entry;
  int64_t unit; // none of this entry where it is not less than its count
  int64_t pieces;
  int64_t piece;

  GRADSCALE_DEVICE bool exists() const {
    return unit < entry.range.count;
  }
  GRADSCALE_DEVICE int64_t begin() const {
    return unit * entry.range.length + piece * kPieceOfUnit;
  }
  GRADSCALE_DEVICE int32_t size() const {
    const int64_t rest = entry.range.length - piece * kPieceOfUnit;
    return static_cast<int32_t>(rest < kPieceOfUnit ? rest : kPieceOfUnit);
  }
};

GRADSCALE_DEVICE PieceOfUnit warp_piece(const UnitTable& table) {
  const UnitTable::Entry& entry = table.entry_for_block(blockIdx.x);
  const int64_t index = (blockIdx.x - entry.first_block) * kPiecesOfBlock + threadIdx.x / 32;
  const int64_t pieces = pieces_per_unit(entry.range);
  return {entry, index / pieces, pieces, index % pieces};
}

// The index of this warp among all of the launch, and so of the sum of its piece.
GRADSCALE_DEVICE int64_t warp_index() {
  return static_cast<int64_t>(blockIdx.x) * kPiecesOfBlock + threadIdx.x / 32;
}

GRADSCALE_DEVICE Group warp_group() {
  return {32, static_cast<int>(threadIdx.x) % 32, nullptr};
}

GRADSCALE_DEVICE void store_norm(const UnitNormsArguments& arguments, const PieceOfUnit& piece, const PowerSum& sum) {
  if (threadIdx.x % 32 == 0) {
    arguments.norms[piece.entry.range.first + piece.unit] = norm_of(sum.sum, 2) * sum.root * sum.root;
  }
}

GRADSCALE_KERNEL(kThreads, 2) unit_sums(GRADSCALE_ARGUMENT(UnitNormsArguments) arguments) {
  const PieceOfUnit piece = warp_piece(arguments.table);
  if (!piece.exists()) { // the same for all of the warp
    return;
  }
  PowerSum sum{0, 1};
  dispatch_element(piece.entry.range.element, [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(piece.entry.range.data) + piece.begin();
    sum = range_power_sum(data, piece.size(), 2.0, warp_group());
  });
  if (piece.pieces == 1) {
    store_norm(arguments, piece, sum);
  } else if (threadIdx.x % 32 == 0) {
    arguments.sums[warp_index()] = sum;
  }
}

GRADSCALE_KERNEL(kThreads, 2) unit_norms(GRADSCALE_ARGUMENT(UnitNormsArguments) arguments) {
  const PieceOfUnit piece = warp_piece(arguments.table);
  if (piece.exists() && piece.pieces > 1 && piece.piece == 0) { // the same for all of the warp
    const PowerSum* sums = arguments.sums + warp_index();
    store_norm(arguments, piece, total_power_sum(sums, piece.pieces, 2.0, warp_group()));
  }
}

GRADSCALE_KERNEL(kThreads, 2) clipped_units(GRADSCALE_ARGUMENT(ClippedUnits) arguments) {
  const PieceOfUnit piece = warp_piece(arguments.table);
  if (!piece.exists()) {
    return;
  }
  const double factor = arguments.factors[piece.entry.range.first + piece.unit];
  if (factor == 1) {
    return;
  }
  dispatch_element(piece.entry.range.element, [&](auto type) {
    auto* data = static_cast<decltype(type)*>(piece.entry.range.data) + piece.begin();
    change_range(data, data, piece.size(), warp_group(), Clipped(factor, arguments.zeros));
  });
}

} // namespace gradscale
