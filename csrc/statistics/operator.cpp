// The passes as registered operators, which torch.compile keeps in its graphs. They give the same bits as in eager
// mode. A number that varies from call to call is passed as a tensor, because a number is a constant of the graph; the
// number before it is then ignored. On the meta device, results have shapes alone.
#include "statistics.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

namespace gradscale {

namespace {

using OptionalList = c10::List<std::optional<at::Tensor>>;
using Varying = std::optional<at::Tensor>; // a scalar on the CPU

double number_of(double number, const Varying& varying) {
  return varying && !varying->is_meta() ? varying->item<double>() : number;
}

OptionalTensors tensors_of(const OptionalList& list) {
  return {list.begin(), list.end()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> statistics_operator(
    const OptionalList& gradients, double p, const Varying& varying_p, const OptionalList& weights, bool rows) {
  std::optional<OptionalTensors> paired;
  if (!weights.empty()) {
    paired = tensors_of(weights);
  }
  auto [values, counts, norms] = tensor_statistics(tensors_of(gradients), number_of(p, varying_p), paired, rows);
  return {values, counts, norms.defined() ? norms : at::empty({2, 0}, values.options())};
}

at::Tensor clipping_operator(
    const at::Tensor& values,
    const at::Tensor& counts,
    double p,
    const Varying& varying_p,
    double max_norm,
    const std::optional<at::Tensor>& varying_max_norm, // on any device
    bool skip_nonfinite) {
  const Value limit = varying_max_norm ? Value(*varying_max_norm) : Value(max_norm);
  return clipping_of(values, counts, number_of(p, varying_p), limit, skip_nonfinite);
}

std::tuple<at::Tensor, at::Tensor> factors_operator(
    const at::Tensor& norms,
    const at::Tensor& clipping,
    double adaptive,
    const Varying& varying_adaptive,
    double eps,
    const Varying& varying_eps,
    bool skip_nonfinite) {
  return unit_factors(
      norms, clipping, number_of(adaptive, varying_adaptive), number_of(eps, varying_eps), skip_nonfinite);
}

} // namespace

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  m.def(
      "tensor_statistics(Tensor?[] gradients, float p, Tensor? varying_p, Tensor?[] weights, bool rows) -> (Tensor, "
      "Tensor, Tensor)");
  m.def(
      "clipping_of(Tensor values, Tensor counts, float p, Tensor? varying_p, float max_norm, Tensor? varying_max_norm, "
      "bool skip_nonfinite) -> Tensor");
  m.def(
      "unit_factors(Tensor norms, Tensor clipping, float adaptive, Tensor? varying_adaptive, float eps, Tensor? "
      "varying_eps, bool skip_nonfinite) -> (Tensor, Tensor)");
  m.def("clip_units(Tensor(a!)[] tensors, Tensor factors, bool rows, bool skip_nonfinite) -> ()");
}

TORCH_LIBRARY_IMPL(gradscale_ext, CompositeExplicitAutograd, m) {
  m.impl("tensor_statistics", statistics_operator);
  m.impl("clipping_of", clipping_operator);
  m.impl("unit_factors", factors_operator);
  m.impl("clip_units", clip_units);
}

// Statistics and factors are constants.
TORCH_LIBRARY_IMPL(gradscale_ext, Autograd, m) {
  for (const char* name : {"tensor_statistics", "clipping_of", "unit_factors", "clip_units"}) {
    m.impl(name, torch::CppFunction::makeFallthrough());
  }
}

} // namespace gradscale
