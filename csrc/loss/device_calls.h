// How host code starts the kernels of the loss and of supports; the arguments of the latter.
#pragma once

#include "../port/table.h"
#include "segment.h"

namespace gradscale {

// Computes losses and, where segments have a place for them, gradients. `workspace`: bytes_for_loss() bytes of the
// device, at a multiple of 8.
void launch_loss(const Pass& pass, void* workspace, void* stream);
// Computes the gradients alone, multiplied by grad_output.
void launch_loss_backward(const Pass& pass, void* workspace, void* stream);
int64_t bytes_for_loss(const Pass& pass);

// Decodes `count` rows, or computes the gradient of that.
void launch_decode(const Decoding& decoding, int64_t count, char* workspace, void* stream);
int64_t bytes_for_decode(const Decoding& decoding);

// Encodes `count` scalars as distributions.
void launch_encode(const Encoding& encoding, int64_t count, void* stream);

// Projects `count` rows.
void launch_project(const Projection& projection, int64_t count, void* stream);

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

struct ProjectArguments {
  Projection projection;
  Support support;
  int64_t count;
};

} // namespace gradscale
