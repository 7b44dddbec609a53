#include "units.h"

#include "../cpu/instruction_set.h"
#include "../torch/tensor_element.h"

#include <algorithm>
#include <utility>

namespace gradscale {

namespace {

// The sum of squares of all elements, from statistics, whose sums leave out NaN and inf.
PowerSum sum_of_chunk(const ChunkStatistics& statistics) {
  if (statistics.nans > 0 || statistics.infs > 0) {
    return {static_cast<double>(statistics.nans > 0 ? NAN : INFINITY), 1};
  }
  return {statistics.sums.powers, statistics.sums.root};
}

} // namespace

UnitPass::UnitPass(std::vector<UnitPair> pairs, const UnitNorms& norms) : pairs_(std::move(pairs)), norms_(norms) {
  for (const UnitPair& pair : pairs_) {
    const int64_t size = pair.gradient.defined() ? pair.gradient.numel() : 0;
    for (int64_t begin = 0; begin < size; begin += kChunk) {
      chunks_.push_back({&pair, begin, std::min(kChunk, size - begin), {}, {}});
    }
  }
}

void UnitPass::store(int64_t unit, const Sums& sums) const {
  norms_.of_gradient(unit) = norm_of(sums.gradient.sum, 2) * sums.gradient.root * sums.gradient.root;
  norms_.of_weight(unit) = norm_of(sums.weight.sum, 2) * sums.weight.root * sums.weight.root;
}

void UnitPass::add(int64_t i, const Range& range, const ChunkStatistics& statistics) {
  Chunk& chunk = chunks_[i];
  const UnitPair& pair = *chunk.pair;
  if (pair.units.count == 0) {
    return;
  }
  const PowerSumOfRange power_sum = for_this_machine(power_sum_kernel);
  const int64_t length = pair.units.length;
  const int64_t end = chunk.begin + chunk.size;
  const int64_t first = chunk.begin / length;
  const int64_t last = (end - 1) / length;
  const auto* elements = static_cast<const char*>(range.data);
  const auto* weights = static_cast<const char*>(pair.weight.const_data_ptr());
  for (int64_t unit = first; unit <= last; ++unit) {
    const int64_t from = std::max(unit * length, chunk.begin);
    const int64_t size = std::min((unit + 1) * length, end) - from;
    const Range weight{
        weights + from * pair.weight.element_size(), size, element_of(pair.weight), pair.weight.is_complex()};
    const Range gradient{
        elements + (from - chunk.begin) * element_size(range.element), size, range.element, /*is_complex=*/false};
    const Sums sums{
        first == last ? sum_of_chunk(statistics) : power_sum(gradient, /*p=*/2), power_sum(weight, /*p=*/2)};
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
    const int64_t end_of_first = (first + 1) * length;
    if (chunk.begin % length != 0 || end_of_first > end) {
      add_sums(chunk.first);
      if (end_of_first <= end) {
        store(chunk.pair->first + first, sums);
        sums = {};
      }
    }
    if (end_of_first < end && end % length != 0) {
      add_sums(chunk.last);
    }
  }
}

} // namespace gradscale
