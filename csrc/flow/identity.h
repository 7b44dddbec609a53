// What all gradient-flow operators share: the result is x itself, with a gradient function of the operator's own.
#pragma once

#include "../autograd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/detach.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

namespace gradscale {

inline void check_differentiable(const char* name, const at::Tensor& x) {
  TORCH_CHECK_TYPE(
      x.is_floating_point() || x.is_complex(),
      name,
      ": x must be a floating or complex tensor, but its dtype is ",
      x.scalar_type());
  TORCH_CHECK_TYPE(!x.is_sparse() && !x.is_sparse_csr(), name, ": x must be dense, but its layout is ", x.layout());
}

inline bool needs_gradient(const at::Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad();
}

// A view without a graph; of a tensor that requires grad it is detached, as the result of any operation would be.
inline at::Tensor without_gradient(const at::Tensor& x) {
  return x.requires_grad() ? at::detach(x) : at::alias(x);
}

// A view for autograd, so that in-place operations on either side bump one version counter; marked as made by a custom
// function, so that an in-place operation that would lose the operator raises. Forward mode is left to the operator.
inline at::Tensor operator_view(const at::Tensor& x) {
  at::Tensor view;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    view = at::alias(x);
  }
  return torch::autograd::as_view(
      x,
      view,
      /*is_bw_differentiable=*/true,
      /*is_fw_differentiable=*/false,
      /*view_func=*/nullptr,
      /*rev_view_func=*/nullptr,
      torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
}

inline void set_gradient_function(const at::Tensor& result, const at::Tensor& x, const NodePtr& node) {
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  torch::autograd::set_history(result, node);
}

} // namespace gradscale
