// Units of gradients, each of which has a norm of its own: rows, which are the slices of the first dimension, or whole
// tensors.
#pragma once

#include "chunks.h"
#include "range_statistics.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradscale {

// The units of a tensor: `length` elements each. A tensor of fewer than two dimensions is one unit.
struct Units {
  int64_t count = 0;
  int64_t length = 0;

  Units() = default;
  Units(const at::Tensor& tensor, bool rows)
      : count(rows && tensor.dim() > 1 ? tensor.size(0) : 1), length(count == 0 ? 0 : tensor.numel() / count) {
  }

  // True if each unit is one dense block of memory, and the blocks follow each other. The order of the elements within
  // a block is free.
  bool are_blocks_of(const at::Tensor& tensor) const {
    return tensor.is_non_overlapping_and_dense() && (count <= 1 || tensor.stride(0) == length);
  }
};

// A gradient and its weights, whose units are blocks of memory.
struct UnitPair {
  at::Tensor gradient; // real
  at::Tensor weight;   // real or complex
  Units units;         // none if no norms are wanted
  int64_t first = 0;   // the index of the first unit among the units of all pairs
};

// The norms of all units, first of gradients and then of weights.
struct UnitNorms {
  double* norms;
  int64_t count; // of gradients

  double& of_gradient(int64_t unit) const {
    return norms[unit];
  }
  double& of_weight(int64_t unit) const {
    return norms[count + unit];
  }
};

// Computes the norms on a CPU, a chunk of a gradient at a time, while the chunk is in the cache. Units that several
// chunks share are added up at the end, in the order of the chunks.
class UnitPass {
 public:
  UnitPass(std::vector<UnitPair> pairs, const UnitNorms& norms);

  // Adds chunk i of all gradients; threads may add different chunks at the same time.
  void add(int64_t i, const Range& chunk, const ChunkStatistics& statistics);
  void finish() const;

 private:
  struct Sums {
    PowerSum gradient{0, 1};
    PowerSum weight{0, 1};
  };
  struct Chunk {
    const UnitPair* pair;
    int64_t begin; // elements of the gradient
    int64_t size;
    Sums first; // of the first unit, unless it is within the chunk
    Sums last;  // of the last unit, unless it is within the chunk, or the first
  };

  void store(int64_t unit, const Sums& sums) const;

  std::vector<UnitPair> pairs_;
  std::vector<Chunk> chunks_;
  UnitNorms norms_;
};

} // namespace gradscale
