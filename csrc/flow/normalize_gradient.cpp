#include "flow.h"
#include "identity.h"

#include <torch/library.h>

namespace gradscale {

namespace {

struct NormalizeGradient {
  static constexpr const char* kName = "normalize_gradient";
  static constexpr const char* kNodeName = "NormalizeGradientBackward";

  Value norm;
  NormGroups groups;

  std::array<Value*, 1> values() {
    return {&norm};
  }

  std::vector<c10::IValue> others() const {
    return {groups.batch_dims, groups.p};
  }

  void check(const at::Tensor& x) const {
    groups.check(kName, x);
    check_limit(kName, "norm", norm, x, groups);
  }

  at::Tensor gradient(at::Tensor incoming) const {
    return rescaled(std::move(incoming), norm, groups, Rule::normalize, /*counts=*/at::Tensor());
  }

  at::Tensor tangent(const at::Tensor& /*incoming*/) const {
    no_forward_mode(kName);
  }

  bool keeps_zeros() const {
    return groups.batch_dims == 0;
  }
};

template <class Limit>
at::Tensor normalize_gradient_kernel(const at::Tensor& x, Limit norm, int64_t batch_dims, double norm_type) {
  return normalize_gradient(x, norm, {batch_dims, norm_type});
}

} // namespace

at::Tensor normalize_gradient(const at::Tensor& x, const Value& norm, const NormGroups& groups) {
  return apply_operator(x, NormalizeGradient{norm, groups});
}

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  m.def("normalize_gradient(Tensor(a) x, float norm, int batch_dims, float norm_type) -> Tensor(a)");
  m.def("normalize_gradient.tensor(Tensor(a) x, Tensor norm, int batch_dims, float norm_type) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(gradscale_ext, Autograd, m) {
  m.impl("normalize_gradient", normalize_gradient_kernel<double>);
  m.impl("normalize_gradient.tensor", normalize_gradient_kernel<const at::Tensor&>);
}

TORCH_LIBRARY_IMPL(gradscale_ext, CompositeExplicitAutograd, m) {
  m.impl("normalize_gradient", below_autograd(normalize_gradient_kernel<double>));
  m.impl("normalize_gradient.tensor", below_autograd(normalize_gradient_kernel<const at::Tensor&>));
}

} // namespace gradscale
