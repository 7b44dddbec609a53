#include "statistics.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cmath>
#include <utility>

namespace gradscale {

namespace {

// ---- The norms of units ---------------------------------------------------------------------------------------------

// A gradient and its weights, stored so that each unit is one block of memory.
struct UnitPair {
  at::Tensor gradient; // real
  at::Tensor weight;   // real or complex
  Units units;         // empty if no norms are wanted
  int64_t first = 0;   // the index of the first unit among the units of all pairs
};

// Sums over a unit, or over the part of a unit that a chunk has.
struct UnitSums {
  int64_t unit = -1; // its index among the units of all pairs; -1: none
  PowerSum gradient{0, 1};
  PowerSum weight{0, 1};
};

// The norms of all units: first of the gradients, then of the weights.
struct UnitNorms {
  double* norms;
  int64_t count; // number of units

  void store(const UnitSums& sums) const {
    norms[sums.unit] = norm_of(sums.gradient.sum, 2) * sums.gradient.root * sums.gradient.root;
    norms[count + sums.unit] = norm_of(sums.weight.sum, 2) * sums.weight.root * sums.weight.root;
  }
};

// The units that a chunk has only parts of: the first one and the last one.
using UnitParts = std::array<UnitSums, 2>;

// The sum of squares of a chunk. It is NaN or inf if an element is; the sums in `statistics` leave these elements out.
PowerSum chunk_sum(const ChunkStatistics& statistics) {
  if (statistics.nans > 0 || statistics.infs > 0) {
    return {static_cast<double>(statistics.nans > 0 ? NAN : INFINITY), 1};
  }
  return {statistics.sums.powers, statistics.sums.root};
}

// Stores the norms of the units that a chunk contains, and returns the sums of the units that it has only parts of.
// `gradient` and `weights` are the ranges of the pair, where a complex weight is two numbers.
UnitParts add_units(
    const UnitPair& pair,
    const Chunk& chunk,
    const Range& gradient,
    const Range& weights,
    const ChunkStatistics& statistics,
    const UnitNorms& norms) {
  UnitParts parts;
  const int64_t numbers = weights.size / gradient.size;
  for_each_unit(chunk, pair.units.length, [&](int64_t unit, int64_t begin, int64_t size) {
    const bool is_whole_chunk = size == chunk.size;
    const UnitSums sums{
        pair.first + unit,
        is_whole_chunk ? chunk_sum(statistics) : power_sum_kernel(gradient.part(begin, size), /*p=*/2),
        power_sum_kernel(weights.part(numbers * begin, numbers * size), /*p=*/2)};
    if (size == pair.units.length) {
      norms.store(sums);
    } else {
      parts[begin == chunk.begin ? 0 : 1] = sums;
    }
  });
  return parts;
}

// Adds up the parts of units, in the order of the chunks, and stores their norms.
void add_parts(const std::vector<UnitParts>& chunks, const UnitNorms& norms) {
  UnitSums sums;
  for (const UnitParts& parts : chunks) {
    for (const UnitSums& part : parts) {
      if (part.unit < 0) {
        continue;
      }
      if (part.unit != sums.unit) {
        sums = {part.unit};
      }
      sums = {part.unit, added(sums.gradient, part.gradient, 2), added(sums.weight, part.weight, 2)};
      norms.store(sums); // the last time with all parts
    }
  }
}

// ---- Statistics -----------------------------------------------------------------------------------------------------

// The stored elements of a tensor, and the number of zeros that it does not store (-1 if there is no tensor).
struct Stored {
  at::Tensor elements; // real and dense, in any order of dimensions
  int64_t implicit_zeros = 0;
};

Stored stored(const std::optional<at::Tensor>& tensor) {
  if (!tensor) {
    return {at::Tensor(), -1};
  }
  if (tensor->layout() == at::kStrided && has_element(*tensor) && !tensor->is_neg() &&
      tensor->is_non_overlapping_and_dense()) {
    return {*tensor, 0};
  }
  at::Tensor elements = tensor->detach();
  if (elements.layout() == at::kSparse) {
    elements = elements.coalesce().values();
  } else if (elements.layout() != at::kStrided) {
    elements = elements.values();
  }
  const int64_t implicit_zeros = tensor->numel() - elements.numel();
  // Moduli are computed in double, where the squares of floats do not overflow.
  elements = with_element(elements.is_complex() ? elements.to(at::kComplexDouble).abs() : elements.resolve_neg());
  return {elements.is_non_overlapping_and_dense() ? elements : elements.contiguous(), implicit_zeros};
}

std::vector<TensorRange> ranges_of(const std::vector<Stored>& parts) {
  std::vector<TensorRange> ranges;
  for (const Stored& part : parts) {
    const Range range = part.elements.defined() ? range_of(part.elements) : Range{nullptr, 0, Element::float32};
    ranges.push_back({range, part.implicit_zeros});
  }
  return ranges;
}

// Also computes the norms of the units of `pairs`, if there are pairs: of a chunk's units while the chunk is in the
// cache.
void run(
    const std::vector<TensorRange>& ranges,
    double p,
    const StatisticsOut& out,
    const std::vector<UnitPair>& pairs,
    const UnitNorms& norms) {
  const std::vector<Chunk> chunks = chunks_of(ranges);
  std::vector<ChunkStatistics> statistics(chunks.size());
  std::vector<UnitParts> unit_parts(pairs.empty() ? 0 : chunks.size());
  for_each_chunk(chunks, [&](int64_t i) {
    const Chunk& chunk = chunks[i];
    const Range& gradient = ranges[chunk.range];
    const Range elements = gradient.part(chunk.begin, chunk.size);
    if (pairs.empty() || pairs[chunk.range].units.count == 0) {
      statistics_kernel(elements, p, elements.data, statistics[i]);
      return;
    }
    const UnitPair& pair = pairs[chunk.range];
    const Range weights = range_of(pair.weight);
    const int64_t numbers = weights.size / gradient.size;
    statistics_kernel(elements, p, weights.part(numbers * chunk.begin, chunk.size).data, statistics[i]);
    unit_parts[i] = add_units(pair, chunk, gradient, weights, statistics[i], norms);
  });
  add_parts(unit_parts, norms);
  size_t next = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    ElementSums sums = no_elements();
    int64_t zeros = 0, nans = 0, infs = 0;
    for (; next < chunks.size() && chunks[next].range == i; ++next) {
      const ChunkStatistics& chunk = statistics[next];
      sums = added(sums, chunk.sums, p);
      zeros += chunk.zeros;
      nans += chunk.nans;
      infs += chunk.infs;
    }
    out.store(static_cast<int64_t>(i), sums, ranges[i].size, ranges[i].implicit_zeros, zeros, nans, infs, p);
  }
}

void launch_statistics(
    const std::vector<TensorRange>& ranges, double p, const StatisticsOut& out, const OnDevice& device) {
  const bool by_vectors = p == 2 || std::isinf(p);
  const auto has_chunks = [](const ListedTensor& tensor) { return tensor_blocks(tensor, kChunkOfStatistics) > 1; };
  for_each_list_of_tensors(ranges, kChunkOfStatistics, [&](const auto& list, int64_t blocks) {
    StatisticsArguments<std::decay_t<decltype(list)>> arguments{list, nullptr, p, out};
    constexpr const char* file = "statistics/cuda/statistics.cuh";
    const std::string name = instance("chunk_statistics", {by_vectors ? "true" : "false", type_name(list)});
    const bool has_parts = std::any_of(list.ranges + list.singles, list.ranges + list.count, has_chunks);
    at::Tensor memory;
    if (has_parts) {
      const int64_t chunks = blocks - list.blocks_of_singles();
      memory = device.memory(chunks * static_cast<int64_t>(sizeof(ChunkStatistics)));
      arguments.chunks = static_cast<ChunkStatistics*>(memory.mutable_data_ptr());
    }
    device.launch(file, name, blocks, kThreads, arguments);
    if (has_parts) {
      const int64_t tensors = list.count - list.singles;
      device.launch(file, instance("tensor_statistics", {type_name(list)}), tensors, kThreads, arguments);
    }
  });
}

// Pairs gradients with their weights. Copies tensors whose units are not blocks of memory, and puts the copies of
// gradients into `parts`.
std::vector<UnitPair> pairs_of(std::vector<Stored>& parts, const OptionalTensors& weights, bool rows) {
  std::vector<UnitPair> pairs;
  pairs.reserve(parts.size());
  int64_t count = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    UnitPair pair{parts[i].elements, at::Tensor(), Units(), count};
    if (weights[i]) {
      const Units units(*weights[i], rows);
      const at::Tensor weight = weights[i]->is_complex() ? weights[i]->detach() : with_element(weights[i]->detach());
      pair.gradient = parts[i].elements =
          units.are_blocks_of(pair.gradient) ? pair.gradient : pair.gradient.contiguous();
      pair.weight = units.are_blocks_of(weight) ? weight : weight.contiguous();
      pair.units = units;
      count += units.count;
    }
    pairs.push_back(std::move(pair));
  }
  return pairs;
}

void launch_unit_norms(const std::vector<UnitPair>& pairs, const UnitNorms& out, const OnDevice& device) {
  std::vector<UnitRange> ranges;
  for (const UnitPair& pair : pairs) {
    const Units& units = pair.units;
    if (units.count > 0 && units.length > 0) {
      const int64_t numbers = pair.weight.is_complex() ? 2 : 1;
      ranges.push_back(
          {pair.gradient.const_data_ptr(),
           nullptr,
           units.count,
           units.length,
           pair.first,
           element_of(pair.gradient),
           0});
      ranges.push_back(
          {pair.weight.const_data_ptr(),
           nullptr,
           units.count,
           numbers * units.length,
           out.count + pair.first,
           element_of(pair.weight),
           /*first_block=*/0});
    }
  }
  const auto has_pieces = [](const UnitRange& range) { return pieces_per_unit(range) > 1; };
  for_each_list_of_units(ranges, [&](const auto& list, int64_t blocks) {
    const at::Tensor memory = device.memory(blocks * kWarps * static_cast<int64_t>(sizeof(PowerSum)));
    const UnitNormsArguments<std::decay_t<decltype(list)>> arguments{
        list, static_cast<PowerSum*>(memory.mutable_data_ptr()), out.norms};
    constexpr const char* file = "statistics/cuda/clip_gradients.cuh";
    device.launch(file, instance("unit_sums", {type_name(list)}), blocks, kThreads, arguments);
    if (std::any_of(list.ranges + list.singles, list.ranges + list.count, has_pieces)) {
      device.launch(file, instance("unit_norms", {type_name(list)}), blocks, kThreads, arguments);
    }
  });
}

// On the meta device, as for tracers, sizes may be symbols.
TensorStatistics make_results(
    const OptionalTensors& gradients, const std::optional<OptionalTensors>& weights, bool rows, c10::Device where) {
  const auto count = static_cast<int64_t>(gradients.size());
  const auto numbers = at::TensorOptions().device(where).dtype(at::kDouble);
  TensorStatistics result{
      at::empty({3, count}, numbers), at::empty({5, count}, numbers.dtype(at::kLong)), at::Tensor()};
  if (weights) {
    c10::SymInt units = 0;
    for (const std::optional<at::Tensor>& weight : *weights) {
      units += weight ? Units::number(*weight, rows) : 0;
    }
    result.norms = at::zeros_symint({2, units}, numbers);
  }
  return result;
}

} // namespace

TensorStatistics tensor_statistics(
    const OptionalTensors& gradients, double p, const std::optional<OptionalTensors>& weights, bool rows) {
  c10::Device where = at::kCPU;
  for (const std::optional<at::Tensor>& gradient : gradients) {
    where = gradient ? gradient->device() : where;
  }
  TensorStatistics result = make_results(gradients, weights, rows, where);
  if (gradients.empty() || where.is_meta()) {
    return result;
  }
  std::vector<Stored> parts;
  parts.reserve(gradients.size());
  for (const std::optional<at::Tensor>& gradient : gradients) {
    parts.push_back(stored(gradient));
  }
  const auto count = static_cast<int64_t>(gradients.size());
  const StatisticsOut out{result.values.mutable_data_ptr<double>(), result.counts.mutable_data_ptr<int64_t>(), count};
  std::vector<UnitPair> pairs;
  UnitNorms norms{};
  if (weights) {
    pairs = pairs_of(parts, *weights, rows);
    norms = {result.norms.mutable_data_ptr<double>(), result.norms.size(1)};
  }
  const std::vector<TensorRange> ranges = ranges_of(parts);
  if (!runs_kernels(where)) {
    run(ranges, p, out, pairs, norms);
    return result;
  }
  const OnDevice device(where);
  launch_statistics(ranges, p, out, device);
  if (weights) {
    launch_unit_norms(pairs, norms, device);
  }
  return result;
}

} // namespace gradscale
