#include "flow.h"
#include "identity.h"

namespace gradscale {

namespace {

struct ClipGradientNorm {
  static constexpr const char* kName = "clip_gradient_norm";
  static constexpr const char* kNodeName = "ClipGradientNormBackward";

  Value max_norm;
  NormGroups groups;
  at::Tensor counts; // only written, so that it need not be a saved variable

  template <class Self, class Visit>
  static void each(Self& self, Visit visit) {
    visit("max_norm", self.max_norm);
    visit("batch_dims", self.groups.batch_dims);
    visit("norm_type", self.groups.p);
    visit("process_group", self.groups.process_group);
    visit("process_group_size", self.groups.process_group_size);
    visit("counts", self.counts);
  }

  void check(const at::Tensor& x) const {
    groups.check(kName, x);
    check_limit(kName, "max_norm", max_norm, x, groups);
    TORCH_CHECK_VALUE(
        !counts.defined() || counts.device() == x.device(),
        kName,
        ": the counters must be on the device of x, ",
        x.device(),
        ", but they are on ",
        counts.device(),
        "; move the module with .to()");
  }

  at::Tensor gradient(at::Tensor incoming) const {
    return rescaled(std::move(incoming), max_norm, groups, Rule::clip, counts);
  }

  at::Tensor tangent(const at::Tensor& /*incoming*/) const {
    no_forward_mode(kName);
  }

  bool keeps_zeros() const {
    return groups.batch_dims == 0;
  }
};

} // namespace

at::Tensor clip_gradient_norm(
    const at::Tensor& x, const Value& max_norm, const NormGroups& groups, const at::Tensor& counts) {
  return apply_operator(x, ClipGradientNorm{max_norm, groups, counts});
}

GRADSCALE_FLOW_OPERATOR(ClipGradientNorm)

} // namespace gradscale
