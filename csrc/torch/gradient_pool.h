// The memory of gradients on the CPU: one pool for the whole process.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gradscale {

// The first touch of fresh pages costs more than a loss. Memory of a gradient therefore returns to the pool when its
// storage is freed, wherever that happens, and later calls take it again.
//
// A block serves for gradients of a quarter of its size and more. A new block replaces free blocks for which it would
// serve as well, so that losses of very different sizes in turns keep their memory. A block that no call takes for 16
// calls is freed, and so is one that a tensor held for longer: a user who keeps many gradients gets no pool of that
// size.

// A call that will take gradients begins.
void begin_pooled_call();

// A contiguous tensor on the CPU. It owns its storage, which is freed, resized and shared like any other.
at::Tensor empty_gradient(at::IntArrayRef sizes, at::ScalarType dtype);

// Moves the memory of a gradient to the tensor that is returned. The gradient gets other memory of the same size with
// undefined content, and `was_moved` returns true for it. Returns an undefined tensor if the memory is not the pool's,
// or has other users.
at::Tensor move_gradient(const at::Tensor& gradient);
bool was_moved(const at::Tensor& gradient);

// Frees the blocks that no tensor uses; returns their bytes.
int64_t release_gradient_pool();

} // namespace gradscale
