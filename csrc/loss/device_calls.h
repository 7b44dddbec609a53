// One call of the multi-step loss on a device, as plain numbers and pointers into its memory.
#pragma once

#include "segment.h"

namespace gradscale {

struct LossCall {
  const Segment* segments; // on the host, like all members but the last; those of a head are adjacent
  int64_t num_segments;
  const Head* heads;
  const Coefficients* coefficients; // by head
  int64_t num_heads;
  const double* step_weights;        // by step, where they are numbers and not in the coefficients; or null
  const double* step_gradient_scale; // likewise
  int64_t batch;
  bool each_sample;     // one loss a sample, instead of their sum
  bool counts_unmasked; // the forward pass finds the divisors of heads with a mask: the numbers of unmasked entries
  bool skip_nonfinite;  // a sample whose loss is not finite adds nothing

  // These are on the device.
  Slab per_sample;
  Slab loss;
  Slab head_means;
  Slab head_losses;
  int64_t* num_nonfinite;
  Slab skipped;     // with skip_nonfinite: per_sample once more, for the backward pass
  double* divisors; // by head, or null: its coefficients are divided by it; with counts_unmasked where it has a mask
  char* workspace;  // bytes_for_loss() bytes, at a multiple of 8
};

// The backward pass: gradients once more, multiplied by a factor of each sample that is read on the device, a scalar
// (stride 0) or one a sample. Where gradients for grad_output 1 are there already, a scalar 1 leaves them as they are.
struct LossBackward {
  Slab grad_output;
  bool has_gradients;
};

// Computes losses and, where segments have a place for them, gradients.
void launch_loss(const LossCall& call, void* stream);
// Computes the gradients alone, multiplied.
void launch_loss_backward(const LossCall& call, const LossBackward& backward, void* stream);
// The bytes of workspace that each of these calls needs.
int64_t bytes_for_loss(const LossCall& call);

// Decodes `count` rows, or computes the gradient of that.
void launch_decode(const Decoding& decoding, int64_t count, char* workspace, void* stream);
int64_t bytes_for_decode(const Decoding& decoding);

// Encodes `count` scalars as distributions.
void launch_encode(const Encoding& encoding, int64_t count, void* stream);

} // namespace gradscale
