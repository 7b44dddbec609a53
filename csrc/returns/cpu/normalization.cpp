// The kernels of normalization.h, which compute in double. The compiler vectorises the loops. This file includes itself
// once for each instruction set.
#ifndef GRADSCALE_VARIANT
#include "../normalization.h"

#define GRADSCALE_KERNELS "../returns/cpu/normalization.cpp"
#include "../../cpu/each_instruction_set.h"

namespace gradscale {

const SumsOfEntries entry_sums_kernel = GRADSCALE_CPU_KERNEL(entry_sums);
const SquaresOfEntries entry_squares_kernel = GRADSCALE_CPU_KERNEL(entry_squares);
const StandardizeEntries standardize_kernel = GRADSCALE_CPU_KERNEL(standardize_entries);
const SumsOfGradients gradient_sums_kernel = GRADSCALE_CPU_KERNEL(gradient_sums);
const GradientsOfEntries entry_gradients_kernel = GRADSCALE_CPU_KERNEL(entry_gradients);

} // namespace gradscale

#else
#include "../../cpu/vectors.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

constexpr int64_t kTile = 512; // entries

// Calls function(T(), entry, counts), where T is the type of the entries, entry(i) is entry i less the origin, and
// counts(i) is true if it counts.
template <class Function>
void dispatch_entries(const Entries& entries, Function function) {
  dispatch_element(entries.range.element, [&](auto type) {
    const auto* data = static_cast<const decltype(type)*>(entries.range.data);
    const double origin = entries.origin;
    const auto entry = [=](int64_t i) { return static_cast<double>(to_accumulate(data[i])) - origin; };
    if (const uint8_t* mask = entries.mask; mask != nullptr) {
      function(type, entry, [=](int64_t i) { return mask[i] != 0; });
    } else {
      function(type, entry, [](int64_t) { return true; });
    }
  });
}

// Calls function(T(), begin, tile, size) for each tile of entries less `mean`, with 0 for entries that do not count.
template <class Function>
void for_each_tile(const Entries& entries, double mean, Function function) {
  dispatch_entries(entries, [&](auto type, auto entry, auto counts) {
    alignas(64) double tile[kTile];
    for (int64_t begin = 0; begin < entries.range.size; begin += kTile) {
      const int64_t size = std::min(kTile, entries.range.size - begin);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        const double centred = entry(begin + i) - mean; // read always, so that the loop has no branches
        tile[i] = counts(begin + i) ? centred : 0.0;
      }
      function(type, begin, tile, size);
    }
  });
}

EntrySums entry_sums(const Entries& entries) {
  EntrySums sums{entries.range.size, 0, entries.range.element == Element::float64 ? 0.0 : 1.0};
  for_each_tile(entries, /*mean=*/0, [&](auto type, int64_t /*begin*/, const double* tile, int64_t size) {
    sums.sum += lane_sum(size, [=](int64_t i) { return tile[i]; });
    if (std::is_same_v<decltype(type), double>) {
      sums.largest = std::max(sums.largest, largest(size, [=](int64_t i) { return std::fabs(tile[i]); }));
    }
  });
  if (const uint8_t* mask = entries.mask; mask != nullptr) {
    int32_t count = 0; // a part has at most 2^31 - 1 entries
#pragma omp simd reduction(+ : count)
    for (int64_t i = 0; i < entries.range.size; ++i) {
      count += mask[i] != 0 ? 1 : 0;
    }
    sums.count = count;
  }
  return sums;
}

double entry_squares(const Entries& entries, double mean, double unit) {
  double sum = 0;
  for_each_tile(entries, mean, [&](auto type, int64_t /*begin*/, const double* tile, int64_t size) {
    constexpr bool kHasUnit = std::is_same_v<decltype(type), double>;
    sum += lane_sum(size, [=](int64_t i) {
      const double scaled = kHasUnit ? tile[i] / unit : tile[i];
      return scaled * scaled;
    });
  });
  return sum;
}

// x / divisor. For float, the product with the reciprocal is precise enough, and the reciprocal is not too large.
template <class A>
GRADSCALE_HOST_DEVICE double quotient(double x, double divisor, double reciprocal) {
  return std::is_same_v<A, double> ? x / divisor : x * reciprocal;
}

void standardize_entries(const Entries& entries, const Standard& standard, void* to) {
  dispatch_entries(entries, [&](auto type, auto entry, auto counts) {
    using A = Accumulate<decltype(type)>;
    const int64_t size = entries.range.size;
    const double mean = standard.mean, divisor = standard.divisor, reciprocal = 1 / divisor;
    A* out = static_cast<A*>(to);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const double standardized = quotient<A>(entry(i) - mean, divisor, reciprocal);
      out[i] = counts(i) ? static_cast<A>(standardized) : A(0);
    }
  });
}

GradientSums gradient_sums(const Entries& entries, const Standard& standard, const void* gradients) {
  GradientSums sums{};
  for_each_tile(entries, standard.mean, [&](auto type, int64_t begin, const double* tile, int64_t size) {
    using A = Accumulate<decltype(type)>;
    const A* from = static_cast<const A*>(gradients) + begin;
    const uint8_t* mask = entries.mask == nullptr ? nullptr : entries.mask + begin;
    const double std = standard.std, reciprocal = 1 / std;
    alignas(64) double counted[kTile];
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const double gradient = from[i];
      counted[i] = mask == nullptr || mask[i] != 0 ? gradient : 0.0;
    }
    sums.sum += lane_sum(size, [&](int64_t i) { return counted[i]; });
    sums.projected += lane_sum(size, [&](int64_t i) { return counted[i] * quotient<A>(tile[i], std, reciprocal); });
  });
  return sums;
}

void entry_gradients(
    const Entries& entries, const Standard& standard, const GradientSums& sums, const void* gradients, void* to) {
  dispatch_entries(entries, [&](auto type, auto entry, auto counts) {
    using T = decltype(type);
    using A = Accumulate<T>;
    const int64_t size = entries.range.size;
    const double mean = standard.mean, std = standard.std, divisor = standard.divisor;
    const double reciprocal_std = 1 / std, reciprocal = 1 / divisor;
    const double mean_gradient = sums.sum / standard.count;
    const double slope = sums.projected / standard.count * (std / divisor);
    const A* from = static_cast<const A*>(gradients);
    T* out = static_cast<T*>(to);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const double rest = from[i] - mean_gradient - slope * quotient<A>(entry(i) - mean, std, reciprocal_std);
      const auto gradient = static_cast<A>(quotient<A>(rest, divisor, reciprocal));
      out[i] = from_accumulate<T, A>(counts(i) ? gradient : A(0));
    }
  });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
