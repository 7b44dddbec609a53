// clip_gradient_value: clamp(g, min, max), where the bounds broadcast to x.
#include "identity.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/where.h>

#include <limits>

namespace gradscale {

namespace {

// A number in the gradient's type. PyTorch refuses a bound beyond its range; here the bound becomes infinite.
double rounded(double number, at::ScalarType dtype) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "clip_gradient_value", [&] {
    return static_cast<double>(static_cast<scalar_t>(number));
  });
}

// The derivative with respect to a bound is 0; with respect to an element within the bounds, or on one, it is 1.
at::Tensor clamped(const char* name, at::Tensor gradient, const Value& lowest, const Value& highest) {
  const double *low = std::get_if<double>(&lowest), *high = std::get_if<double>(&highest);
  if (low != nullptr && high != nullptr && fused(gradient, {})) {
    const double smallest = rounded(*low, gradient.scalar_type()), largest = rounded(*high, gradient.scalar_type());
    return owned_by_nobody_else(gradient) ? gradient.clamp_(smallest, largest) : gradient.clamp(smallest, largest);
  }
  const at::ScalarType widest = widest_type(gradient.device());
  const at::Tensor min = value_like(gradient, lowest, widest, name, "min");
  const at::Tensor max = value_like(gradient, highest, widest, name, "max");
  // Elements whose bounds have no number in between become NaN.
  const at::Tensor lower = at::where(min.le(max), min, std::numeric_limits<double>::quiet_NaN());
  const at::ScalarType precise = precise_type(gradient.scalar_type());
  return at::clamp(gradient.to(precise), lower.to(precise), max.to(precise)).to(gradient.scalar_type());
}

struct ClipGradientValue {
  static constexpr const char* kName = "clip_gradient_value";
  static constexpr const char* kNodeName = "ClipGradientValueBackward";
  static constexpr bool kLinear = false;
  static constexpr Overload kOverloads[] = {{"", 0}, {"tensor", 0b11}};

  Value min;
  Value max;

  template <class Self, class Visit>
  static void each(Self& self, Visit visit) {
    visit("min", self.min);
    visit("max", self.max);
  }

  void check(const at::Tensor& x) const {
    TORCH_CHECK_TYPE(!x.is_complex(), kName, ": complex numbers have no order, but the dtype of x is ", dtype_name(x));
    check_value(kName, "min", min, x, x.sym_sizes(), "the shape of x");
    check_value(kName, "max", max, x, x.sym_sizes(), "the shape of x");
    const Value low = read_if_free(min);
    const Value high = read_if_free(max);
    if (std::holds_alternative<double>(low) && std::holds_alternative<double>(high)) {
      const double smallest = std::get<double>(low);
      const double largest = std::get<double>(high);
      TORCH_CHECK_VALUE(
          smallest <= largest,
          kName,
          ": min must not be greater than max, and neither may be NaN, but they are ",
          smallest,
          " and ",
          largest);
    }
  }

  at::Tensor gradient(at::Tensor incoming) const {
    return clamped(kName, std::move(incoming), min, max);
  }

  bool keeps_zeros() const {
    const double* low = std::get_if<double>(&min);
    const double* high = std::get_if<double>(&max);
    return low != nullptr && high != nullptr && *low <= 0 && *high >= 0;
  }
};

} // namespace

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  register_operator<ClipGradientValue, Value, Value>(m);
}

} // namespace gradscale
