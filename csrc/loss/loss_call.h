// One call of the multi-step loss on a device, as plain numbers and pointers into its memory.
#pragma once

#include "segment.h"

namespace gradscale {

struct LossCall {
  const Segment* segments; // on the host, as all that is not said to be elsewhere; a head's, one after the other
  int64_t num_segments;
  const Head* heads;
  const Coefficients* coefficients; // by head
  int64_t num_heads;
  const double* step_weights;        // by step, for numbers that are none of the coefficients'; or null
  const double* step_gradient_scale; // likewise
  int64_t batch;
  bool each_sample;    // one loss a sample, instead of their sum
  bool mean_of_kept;   // a head's coefficients are divided by how many entries its mask keeps, or by all without a mask
  bool skip_nonfinite; // a sample whose loss is not finite adds nothing

  // On the device.
  Slab per_sample;
  Slab loss;
  Slab head_means;
  int64_t* num_nonfinite;
  Slab skipped;    // of the forward pass with skip_nonfinite: per_sample once more, for the backward pass
  double* kept;    // entries that a head's mask keeps, by head; where mean_of_kept and there is a mask
  char* workspace; // bytes_for_loss() bytes, at a multiple of 8
};

// Gradients once more, now as another factor of each sample, read on the device, says: a scalar (stride 0) or one a
// sample. Where gradients for grad_output 1 are there already, a scalar 1 leaves them as they are.
struct LossBackward {
  Slab grad_output;
  bool has_gradients;
};

} // namespace gradscale
