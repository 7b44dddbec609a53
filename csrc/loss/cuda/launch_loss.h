// How host code starts the kernels of the loss.
#pragma once

#include "../segment.h"

namespace gradscale {

// Computes losses and, where segments have a place for them, gradients. `workspace`: bytes_for_loss() bytes of the
// device, at a multiple of 8.
void launch_loss(const Pass& pass, void* workspace, void* stream);
// Computes the gradients alone, multiplied by grad_output.
void launch_loss_backward(const Pass& pass, void* workspace, void* stream);
int64_t bytes_for_loss(const Pass& pass);

} // namespace gradscale
