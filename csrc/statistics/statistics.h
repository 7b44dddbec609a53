// The operators on many tensors.
#pragma once

#include "../cpu/range.h"
#include "../cuda/driver.h"
#include "../torch/arguments.h"
#include "../torch/tensor_element.h"
#include "kernels.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradscale {

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

struct TensorStatistics {
  at::Tensor values; // [3, N] float64: norm, largest magnitude, mean
  at::Tensor counts; // [5, N] int64: elements, zeros, NaN, inf, 1 for a missing tensor
  at::Tensor norms;  // [2, U] float64: of the units of all gradients, and of their weights; undefined without weights
};

// Computes the statistics of gradients of one device, without waiting for it. A sparse tensor counts as dense, and a
// complex one as its moduli. With weights, which need p = 2, computes also the norms of the units of gradients and of
// weights. A unit is a row or a whole tensor. A gradient without weights has no units; other gradients are strided,
// with the shapes of their weights.
TensorStatistics tensor_statistics(
    const OptionalTensors& gradients, double p, const std::optional<OptionalTensors>& weights, bool rows);

// Computes three float64 numbers from the values and counts of statistics: the norm of all tensors together, the factor
// that clips them, and 1 if the factor is not 1, else 0. A max_norm on a device is read there.
at::Tensor clipping_of(
    const at::Tensor& values, const at::Tensor& counts, double p, const Value& max_norm, bool skip_nonfinite);

// Computes the factors of units on a CPU, [U] float64, from their norms and from the result of clipping_of() with
// max_norm = inf. Returns them, and three float64 numbers: the norm of all tensors together, the smallest factor, and 1
// if any factor is not 1, else 0. With `skip_nonfinite`, all factors are 0 if the factor of `clipping` is 0 or any
// factor would be NaN.
std::pair<at::Tensor, at::Tensor> unit_factors(
    const at::Tensor& norms, const at::Tensor& clipping, double adaptive, double eps, bool skip_nonfinite);

// Multiplies each unit of tensors on one device by its factor, in place; without `rows`, there may be one factor for
// all. A factor of 1 leaves a unit unchanged. With `skip_nonfinite`, 0 times NaN or inf is 0.
void clip_units(const std::vector<at::Tensor>& tensors, const at::Tensor& factors, bool rows, bool skip_nonfinite);

// Computes weight * sum over tensors of |p|^2 / 2 in one pass; the gradient of p is weight * p.
at::Tensor l2_loss(std::vector<at::Tensor> parameters, double weight);

// Defines the functions that Python calls in eager mode.
void define_statistics(pybind11::module_& m);

// ---- On a device ----------------------------------------------------------------------------------------------------

// The type of a list, as C++ names it inside of namespace gradscale.
template <class Range, int bytes>
std::string type_name(const RangeList<Range, bytes>&) {
  return instance("RangeList", {Range::kName, std::to_string(bytes)});
}

// Calls launch(list, blocks) for lists of all ranges. The kernel gives a warp to each range for which `is_single` is
// true, and blocks_of(range) blocks to each of the others.
template <class Range, class IsSingle, class BlocksOf, class Launch>
void for_each_list(const std::vector<Range>& ranges, IsSingle is_single, BlocksOf blocks_of, Launch launch) {
  const auto fill = [&](auto& list, const Range* begin, const Range* end) {
    int32_t added = 0;
    for (const Range* range = begin; range != end; ++range) {
      if (is_single(*range)) {
        list.ranges[added++] = *range;
      }
    }
    list.singles = added;
    list.count = static_cast<int32_t>(end - begin);
    int64_t blocks = list.blocks_of_singles();
    for (const Range* range = begin; range != end; ++range) {
      if (!is_single(*range)) {
        list.ranges[added] = *range;
        list.ranges[added++].first_block = static_cast<int32_t>(blocks);
        blocks += blocks_of(*range);
      }
    }
    launch(list, blocks);
  };
  RangeList<Range, kFewRanges> few;
  RangeList<Range, kManyRanges> many;
  const auto size = static_cast<int64_t>(ranges.size());
  for (int64_t begin = 0, end = 0; begin < size; begin = end) {
    end = std::min(size, begin + many.kCapacity);
    if (end - begin <= few.kCapacity) {
      fill(few, ranges.data() + begin, ranges.data() + end);
    } else {
      fill(many, ranges.data() + begin, ranges.data() + end);
    }
  }
}

// The same for tensors, with a block for each chunk of `chunk_bytes` bytes.
template <class Launch>
void for_each_list_of_tensors(const std::vector<TensorRange>& ranges, int64_t chunk_bytes, Launch launch) {
  TORCH_CHECK(
      ranges.size() < kMostTensors,
      "gradscale_ext: ",
      ranges.size(),
      " tensors in one call, but a GPU accepts at most ",
      kMostTensors - 1,
      "; split the call");
  std::vector<ListedTensor> tensors;
  tensors.reserve(ranges.size());
  for (const TensorRange& range : ranges) {
    ListedTensor tensor{range.data, range.size, range.implicit_zeros, 0, range.element, 0};
    tensor.index = static_cast<uint32_t>(tensors.size());
    tensors.push_back(tensor);
  }
  for_each_list(
      tensors,
      [](const ListedTensor& tensor) { return tensor.size * element_size(tensor.element) <= kSingleTensor; },
      [=](const ListedTensor& tensor) { return tensor_blocks(tensor, chunk_bytes); },
      launch);
}

// The same for units, with a warp for each piece of a unit.
template <class AnyUnits, class Launch>
void for_each_list_of_units(const std::vector<AnyUnits>& ranges, Launch launch) {
  const auto pieces_of = [](const AnyUnits& range) { return range.count * pieces_per_unit(range); };
  for_each_list(
      ranges,
      [=](const AnyUnits& range) { return pieces_of(range) == 1; },
      [=](const AnyUnits& range) { return (pieces_of(range) + kWarps - 1) / kWarps; },
      launch);
}

// Unit i of range.out = unit i of range.data * factors[range.first + i] * times. With `zeros`, a factor of 0 sets all
// elements to 0, even NaN and inf. AnyUnits is UnitRange or WholeRange.
template <class AnyUnits>
void launch_scaled_units(
    const std::vector<AnyUnits>& ranges, const Slab& factors, double times, bool zeros, const OnDevice& device) {
  for_each_list_of_units(ranges, [&](const auto& list, int64_t blocks) {
    const ScaledUnits<std::decay_t<decltype(list)>> arguments{list, factors, times, zeros};
    const std::string name = instance("scaled_units", {type_name(list)});
    device.launch("statistics/cuda/clip_gradients.cuh", name, blocks, kThreads, arguments);
  });
}

// The numbers of a contiguous tensor that kernels read, or write.
inline Slab slab_of(const at::Tensor& numbers) {
  return {numbers.mutable_data_ptr(), 1, numbers.scalar_type() == at::kDouble};
}

// ---- What the passes share ------------------------------------------------------------------------------------------

// The numbers of a dense tensor; a complex element is two numbers.
inline Range range_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), (tensor.is_complex() ? 2 : 1) * tensor.numel(), element_of(tensor)};
}

// Threads take chunks of about the same size in turn.

// A part of one of several ranges.
struct Chunk {
  size_t range; // its index
  int64_t begin;
  int64_t size;
};

// Cuts ranges into chunks, in their order; an empty range has none.
template <class AnyRange>
std::vector<Chunk> chunks_of(const std::vector<AnyRange>& ranges) {
  std::vector<Chunk> chunks;
  chunks.reserve(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (int64_t begin = 0; begin < ranges[i].size; begin += kChunk) {
      chunks.push_back({i, begin, std::min(kChunk, ranges[i].size - begin)});
    }
  }
  return chunks;
}

// Calls function(index) for each chunk, on all threads where there are many elements.
template <class Function>
void for_each_chunk(const std::vector<Chunk>& chunks, Function function) {
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), /*grain_size=*/8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      function(i);
    }
  });
}

// Calls function(unit, begin, size) for each unit of which a chunk has elements: `size` elements, from `begin` on. The
// units of a range are consecutive, with `length` elements each.
template <class Function>
void for_each_unit(const Chunk& chunk, int64_t length, Function function) {
  const int64_t end = chunk.begin + chunk.size;
  int64_t unit = chunk.begin / length;
  for (int64_t begin = chunk.begin; begin < end; ++unit) {
    const int64_t size = std::min((unit + 1) * length, end) - begin;
    function(unit, begin, size);
    begin += size;
  }
}

// The units of a tensor: `length` elements each. A tensor of fewer than two dimensions is one unit.
struct Units {
  int64_t count = 0;
  int64_t length = 0;

  Units() = default;
  Units(const at::Tensor& tensor, bool rows)
      : count(number(tensor, rows).expect_int()), length(count == 0 ? 0 : tensor.numel() / count) {
  }

  static c10::SymInt number(const at::Tensor& tensor, bool rows) {
    return rows && tensor.dim() > 1 ? tensor.sym_size(0) : c10::SymInt(1);
  }

  // True if each unit is one dense block of memory, and the blocks follow each other. The order of the elements within
  // a block is free.
  bool are_blocks_of(const at::Tensor& tensor) const {
    return tensor.is_non_overlapping_and_dense() && (count <= 1 || tensor.stride(0) == length);
  }
};

} // namespace gradscale
