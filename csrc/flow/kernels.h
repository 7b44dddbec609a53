// The arguments of the gradient operators' kernels, on a CPU and on a device: plain numbers and pointers.
#pragma once

#include "../formulas/element.h"
#include "../formulas/norms.h"

namespace gradscale {

// On a device: out = scaled_element(gradient, scale), broadcast. Complex gradients are pairs.
struct ScaleCall {
  static constexpr int kMaxDims = 8;

  Element element; // of out and gradient; the scale is of the type of sums
  bool is_double;  // the scale in memory is double, even if sums are float
  int32_t dims;
  int64_t count;
  int64_t sizes[kMaxDims];      // the fastest dimension first
  int64_t strides[3][kMaxDims]; // in bytes
  void* data[3];                // out, gradient, scale
};

constexpr int64_t kElementsOfBlock = 4096; // of contiguous tensors: 2, 4 or 8 vectors of 16 bytes per thread

// Groups of contiguous elements, rescaled by their norms, on a CPU or a device. Complex elements are pairs of numbers;
// p must be 2 for them.
struct RescaleCall {
  const void* from;
  void* to; // may be `from`
  Element element;
  int64_t groups;
  int64_t size; // numbers in a group
  double p;
  Rule rule;
  double limit;
  const double* limits;  // by group; null: `limit` for all
  int64_t limits_stride; // 0: one for all
  PowerSum* sums;        // on a device: of the chunks of long groups, set in clip_gradient_norm.cpp
};

GRADSCALE_HOST_DEVICE double limit_of(const RescaleCall& call, int64_t group) {
  return call.limits == nullptr ? call.limit : call.limits[group * call.limits_stride];
}

constexpr int64_t kShortGroup = 8192; // elements; the groups that are processed at a time fit into the cache

// The chunks of a long group: so few that reading their sums takes little time compared with reading the elements.
struct Chunks {
  int64_t size;
  int64_t count;
};

GRADSCALE_HOST_DEVICE Chunks chunks_of(const RescaleCall& call) {
  const int64_t size = call.size / 1024 > 32768 ? (call.size / 1024 + 31) / 32 * 32 : 32768;
  return {size, (call.size + size - 1) / size};
}

} // namespace gradscale
