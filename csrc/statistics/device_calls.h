// The calls of passes over many tensors to a device, as plain numbers and pointers into its memory.
#pragma once

#include "../formulas/slab.h"
#include "../formulas/statistics.h"

namespace gradscale {

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
