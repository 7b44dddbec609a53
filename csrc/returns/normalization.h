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

// Of the entries that count.
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

// Writes (entry - mean) / divisor for entries that count, and 0 for others, as float64 or float32.
using StandardizeEntries = void (*)(const Entries&, double mean, double divisor, void* to);
extern const StandardizeEntries standardize_kernel;

} // namespace gradscale
