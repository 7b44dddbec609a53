#include "flow.h"
#include "identity.h"

#include <torch/library.h>

namespace gradscale {

namespace {

struct ClipGradientNorm {
  static constexpr const char* kName = "clip_gradient_norm";
  static constexpr const char* kNodeName = "ClipGradientNormBackward";

  Value max_norm;
  NormGroups groups;
  at::Tensor counts; // written, never read: no saved variable

  std::array<Value*, 1> values() {
    return {&max_norm};
  }

  std::vector<c10::IValue> others() const {
    return {groups.batch_dims, groups.p, groups.process_group, groups.process_group_size, counts};
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

template <class Limit>
at::Tensor clip_gradient_norm_kernel(
    const at::Tensor& x,
    Limit max_norm,
    int64_t batch_dims,
    double norm_type,
    std::string process_group,
    int64_t process_group_size,
    const std::optional<at::Tensor>& counts) {
  return clip_gradient_norm(
      x,
      max_norm,
      {batch_dims, norm_type, std::move(process_group), process_group_size},
      counts.value_or(at::Tensor()));
}

} // namespace

at::Tensor clip_gradient_norm(
    const at::Tensor& x, const Value& max_norm, const NormGroups& groups, const at::Tensor& counts) {
  return apply_operator(x, ClipGradientNorm{max_norm, groups, counts});
}

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  m.def(
      "clip_gradient_norm(Tensor(a) x, float max_norm, int batch_dims, float norm_type, str process_group, "
      "int process_group_size, Tensor? counts) -> Tensor(a)");
  m.def(
      "clip_gradient_norm.tensor(Tensor(a) x, Tensor max_norm, int batch_dims, float norm_type, str process_group, "
      "int process_group_size, Tensor? counts) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(gradscale_ext, Autograd, m) {
  m.impl("clip_gradient_norm", clip_gradient_norm_kernel<double>);
  m.impl("clip_gradient_norm.tensor", clip_gradient_norm_kernel<const at::Tensor&>);
}

TORCH_LIBRARY_IMPL(gradscale_ext, CompositeExplicitAutograd, m) {
  m.impl("clip_gradient_norm", below_autograd(clip_gradient_norm_kernel<double>));
  m.impl("clip_gradient_norm.tensor", below_autograd(clip_gradient_norm_kernel<const at::Tensor&>));
}

} // namespace gradscale
