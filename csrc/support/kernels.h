// Calls of the kernels that decode, encode and project: plain numbers and pointers, no tensors.
#pragma once

#include "../cuda/table.h"
#include "../formulas/element.h"
#include "../formulas/support.h"

namespace gradscale {

// Rows to decode. If `gradient` has data, the derivative times `grad_output` is written there, and nothing to `out`.
struct Decoding {
  Rows logits;
  int64_t count; // rows
  Support support;
  Slab out;
  Rows gradient;
  Slab grad_output;
};

// Scalars, and the rows of distributions over bins that they are encoded as, in the type of the scalars.
struct Encoding {
  Rows scalars; // one element each
  Rows out;
  int64_t count; // rows
  Support support;
  double sigma_ratio; // 0: two-hot
};

// Rows of probabilities to project: the atoms of a row are its reward + its discount times the raw centres.
struct Projection {
  Rows probabilities;
  Rows rewards; // one element each, like the discounts
  Rows discounts;
  Rows out;      // float or double
  int64_t count; // rows
  Support support;
};

using DecodeRows = void (*)(const Decoding&, int64_t begin, int64_t end, double* scratch);
extern const DecodeRows decode_rows_kernel;

// `centers` are the raw ones; `scratch` has kProjectScratch * num_bins numbers.
using ProjectRows = void (*)(const Projection&, const double* centers, int64_t begin, int64_t end, double* scratch);
constexpr int64_t kProjectScratch = 5;
extern const ProjectRows project_rows_kernel;

// ---- On a device

// True if sums of exponentials times centres are finite in decode_by_lanes and LossRows.
inline bool has_small_centers(const Support& support) {
  constexpr float largest = 0x1p40f; // exponentials may be up to 2^64
  const float* centers = support.raw_centers_float;
  return !support.raw || (std::abs(centers[0]) <= largest && std::abs(centers[support.num_bins - 1]) <= largest);
}

// The numbers of a support in float, for decode_by_lanes. Raw centres are not transformed.
struct FloatSupport {
  float middle;
  float spacing; // of bins
  float eps;

  FloatSupport() = default;
  explicit FloatSupport(const Support& support)
      : middle(support.raw ? 0 : static_cast<float>(0.5 * (support.minimum + support.maximum))),
        spacing(support.raw ? 1 : static_cast<float>(bin_width(support))),
        eps(static_cast<float>(support.eps)) {
  }
};

struct LaneDecoding {
  Decoding decoding;
  FloatSupport rounded;
  int32_t rows_per_warp;
};

struct RawLaneDecoding : LaneDecoding {
  Table raw_centers; // float
};

struct GroupDecoding {
  Decoding decoding;
  Table raw_centers; // in the type of sums; empty if the support is not raw
};

} // namespace gradscale
