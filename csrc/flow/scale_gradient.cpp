#include "scale_gradient.h"

#include "../tensor_element.h"
#include "gradient_buffer.h"
#include "identity.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/cpu/Loops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

namespace gradscale {

namespace {

namespace autograd = torch::autograd;

// g * scale. Zeros stay connected to g for a second derivative.
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

// One pass over a CPU gradient; `scale` is of the type that products are taken in.
at::Tensor scaled_in_one_pass(at::Tensor gradient, const at::Tensor& scale) {
  at::Tensor out = owned_by_nobody_else(gradient) ? gradient : at::empty_like(gradient);
  at::TensorIterator iterator = at::TensorIteratorConfig()
                                    .add_output(out)
                                    .add_const_input(gradient)
                                    .add_const_input(scale)
                                    .check_all_same_dtype(false)
                                    .build();
  AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES_AND2(
      at::kHalf, at::kBFloat16, gradient.scalar_type(), "scale_gradient_backward", [&] {
        using product_t = at::opmath_type<scalar_t>;
        using scale_t = typename c10::scalar_value_type<product_t>::type;
        at::native::cpu_kernel(iterator, [](scalar_t g, scale_t s) -> scalar_t {
          return s == scale_t(0) ? scalar_t(0) : static_cast<scalar_t>(static_cast<product_t>(g) * s);
        });
      });
  return out;
}

at::Tensor scaled(at::Tensor gradient, const at::Tensor& scale) {
  if (scale.dim() == 0 && scale.device().is_cpu() && ordinary_context() && ordinary_tensor(scale)) {
    return scaled(std::move(gradient), scale.item<double>());
  }
  // A scale with dimensions takes part in type promotion: half gradients are multiplied in float, and rounded once.
  const at::ScalarType real = c10::toRealValueType(gradient.scalar_type());
  const at::ScalarType precise = real == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor factor = scale.to(gradient.device(), precise);
  if (!at::GradMode::is_enabled() && ordinary_context() && ordinary_tensor(gradient) && ordinary_tensor(factor)) {
    return scaled_in_one_pass(std::move(gradient), factor);
  }
  if (factor.dim() == 0 && gradient.dim() > 0) {
    factor = factor.unsqueeze(0);
  }
  const at::Tensor product = at::mul(gradient, factor);
  return at::where(factor.eq(0), at::zeros({}, product.options()), product).to(gradient.scalar_type());
}

struct ScaleGradientBackward : public autograd::Node {
  double number = 1;
  autograd::SavedVariable tensor; // in place of the number where it is set: a later change of it is noticed
  bool has_tensor = false;
  bool released = false;

  std::string name() const override {
    return "ScaleGradientBackward";
  }

  void release_variables() override {
    tensor.reset_data();
    released = has_tensor;
  }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    TORCH_CHECK(!released, autograd::ERR_BACKWARD_TWICE);
    at::Tensor gradient = std::move(gradients[0]);
    autograd::variable_list result(1);
    if (gradient.defined()) {
      result[0] = has_tensor ? scaled(std::move(gradient), tensor.unpack()) : scaled(std::move(gradient), number);
    }
    return result;
  }
};

// x with its gradient and tangent scaled by a number or a tensor; `keep` puts the scale into the node.
template <class Scale, class Keep>
at::Tensor with_scaled_gradient(const at::Tensor& x, const Scale& scale, Keep keep) {
  check_differentiable("scale_gradient", x);
  const at::Tensor tangent = x._fw_grad(/*level=*/0);
  if (!at::GradMode::is_enabled() && !tangent.defined()) {
    return without_gradient(x);
  }
  const at::Tensor result = operator_view(x);
  if (needs_gradient(x)) {
    ScaleGradientBackward* node = nullptr;
    const NodePtr handle = make_node(node);
    keep(*node);
    set_gradient_function(result, x, handle);
  }
  if (tangent.defined()) {
    result._set_fw_grad(scaled(tangent, scale), /*level=*/0, /*is_inplace_op=*/false);
  }
  return result;
}

at::Tensor autograd_number(const at::Tensor& x, double scale) {
  return with_scaled_gradient(x, scale, [&](ScaleGradientBackward& node) { node.number = scale; });
}

void check_scale(const at::Tensor& x, const at::Tensor& scale) {
  TORCH_CHECK_TYPE(
      !scale.is_complex(), "scale_gradient: scale must be real, but it is a tensor of dtype ", scale.scalar_type());
  TORCH_CHECK_VALUE(
      !scale.requires_grad() && !scale._fw_grad(/*level=*/0).defined(),
      "scale_gradient: scale requires grad, but it gets no gradient; detach() it");
  bool broadcasts = scale.dim() <= x.dim();
  for (int64_t i = 1; broadcasts && i <= scale.dim(); ++i) {
    broadcasts = scale.sym_size(-i) == 1 || scale.sym_size(-i) == x.sym_size(-i);
  }
  TORCH_CHECK_VALUE(
      broadcasts,
      "scale_gradient: scale must broadcast to the shape of x, ",
      x.sym_sizes(),
      ", but its shape is ",
      scale.sym_sizes());
  TORCH_CHECK_VALUE(
      scale.device() == x.device() || (scale.dim() == 0 && scale.device().is_cpu()),
      "scale_gradient: scale must be on the device of x, ",
      x.device(),
      ", but it is on ",
      scale.device());
}

at::Tensor autograd_tensor(const at::Tensor& x, const at::Tensor& scale) {
  check_differentiable("scale_gradient", x);
  check_scale(x, scale);
  return with_scaled_gradient(x, scale, [&](ScaleGradientBackward& node) {
    node.tensor = autograd::SavedVariable(scale, /*is_output=*/false);
    node.has_tensor = true;
  });
}

} // namespace

// The dispatcher would end at the same kernels; a transform, a tracer or a dispatch mode must see the operator.
at::Tensor scale_gradient(const at::Tensor& x, double scale) {
  if (ordinary_context()) {
    return autograd_number(x, scale);
  }
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("gradscale_ext::scale_gradient", "")
                                    .typed<at::Tensor(const at::Tensor&, double)>();
  return operation.call(x, scale);
}

at::Tensor scale_gradient(const at::Tensor& x, const at::Tensor& scale) {
  if (ordinary_context()) {
    return autograd_tensor(x, scale);
  }
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("gradscale_ext::scale_gradient", "tensor")
                                    .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return operation.call(x, scale);
}

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  m.def("scale_gradient(Tensor(a) x, float scale) -> Tensor(a)");
  m.def("scale_gradient.tensor(Tensor(a) x, Tensor scale) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(gradscale_ext, Autograd, m) {
  m.impl("scale_gradient", autograd_number);
  m.impl("scale_gradient.tensor", autograd_tensor);
}

TORCH_LIBRARY_IMPL(gradscale_ext, CompositeExplicitAutograd, m) {
  m.impl("scale_gradient", [](const at::Tensor& x, double /*scale*/) { return without_gradient(x); });
  m.impl("scale_gradient.tensor", [](const at::Tensor& x, const at::Tensor& /*scale*/) { return without_gradient(x); });
}

} // namespace gradscale
