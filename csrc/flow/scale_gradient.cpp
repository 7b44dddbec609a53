// scale_gradient and reverse_gradient: the gradient, and in forward mode the tangent, times `scale` or -`scale`, which
// broadcasts to x. A scale of 0 gives exact zeros, also where the gradient is inf or NaN.
#include "elementwise.h"
#include "identity.h"

#include <ATen/ops/complex.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace gradscale {

namespace {

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
  // PyTorch's in-place multiplication of a 16-bit gradient would round the scale to the gradient's type.
  if (c10::elementSize(c10::toRealValueType(gradient.scalar_type())) == 2) {
    const auto product = elementwise(ElementFunction::multiply, gradient, {scale});
    return product ? *product : gradient.mul(scale);
  }
  return owned_by_nobody_else(gradient) ? gradient.mul_(scale) : gradient.mul(scale);
}

at::Tensor scaled(at::Tensor gradient, const at::Tensor& scale, double sign) {
  const auto function = sign == 1 ? ElementFunction::multiply : ElementFunction::multiply_negated;
  if (const auto product = elementwise(function, gradient, {scale})) {
    return *product;
  }
  // Real and imaginary parts are multiplied separately: a complex product would spread NaN or inf to the other part.
  const bool pairs = gradient.is_complex();
  const at::Tensor numbers = pairs ? at::view_as_real(gradient.resolve_conj()) : gradient;
  // A scale with dimensions takes part in type promotion: 16-bit gradients are multiplied in float, and rounded once.
  at::Tensor factor = value_like(gradient, scale);
  if (factor.dim() == 0 && gradient.dim() > 0) {
    factor = factor.unsqueeze(0);
  }
  factor = pairs ? factor.unsqueeze(-1) : factor;
  at::Tensor product = at::mul(numbers, sign == 1 ? factor : factor.neg());
  product = at::where(factor.eq(0), at::zeros({}, product.options()), product);
  return pairs ? at::complex(product.select(-1, 0), product.select(-1, 1)) : product.to(gradient.scalar_type());
}

template <int sign>
struct ScaledBy {
  static constexpr const char* kName = sign > 0 ? "scale_gradient" : "reverse_gradient";
  static constexpr const char* kNodeName = sign > 0 ? "ScaleGradientBackward" : "ReverseGradientBackward";
  static constexpr bool kLinear = true;

  Value scale;

  template <class Self, class Visit>
  static void each(Self& self, Visit visit) {
    visit("scale", self.scale);
  }

  void check(const at::Tensor& x) const {
    check_value(kName, "scale", scale, x, x.sym_sizes(), "the shape of x");
  }

  at::Tensor gradient(at::Tensor incoming) const {
    const double* number = std::get_if<double>(&scale);
    return number != nullptr ? scaled(std::move(incoming), sign * *number)
                             : scaled(std::move(incoming), std::get<at::Tensor>(scale), sign);
  }

  bool keeps_zeros() const {
    return std::holds_alternative<double>(scale);
  }
};

} // namespace

GRADSCALE_FLOW_OPERATOR(ScaledBy<1>, Value)
GRADSCALE_FLOW_OPERATOR(ScaledBy<-1>, Value)

} // namespace gradscale
