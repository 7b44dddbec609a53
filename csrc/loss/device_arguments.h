// The arguments of the kernels that decode and encode.
#pragma once

#include "../port/table.h"
#include "device_calls.h"

namespace gradscale {

// What a gradient takes of a support that is not raw, as a kernel uses it.
struct FloatSupport {
  float middle;
  float spacing; // of bins
  float eps;

  FloatSupport() = default;
  explicit FloatSupport(const Support& support)
      : middle(static_cast<float>(0.5 * (support.minimum + support.maximum))),
        spacing(static_cast<float>(bin_width(support))),
        eps(static_cast<float>(support.eps)) {
  }
};

struct DecodeArguments {
  Decoding decoding;
  Support support;
  FloatSupport rounded;
  int64_t count;
  int32_t threads_per_row; // where a group of threads has a row
  int32_t rows_of_warp;    // where a warp walks over rows
};

struct RawDecodeArguments {
  DecodeArguments decode;
  Table centers;
};

struct EncodeArguments {
  Encoding encoding;
  Support support;
  int64_t count;
  int32_t threads_per_row;
};

} // namespace gradscale
