// The memory of gradients on the CPU, and of other tensors with a number for each row: one pool for the whole process.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>

namespace gradscale {

// The first touch of fresh pages costs more than a loss. Memory of a tensor therefore returns to the pool when its
// storage is freed, wherever that happens, and later calls take it again.
//
// A block is used for tensors of a quarter of its size to its full size. When a new block is allocated, about as many
// bytes of smaller free blocks are freed, but none smaller than a quarter of it: losses of very different sizes that
// alternate keep their memory. A free block that 16 calls did not take is freed. A block that a tensor held for more
// than 16 calls is freed with the tensor, so that the pool does not grow for a user who keeps many of them.

// Begins a call that may take memory from the pool: frees blocks that recent calls did not take. Does nothing for
// devices, which have allocators of their own.
void begin_pooled_call(c10::Device device);

// A contiguous tensor. On the CPU its memory is taken from the pool; it owns its storage, which is freed, resized and
// shared like any other.
at::Tensor empty_pooled(at::IntArrayRef sizes, const at::TensorOptions& options);

// True if a tensor of `count` numbers is on the CPU, and so large that the first touch of its pages takes long.
bool is_large(const at::TensorOptions& options, const c10::SymInt& count);

// A contiguous tensor, from the pool if it is large.
at::Tensor empty_large(at::IntArrayRef sizes, const at::TensorOptions& options);

// Frees the blocks that no tensor uses; returns their bytes.
int64_t release_gradient_pool();

} // namespace gradscale
