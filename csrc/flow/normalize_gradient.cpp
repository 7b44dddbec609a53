#include "flow.h"
#include "identity.h"

namespace gradscale {

namespace {

struct NormalizeGradient {
  static constexpr const char* kName = "normalize_gradient";
  static constexpr const char* kNodeName = "NormalizeGradientBackward";

  Value norm;
  NormGroups groups;

  template <class Self, class Visit>
  static void each(Self& self, Visit visit) {
    visit("norm", self.norm);
    visit("batch_dims", self.groups.batch_dims);
    visit("norm_type", self.groups.p);
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

} // namespace

at::Tensor normalize_gradient(const at::Tensor& x, const Value& norm, const NormGroups& groups) {
  return apply_operator(x, NormalizeGradient{norm, groups});
}

GRADSCALE_FLOW_OPERATOR(NormalizeGradient)

} // namespace gradscale
