// scale_gradient and reverse_gradient: the gradient, and in forward mode the tangent, times `scale` or -`scale`, which
// broadcasts to x. A scale of 0 gives exact zeros, also where the gradient is inf or NaN.
#include "../cpu/range.h"
#include "../cuda/driver.h"
#include "identity.h"
#include "kernels.h"

#include <ATen/ScalarOps.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace gradscale {

namespace {

at::Tensor scaled(at::Tensor gradient, const at::Tensor& scale, double sign);

// g * scale. Zeros stay connected to g for a second derivative.
at::Tensor scaled(at::Tensor gradient, double scale) {
  scale = rounded_to(scale, precise_type(gradient.scalar_type()));
  if (scale == 1) {
    return gradient;
  }
  const at::ScalarType type = gradient.scalar_type();
  if (at::isFloat8Type(type)) { // PyTorch has no arithmetic for it
    return scaled(gradient.to(at::kFloat), scale).to(type);
  }
  if (scale == 0) {
    if (at::GradMode::is_enabled() || at::isTensorSubclassLike(gradient)) {
      return gradient.masked_fill(at::ones({}, gradient.options().dtype(at::kBool)), 0);
    }
    return owned_by_nobody_else(gradient) ? gradient.zero_() : at::zeros_like(gradient);
  }
  if (type == at::kComplexHalf) { // as pairs of numbers, because a complex product rounds the scale to 16 bits
    const at::Tensor number = at::scalar_tensor(scale, gradient.options().dtype(at::kFloat));
    return scaled(std::move(gradient), number, /*sign=*/1);
  }
  if (owned_by_nobody_else(gradient)) { // mul_(number) would round the number to a 16-bit gradient's type
    return type == at::kHalf || type == at::kBFloat16 ? gradient.mul_(at::native::wrapped_scalar_tensor(scale))
                                                      : gradient.mul_(scale);
  }
  return gradient.mul(scale);
}

void launch_scale(const ScaleCall& call, const OnDevice& device) {
  const int64_t size = element_size(call.element);
  const int64_t sum_bytes = call.element == Element::float64 ? 8 : 4;
  const bool contiguous = call.dims == 1 && call.strides[0][0] == size && call.strides[1][0] == size;
  const bool dense = call.count == 1 || (contiguous && (call.strides[2][0] == 0 || call.strides[2][0] == sum_bytes));
  const int64_t elements = dense ? kElementsOfBlock : kThreads; // of a block
  const std::string name = instance(dense ? "scale_dense" : "scale_broadcast", {type_name(call.element)});
  device.launch("flow/cuda/scale_gradient.cuh", name, (call.count + elements - 1) / elements, kThreads, call);
}

constexpr const char* name_of(double sign) {
  return sign > 0 ? "scale_gradient" : "reverse_gradient";
}

at::Tensor scale_like(const at::Tensor& gradient, const at::Tensor& scale, double sign) {
  return value_like(gradient, scale, precise_type(gradient.scalar_type()), name_of(sign), "scale");
}

// sign * g * scale, in the gradient's memory if it has no other owner; empty if the kernels do not accept these
// tensors. Complex numbers are processed as pairs of numbers with the same scale.
std::optional<at::Tensor> scaled_by_kernel(const at::Tensor& gradient, const at::Tensor& scale, double sign) {
  if (!fused(gradient, {})) {
    return std::nullopt;
  }
  const bool on_device = runs_kernels(gradient.device());
  const bool is_read_there =
      on_device && scale.dim() == 0 && scale.scalar_type() == at::kDouble && scale.device() == gradient.device();
  at::Tensor factor = is_read_there ? scale : scale_like(gradient, scale, sign);
  if (!fused(gradient, {factor})) {
    return std::nullopt;
  }
  if (gradient.numel() == 0) {
    return gradient;
  }
  factor = sign == 1 ? factor : factor.neg();
  at::Tensor out = owned_by_nobody_else(gradient) ? gradient : at::empty_like(gradient);
  const bool pairs = gradient.is_complex();
  at::TensorIterator iterator = at::TensorIteratorConfig()
                                    .check_all_same_dtype(false)
                                    .add_owned_output(pairs ? at::view_as_real(out) : out)
                                    .add_owned_const_input(pairs ? at::view_as_real(gradient) : gradient)
                                    .add_owned_const_input(pairs ? factor.unsqueeze(-1) : factor)
                                    .build();
  const Element element = element_of(gradient);
  if (!on_device) {
    iterator.for_each(
        [=](char** data, const int64_t* strides, int64_t size) { scale_kernel(element, data, strides, size); });
    return out;
  }
  if (iterator.ndim() > ScaleCall::kMaxDims) {
    return std::nullopt;
  }
  ScaleCall call{element, factor.scalar_type() == at::kDouble, iterator.ndim(), iterator.numel(), {}, {}, {}};
  std::copy(iterator.shape().begin(), iterator.shape().end(), call.sizes);
  for (int operand = 0; operand < 3; ++operand) {
    call.data[operand] = iterator.data_ptr(operand);
    std::copy(iterator.strides(operand).begin(), iterator.strides(operand).end(), call.strides[operand]);
  }
  launch_scale(call, OnDevice(gradient.device()));
  return out;
}

at::Tensor scaled(at::Tensor gradient, const at::Tensor& scale, double sign) {
  if (const auto product = scaled_by_kernel(gradient, scale, sign)) {
    return *product;
  }
  // Real and imaginary parts are multiplied separately: a complex product would spread NaN or inf to the other part.
  const bool pairs = gradient.is_complex();
  const at::Tensor numbers = pairs                                      ? at::view_as_real(gradient.resolve_conj())
                             : at::isFloat8Type(gradient.scalar_type()) ? gradient.to(at::kFloat)
                                                                        : gradient;
  // A scale with dimensions takes part in type promotion: 16-bit gradients are multiplied in float, and rounded once.
  at::Tensor factor = scale_like(gradient, scale, sign);
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
  static constexpr const char* kName = name_of(sign);
  static constexpr const char* kNodeName = sign > 0 ? "ScaleGradientBackward" : "ReverseGradientBackward";
  static constexpr bool kLinear = true;
  static constexpr Overload kOverloads[] = {{"", 0}, {"tensor", 0b1}};

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

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  register_operator<ScaledBy<1>, Value>(m);
  register_operator<ScaledBy<-1>, Value>(m);
}

} // namespace gradscale
