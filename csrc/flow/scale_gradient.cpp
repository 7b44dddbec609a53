#include "scale_gradient.h"

#include "../autograd.h"
#include "../tensor_element.h"
#include "gradient_buffer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/detach.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

namespace gradscale {

namespace {

namespace autograd = torch::autograd;

// g * scale. A scale of 0 gives exact zeros also where g is inf or NaN, and stays connected to g for double backward.
at::Tensor scaled(at::Tensor gradient, double scale) {
  if (scale == 1) {
    return gradient;
  }
  if (scale == 0) {
    if (at::GradMode::is_enabled() || at::isTensorSubclassLike(gradient)) {
      return gradient.masked_fill(at::ones({}, gradient.options().dtype(at::kBool)), 0);
    }
    return owned_by_nobody_else(gradient) ? gradient.zero_() : at::zeros_like(gradient);
  }
  return owned_by_nobody_else(gradient) ? gradient.mul_(scale) : gradient.mul(scale);
}

struct ScaleGradientBackward : public autograd::Node {
  double scale = 1;

  std::string name() const override {
    return "ScaleGradientBackward";
  }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    at::Tensor gradient = std::move(gradients[0]);
    if (!gradient.defined()) {
      return {at::Tensor()};
    }
    autograd::variable_list result(1);
    result[0] = scaled(std::move(gradient), scale);
    return result;
  }
};

// A view without a graph; of a tensor that requires grad it is detached, as the result of any operation would be.
at::Tensor without_gradient(const at::Tensor& x, double /*scale*/ = 1) {
  return x.requires_grad() ? at::detach(x) : at::alias(x);
}

// What PyTorch runs for the Autograd keys.
at::Tensor scale_gradient_autograd(const at::Tensor& x, double scale) {
  TORCH_CHECK_TYPE(
      x.is_floating_point() || x.is_complex(),
      "scale_gradient: x must be a floating or complex tensor, but its dtype is ",
      x.scalar_type());
  const bool needs_gradient = at::GradMode::is_enabled() && x.requires_grad();
  const at::Tensor tangent = x._fw_grad(/*level=*/0);
  if (!needs_gradient && !tangent.defined()) {
    return without_gradient(x);
  }
  at::Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = at::alias(x);
  }
  // A view for autograd, so that in-place operations on either side bump one version counter; marked as made by a
  // custom function, so that an in-place operation that would drop the scale raises.
  result = autograd::as_view(
      x,
      result,
      /*is_bw_differentiable=*/true,
      /*is_fw_differentiable=*/false,
      /*view_func=*/nullptr,
      /*rev_view_func=*/nullptr,
      autograd::CreationMeta::IN_CUSTOM_FUNCTION);
  if (needs_gradient) {
    ScaleGradientBackward* node = nullptr;
    const NodePtr handle = make_node(node);
    node->scale = scale;
    node->set_next_edges(autograd::collect_next_edges(x));
    autograd::set_history(result, handle);
  }
  if (tangent.defined()) {
    result._set_fw_grad(scaled(tangent, scale), /*level=*/0, /*is_inplace_op=*/false);
  }
  return result;
}

} // namespace

at::Tensor scale_gradient(const at::Tensor& x, double scale) {
  // The dispatcher would end at the same kernel; a transform, a tracer or a dispatch mode must see the operator.
  if (ordinary_context()) {
    return scale_gradient_autograd(x, scale);
  }
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("gradscale_ext::scale_gradient", "")
                                    .typed<at::Tensor(const at::Tensor&, double)>();
  return operation.call(x, scale);
}

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  m.def("scale_gradient(Tensor(a) x, float scale) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(gradscale_ext, Autograd, m) {
  m.impl("scale_gradient", scale_gradient_autograd);
}

TORCH_LIBRARY_IMPL(gradscale_ext, CompositeExplicitAutograd, m) {
  m.impl("scale_gradient", without_gradient);
}

} // namespace gradscale
