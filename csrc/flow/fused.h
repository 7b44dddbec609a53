// The gradients that the C++ kernels process, and those whose memory may be overwritten.
#pragma once

#include "../torch/tensor_element.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <algorithm>
#include <initializer_list>

namespace gradscale {

// True if `gradient`, as a backward function received it, has no other owner, so that its memory may be overwritten: no
// graph of the backward pass is built, no other tensor shares the storage, and the memory is PyTorch's own (a buffer
// that came from NumPy or DLPack is not resizable).
inline bool owned_by_nobody_else(const at::Tensor& gradient) {
  return !at::GradMode::is_enabled() && torch::autograd::impl::is_tensor_stealable(gradient) &&
         gradient.layout() == at::kStrided && !at::isTensorSubclassLike(gradient) && !gradient._is_zerotensor() &&
         !gradient.is_conj() && !gradient.is_neg() && !gradient.is_inference() && gradient.has_storage() &&
         gradient.storage().use_count() == 1 && gradient.storage().unsafeGetStorageImpl()->resizable() &&
         gradient.is_non_overlapping_and_dense();
}

// True if the C++ kernels can process a gradient with these arguments: no graph is being recorded, and all defined
// tensors are ordinary tensors on one device.
inline bool fused(const at::Tensor& gradient, std::initializer_list<at::Tensor> arguments) {
  if (at::GradMode::is_enabled() || !ordinary_context() || !ordinary_tensor(gradient) ||
      !has_element(c10::toRealValueType(gradient.scalar_type()))) {
    return false;
  }
  return std::all_of(arguments.begin(), arguments.end(), [&](const at::Tensor& argument) {
    return !argument.defined() || (ordinary_tensor(argument) && argument.device() == gradient.device());
  });
}

} // namespace gradscale
