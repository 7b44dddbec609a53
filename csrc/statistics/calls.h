// The calls of passes over many tensors, on a CPU and on a device, as plain numbers and pointers.
#pragma once

#include "../cpu/range.h"
#include "../formulas/element.h"
#include "../formulas/statistics.h"

namespace gradscale {

// ---- On a CPU: a range of elements at a time ------------------------------------------------------------------------

// The range has real numbers, and at most 2^31 - 1 of them.
using StatisticsOfRange = void (*)(const Range&, double p, ChunkStatistics& out);
extern const CpuKernel<StatisticsOfRange> statistics_kernel;

// Squared norms of real numbers, and of what has been added to them since, which are stored at `after`. Sums of squares
// of double may overflow.
struct UpdateSquares {
  double before;
  double update;
};

using UpdateOfRange = UpdateSquares (*)(const Range& before, const void* after);
extern const CpuKernel<UpdateOfRange> update_kernel;

// ---- On a device ----------------------------------------------------------------------------------------------------

// A contiguous tensor.
struct DeviceRange {
  const void* data;
  void* out; // memory of a result, of the same type
  int64_t size;
  Element element;
  int64_t implicit_zeros = 0; // zeros that a sparse tensor does not store, for statistics; -1: there is no tensor
};

// loss = factor * sum of squares; or out = data * factor * grad_output.
struct SquaresCall {
  const DeviceRange* ranges; // on the host
  int64_t count;
  double factor;
  Slab loss;        // written by the forward pass
  Slab grad_output; // read by the backward pass
  char* workspace;  // bytes_for_squares() bytes, at a multiple of 8
};

struct StatisticsCall {
  const DeviceRange* ranges; // on the host, out.count of them
  double p;
  StatisticsOut out;
  char* workspace; // bytes_for_statistics() bytes, at a multiple of 8
};

// out = (total norm, factor, whether it changes anything), from statistics.
struct ClippingCall {
  const double* values;
  const int64_t* counts;
  int64_t count;
  double p;
  double max_norm;
  bool skip_nonfinite;
  double* out;
};

// out = data * factor.
struct ClipCall {
  const DeviceRange* ranges; // on the host
  int64_t count;
  const double* factor;
  bool zeros;      // a factor of 0 leaves zeros, whatever the elements were
  char* workspace; // bytes_for_clip() bytes, at a multiple of 8
};

// A contiguous tensor of `count` units, which have `length` numbers each.
struct UnitRange {
  void* data;
  int64_t count;
  int64_t length; // at least 1
  Element element;
  int64_t first; // the index of the first unit among the norms or factors of all units
};

// norms[first + i] = norm of unit i.
struct UnitNormsCall {
  const UnitRange* ranges; // on the host
  int64_t count;
  double* norms;
  char* workspace; // bytes_for_unit_norms() bytes, at a multiple of 8
};

// unit i *= factors[first + i]
struct ClipUnitsCall {
  const UnitRange* ranges; // on the host
  int64_t count;
  const double* factors;
  bool zeros;      // a factor of 0 leaves zeros, whatever the elements were
  char* workspace; // bytes_for_clip_units() bytes, at a multiple of 8
};

void launch_squares(const SquaresCall& call, void* stream);
void launch_squares_backward(const SquaresCall& call, void* stream);
int64_t bytes_for_squares(const SquaresCall& call);

void launch_statistics(const StatisticsCall& call, void* stream);
int64_t bytes_for_statistics(const StatisticsCall& call);

void launch_clipping(const ClippingCall& call, void* stream);
void launch_clip(const ClipCall& call, void* stream);
int64_t bytes_for_clip(const ClipCall& call);

void launch_unit_norms(const UnitNormsCall& call, void* stream);
int64_t bytes_for_unit_norms(const UnitNormsCall& call);

void launch_clip_units(const ClipUnitsCall& call, void* stream);
int64_t bytes_for_clip_units(const ClipUnitsCall& call);

} // namespace gradscale
