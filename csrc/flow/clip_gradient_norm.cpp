// clip_gradient_norm, g * min(1, max_norm / |g|), and normalize_gradient, g * norm / |g|, with one norm for each group.
// `counts`, if given, is int64 [2]: norms seen, and norms clipped.
#include "group_norm.h"
#include "identity.h"

namespace gradscale {

namespace {

template <Rule rule>
struct Rescaled {
  static constexpr bool kClips = rule == Rule::clip;
  static constexpr const char* kName = kClips ? "clip_gradient_norm" : "normalize_gradient";
  static constexpr const char* kNodeName = kClips ? "ClipGradientNormBackward" : "NormalizeGradientBackward";
  static constexpr const char* kLimit = kClips ? "max_norm" : "norm";
  static constexpr bool kLinear = false;

  Value limit;
  NormGroups groups;
  at::Tensor counts; // only written, so that it need not be a saved variable

  template <class Self, class Visit>
  static void each(Self& self, Visit visit) {
    visit(kLimit, self.limit);
    visit("batch_dims", self.groups.batch_dims);
    visit("norm_type", self.groups.p);
    if constexpr (kClips) {
      visit("process_group", self.groups.process_group);
      visit("process_group_size", self.groups.process_group_size);
      visit("counts", self.counts);
    }
  }

  void check(const at::Tensor& x) const {
    groups.check(kName, x);
    check_limit(kName, kLimit, limit, x, groups);
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
    return rescaled(std::move(incoming), limit, groups, rule, counts);
  }

  bool keeps_zeros() const {
    return groups.batch_dims == 0;
  }
};

} // namespace

GRADSCALE_FLOW_OPERATOR(Rescaled<Rule::clip>, Value, int64_t, double, std::string, int64_t, std::optional<at::Tensor>)
GRADSCALE_FLOW_OPERATOR(Rescaled<Rule::normalize>, Value, int64_t, double)

} // namespace gradscale
