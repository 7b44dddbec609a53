#include "tensors.h"

#include "../cuda/driver.h"
#include "../torch/tensor_element.h"
#include "calls.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstring>
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

// The norms of all units: first of the gradients, then of the weights.
struct UnitNorms {
  double* norms;
  int64_t count; // number of units

  double& gradient_norm(int64_t unit) const {
    return norms[unit];
  }
  double& weight_norm(int64_t unit) const {
    return norms[count + unit];
  }
};

// Computes the norms on a CPU, one chunk of a gradient at a time, while the chunk is in the cache. The parts of units
// that span several chunks are added up at the end, in the order of the chunks.
class UnitPass {
 public:
  UnitPass(std::vector<UnitPair> pairs, const UnitNorms& norms);

  // The weights of chunk i. Chunks are numbered across all gradients.
  const char* weights_of(int64_t i) const;

  // Adds chunk i; threads may add different chunks at the same time.
  void add(int64_t i, const Range& chunk, const ChunkStatistics& statistics);
  // Stores the norms of units that span several chunks.
  void finish() const;

 private:
  struct Sums {
    PowerSum gradient{0, 1};
    PowerSum weight{0, 1};
  };
  struct Chunk {
    const UnitPair* pair;
    int64_t begin; // in elements of the gradient
    int64_t size;
    Sums first; // of the first unit, unless the chunk contains all of it
    Sums last;  // of the last unit, unless the chunk contains all of it, or it is also the first unit
  };

  void store(int64_t unit, const Sums& sums) const;

  std::vector<UnitPair> pairs_;
  std::vector<Chunk> chunks_;
  UnitNorms norms_;
};

// The sum of squares of a chunk. It is NaN or inf if an element is; the sums in `statistics` leave these elements out.
PowerSum chunk_sum(const ChunkStatistics& statistics) {
  if (statistics.nans > 0 || statistics.infs > 0) {
    return {static_cast<double>(statistics.nans > 0 ? NAN : INFINITY), 1};
  }
  return {statistics.sums.powers, statistics.sums.root};
}

UnitPass::UnitPass(std::vector<UnitPair> pairs, const UnitNorms& norms) : pairs_(std::move(pairs)), norms_(norms) {
  for (const UnitPair& pair : pairs_) {
    const int64_t size = pair.gradient.defined() ? pair.gradient.numel() : 0;
    for (int64_t begin = 0; begin < size; begin += kChunk) {
      chunks_.push_back({&pair, begin, std::min(kChunk, size - begin), {}, {}});
    }
  }
}

void UnitPass::store(int64_t unit, const Sums& sums) const {
  norms_.gradient_norm(unit) = norm_of(sums.gradient.sum, 2) * sums.gradient.root * sums.gradient.root;
  norms_.weight_norm(unit) = norm_of(sums.weight.sum, 2) * sums.weight.root * sums.weight.root;
}

const char* UnitPass::weights_of(int64_t i) const {
  const at::Tensor& weight = chunks_[i].pair->weight;
  return weight.defined() ? static_cast<const char*>(weight.const_data_ptr()) + chunks_[i].begin * weight.element_size()
                          : nullptr;
}

void UnitPass::add(int64_t i, const Range& range, const ChunkStatistics& statistics) {
  Chunk& chunk = chunks_[i];
  const UnitPair& pair = *chunk.pair;
  if (pair.units.count == 0) {
    return;
  }
  const int64_t length = pair.units.length;
  const int64_t end = chunk.begin + chunk.size;
  const int64_t first = chunk.begin / length;
  const int64_t last = (end - 1) / length;
  const auto* elements = static_cast<const char*>(range.data);
  const char* weights = weights_of(i);
  for (int64_t unit = first; unit <= last; ++unit) {
    const int64_t from = std::max(unit * length, chunk.begin);
    const int64_t size = std::min((unit + 1) * length, end) - from;
    const Range weight{
        weights + (from - chunk.begin) * pair.weight.element_size(),
        size,
        element_of(pair.weight),
        pair.weight.is_complex()};
    const Range gradient{
        elements + (from - chunk.begin) * element_size(range.element), size, range.element, /*is_complex=*/false};
    const Sums sums{
        first == last ? chunk_sum(statistics) : power_sum_kernel(gradient, /*p=*/2), power_sum_kernel(weight, /*p=*/2)};
    if (size == length) {
      store(pair.first + unit, sums);
    } else {
      (unit == first ? chunk.first : chunk.last) = sums;
    }
  }
}

void UnitPass::finish() const {
  Sums sums;
  const auto add_sums = [&](const Sums& part) {
    sums = {added(sums.gradient, part.gradient, 2), added(sums.weight, part.weight, 2)};
  };
  for (const Chunk& chunk : chunks_) {
    if (chunk.pair->units.count == 0) {
      continue;
    }
    const int64_t length = chunk.pair->units.length;
    const int64_t end = chunk.begin + chunk.size;
    const int64_t first = chunk.begin / length;
    const int64_t first_end = (first + 1) * length;
    if (chunk.begin % length != 0 || first_end > end) {
      add_sums(chunk.first);
      if (first_end <= end) {
        store(chunk.pair->first + first, sums);
        sums = {};
      }
    }
    if (first_end < end && end % length != 0) {
      add_sums(chunk.last);
    }
  }
}

// ---- Statistics -----------------------------------------------------------------------------------------------------

// The stored elements of a tensor, and the number of zeros that it does not store (-1 if there is no tensor).
struct Stored {
  at::Tensor elements; // real and dense, in any order of dimensions
  int64_t implicit_zeros = 0;
};

// Computes moduli in double, where the squares of floats do not overflow.
at::Tensor moduli(const at::Tensor& complex) {
  return complex.to(at::kComplexDouble).abs();
}

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
  elements = with_element(elements.is_complex() ? moduli(elements) : elements.resolve_neg());
  return {elements.is_non_overlapping_and_dense() ? elements : elements.contiguous(), implicit_zeros};
}

int64_t size_of(const Stored& part) {
  return part.elements.defined() ? part.elements.numel() : 0;
}

std::vector<Range> ranges_of(const std::vector<Stored>& parts) {
  std::vector<Range> ranges;
  for (const Stored& part : parts) {
    if (part.elements.defined()) {
      ranges.push_back({part.elements.const_data_ptr(), part.elements.numel(), element_of(part.elements), false});
    } else {
      ranges.push_back({nullptr, 0, Element::float32, false});
    }
  }
  return ranges;
}

// Also computes the norms of `units` if they are given.
void run(const std::vector<Stored>& parts, double p, const StatisticsOut& out, UnitPass* units) {
  const std::vector<Range> chunks = chunks_of(ranges_of(parts));
  std::vector<ChunkStatistics> statistics(chunks.size());
  for_each_chunk(chunks, [&](int64_t i) {
    statistics_kernel(chunks[i], p, units != nullptr ? units->weights_of(i) : chunks[i].data, statistics[i]);
    if (units != nullptr) {
      units->add(i, chunks[i], statistics[i]);
    }
  });
  if (units != nullptr) {
    units->finish();
  }
  std::memset(out.histogram, 0, out.count * kHistogramBins * sizeof(int64_t));
  size_t next = 0;
  for (int64_t i = 0; i < out.count; ++i) {
    ElementSums sums = no_elements();
    int64_t zeros = 0, nans = 0, infs = 0;
    const int64_t size = size_of(parts[i]);
    for (int64_t begin = 0; begin < size; begin += kChunk, ++next) {
      const ChunkStatistics& chunk = statistics[next];
      sums = added(sums, chunk.sums, p);
      zeros += chunk.zeros;
      nans += chunk.nans;
      infs += chunk.infs;
      for (int bin = 0; bin < kHistogramBins; ++bin) {
        out.histogram[i * kHistogramBins + bin] += chunk.histogram[bin];
      }
    }
    out.store(i, sums, size, parts[i].implicit_zeros, zeros, nans, infs, p);
  }
}

void run_on_device(const std::vector<Stored>& parts, double p, const StatisticsOut& out, const at::Tensor& like) {
  std::vector<DeviceRange> ranges;
  for (const Range& range : ranges_of(parts)) {
    ranges.push_back({range.data, nullptr, range.size, range.element, parts[ranges.size()].implicit_zeros});
  }
  launch_statistics(ranges, p, out, OnDevice(like.device()));
}

c10::Device device_of(const std::vector<std::optional<at::Tensor>>& tensors) {
  for (const std::optional<at::Tensor>& tensor : tensors) {
    if (tensor) {
      return tensor->device();
    }
  }
  return at::kCPU;
}

// Makes uninitialised results, on a CPU or a device.
TensorStatistics make_statistics(int64_t count, c10::Device where) {
  const auto options = at::TensorOptions().device(where);
  return {
      at::empty({3, count}, options.dtype(at::kDouble)),
      at::empty({5, count}, options.dtype(at::kLong)),
      at::empty({count, kHistogramBins}, options.dtype(at::kLong))};
}

StatisticsOut make_out(const TensorStatistics& statistics) {
  return {
      statistics.values.mutable_data_ptr<double>(),
      statistics.counts.mutable_data_ptr<int64_t>(),
      statistics.histogram.mutable_data_ptr<int64_t>(),
      statistics.values.size(1)};
}

std::vector<Stored> stored(const std::vector<std::optional<at::Tensor>>& tensors) {
  std::vector<Stored> parts;
  parts.reserve(tensors.size());
  for (const std::optional<at::Tensor>& tensor : tensors) {
    parts.push_back(stored(tensor));
  }
  return parts;
}

// Pairs gradients with their weights, and counts the units. Copies tensors whose units are not blocks of memory, and
// puts the copies of gradients into `parts`.
std::vector<UnitPair> pairs_of(
    std::vector<Stored>& parts, const std::vector<std::optional<at::Tensor>>& weights, bool rows, int64_t& count) {
  std::vector<UnitPair> pairs;
  pairs.reserve(parts.size());
  count = 0;
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

void run_on_device(const std::vector<UnitPair>& pairs, const UnitNorms& out, const at::Tensor& like) {
  std::vector<UnitRange> ranges;
  for (const UnitPair& pair : pairs) {
    const Units& units = pair.units;
    if (units.count > 0 && units.length > 0) {
      const int64_t numbers = pair.weight.is_complex() ? 2 : 1;
      ranges.push_back(
          {const_cast<void*>(pair.gradient.const_data_ptr()),
           units.count,
           units.length,
           element_of(pair.gradient),
           pair.first});
      ranges.push_back(
          {const_cast<void*>(pair.weight.const_data_ptr()),
           units.count,
           numbers * units.length,
           element_of(pair.weight),
           out.count + pair.first});
    }
  }
  launch_unit_norms(ranges, out.norms, OnDevice(like.device()));
}

} // namespace

TensorStatistics tensor_statistics(const std::vector<std::optional<at::Tensor>>& tensors, double p) {
  const c10::Device where = device_of(tensors);
  const std::vector<Stored> parts = stored(tensors);
  TensorStatistics result = make_statistics(static_cast<int64_t>(tensors.size()), where);
  if (tensors.empty()) {
    return result;
  }
  if (runs_kernels(where)) {
    run_on_device(parts, p, make_out(result), result.values);
  } else {
    run(parts, p, make_out(result), /*units=*/nullptr);
  }
  return result;
}

UnitStatistics unit_statistics(
    const std::vector<std::optional<at::Tensor>>& gradients,
    const std::vector<std::optional<at::Tensor>>& weights,
    bool rows) {
  const c10::Device where = device_of(gradients);
  std::vector<Stored> parts = stored(gradients);
  int64_t count = 0;
  std::vector<UnitPair> pairs = pairs_of(parts, weights, rows, count);
  TensorStatistics statistics = make_statistics(static_cast<int64_t>(gradients.size()), where);
  UnitStatistics result{statistics, at::zeros({2, count}, statistics.values.options())};
  const UnitNorms norms{result.norms.mutable_data_ptr<double>(), count};
  if (gradients.empty()) {
    return result;
  }
  if (runs_kernels(where)) {
    run_on_device(parts, /*p=*/2, make_out(statistics), statistics.values);
    run_on_device(pairs, norms, statistics.values);
  } else {
    UnitPass units(std::move(pairs), norms);
    run(parts, /*p=*/2, make_out(statistics), &units);
  }
  return result;
}

// ---- Norms of updates -----------------------------------------------------------------------------------------------

namespace {

bool accepts(const at::Tensor& before, const at::Tensor& after) {
  return ordinary_tensor(before) && ordinary_tensor(after) && before.is_cpu() && after.is_cpu() &&
         has_element(before) && before.scalar_type() != at::kDouble && after.scalar_type() == before.scalar_type() &&
         before.sizes() == after.sizes() && before.strides() == after.strides() &&
         before.is_non_overlapping_and_dense();
}

} // namespace

at::Tensor update_norms(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after) {
  TORCH_CHECK(
      before.size() == after.size(),
      "update_norms: before has ",
      before.size(),
      " tensors, but after has ",
      after.size());
  std::vector<Range> ranges;
  for (size_t i = 0; i < before.size(); ++i) {
    if (!accepts(before[i], after[i])) {
      return at::Tensor();
    }
    ranges.push_back({before[i].const_data_ptr(), before[i].numel(), element_of(before[i]), /*is_complex=*/false});
  }
  const std::vector<Range> chunks = chunks_of(ranges);
  std::vector<const void*> afters;
  for (size_t i = 0; i < after.size(); ++i) {
    const auto* data = static_cast<const char*>(after[i].const_data_ptr());
    for (int64_t begin = 0; begin < after[i].numel(); begin += kChunk) {
      afters.push_back(data + begin * after[i].element_size());
    }
  }
  std::vector<UpdateSquares> squares(chunks.size());
  for_each_chunk(chunks, [&](int64_t i) { squares[i] = update_kernel(chunks[i], afters[i]); });
  const auto count = static_cast<int64_t>(before.size());
  at::Tensor norms = at::zeros({2, count}, at::kDouble);
  auto* out = norms.mutable_data_ptr<double>();
  size_t next = 0;
  for (int64_t i = 0; i < count; ++i) {
    UpdateSquares sum{};
    for (int64_t begin = 0; begin < ranges[i].size; begin += kChunk, ++next) {
      sum.before += squares[next].before;
      sum.update += squares[next].update;
    }
    out[i] = std::sqrt(sum.before);
    out[count + i] = std::sqrt(sum.update);
  }
  return norms;
}

} // namespace gradscale
