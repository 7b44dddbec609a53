// Kernels of the CPU that standardize entries.
#pragma once

#include "../cpu/range.h"

namespace gradscale {

// Contiguous entries, less an `origin` that makes them small if all entries are large.
struct Entries {
  Range range;
  const uint8_t* mask; // 0 for entries that do not count; null: all count
  double origin;

  Entries part(int64_t begin, int64_t size) const {
    return {range.part(begin, size), mask == nullptr ? mask : mask + begin, origin};
  }
};

// Sums over the entries that count.
struct EntrySums {
  int64_t count;
  double sum;
  double largest; // magnitude, of float64 entries, whose squares may overflow or underflow; 1 for other entries
};

using SumsOfEntries = EntrySums (*)(const Entries&);
extern const SumsOfEntries entry_sums_kernel;

// Computes the sum of ((entry - mean) / unit)^2 over the entries that count.
using SquaresOfEntries = double (*)(const Entries&, double mean, double unit);
extern const SquaresOfEntries entry_squares_kernel;

// A standardized entry is (entry - mean) / divisor. If all entries are equal, `std` is 1 and `divisor` infinite.
struct Standard {
  double count; // of the entries that count, at least 1
  double mean;
  double std;
  double divisor;
};

// Writes standardized entries, and 0 for entries that do not count, as float64 or float32.
using StandardizeEntries = void (*)(const Entries&, const Standard&, void* to);
extern const StandardizeEntries standardize_kernel;

// Sums over the gradients of the standardized entries that count.
struct GradientSums {
  double sum;
  double projected; // the sum of gradient * (entry - mean) / std
};

// Gradients are float64 or float32, as the standardized entries.
using SumsOfGradients = GradientSums (*)(const Entries&, const Standard&, const void* gradients);
extern const SumsOfGradients gradient_sums_kernel;

// Writes the gradients of the entries, in their type. `sums` are the sums over all parts.
using GradientsOfEntries =
    void (*)(const Entries&, const Standard&, const GradientSums& sums, const void* gradients, void* to);
extern const GradientsOfEntries entry_gradients_kernel;

} // namespace gradscale
