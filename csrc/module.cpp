// The front door of the C++ side. Operators that the compiler must see register themselves with TORCH_LIBRARY in their
// own files; this pybind11 module holds the entry points of eager mode, whose calls cost least.
#include "flow/flow.h"
#include "loss/decode.h"
#include "loss/multi_step_loss.h"
#include "tensor_element.h"
#include "tensors/l2_loss.h"

#include <ATen/Version.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>

namespace {

using gradscale::Head;
using gradscale::NormGroups;
using gradscale::Plan;
using gradscale::Value;

gradscale::Support make_support(double minimum, double maximum, double eps, int32_t num_bins, int32_t transform) {
  return {minimum, maximum, eps, num_bins, static_cast<gradscale::Transform>(transform)};
}

// One row of the table: kind, first_step, weight, minimum, maximum, eps, num_bins, transform.
using Row = std::tuple<int32_t, int32_t, double, double, double, double, int32_t, int32_t>;

std::shared_ptr<Plan> make_plan(py::dict heads, const std::vector<Row>& table, bool keeps_memory) {
  auto plan = std::make_shared<Plan>(keeps_memory);
  for (const auto& item : heads) {
    plan->names.push_back(py::reinterpret_borrow<py::object>(item.first));
  }
  plan->heads = std::move(heads);
  for (const auto& [kind, first_step, weight, minimum, maximum, eps, num_bins, transform] : table) {
    plan->table.push_back(
        {static_cast<gradscale::Kind>(kind),
         first_step,
         weight,
         make_support(minimum, maximum, eps, num_bins, transform)});
  }
  return plan;
}

// (loss, per_sample, per_step, expected, head_means, num_nonfinite), or None when the fused kernel does not take this
// call.
py::object multi_step_loss(
    const Plan& plan,
    py::handle predictions,
    py::handle targets,
    py::handle step_weights,
    py::handle step_gradient_scale,
    py::handle importance_weights,
    py::handle mask,
    const std::string& reduction,
    const std::string& nonfinite,
    bool batch_first) {
  auto arguments = gradscale::read_arguments(
      plan,
      predictions,
      targets,
      step_weights,
      step_gradient_scale,
      importance_weights,
      mask,
      reduction,
      nonfinite,
      batch_first);
  if (!arguments) {
    return py::none();
  }
  const gradscale::Outputs outputs = gradscale::multi_step_loss(plan, std::move(*arguments));
  const size_t heads = plan.table.size();
  const std::vector<at::Tensor> head_means = outputs.head_means.unbind();
  py::dict per_step, expected, means;
  for (size_t h = 0; h < heads; ++h) {
    per_step[plan.names[h]] = outputs.per_step[h];
    means[plan.names[h]] = head_means[h];
    if (outputs.expected[h].defined()) {
      expected[plan.names[h]] = outputs.expected[h];
    }
  }
  return py::make_tuple(outputs.loss, outputs.per_sample, per_step, expected, means, outputs.num_nonfinite);
}

// Decoded values without a gradient, or None when the fused kernel does not take these logits.
py::object decode(
    const at::Tensor& logits, double minimum, double maximum, double eps, int32_t num_bins, int32_t transform) {
  if (!gradscale::ordinary_context() || !gradscale::ordinary_tensor(logits) || !gradscale::has_element(logits)) {
    return py::none();
  }
  return py::cast(gradscale::decode(logits, make_support(minimum, maximum, eps, num_bins, transform)));
}

// The gradient-flow operators, or None where a transform, a tracer or a dispatch mode must see the registered operator.
template <class Operator, class... Arguments>
py::object in_ordinary_context(Operator op, const Arguments&... arguments) {
  return gradscale::ordinary_context() ? py::cast(op(arguments...)) : py::none();
}

py::object scale_gradient(const at::Tensor& x, const Value& scale) {
  return in_ordinary_context(&gradscale::scale_gradient, x, scale);
}

py::object reverse_gradient(const at::Tensor& x, const Value& scale) {
  return in_ordinary_context(&gradscale::reverse_gradient, x, scale);
}

py::object clip_gradient_norm(
    const at::Tensor& x,
    const Value& max_norm,
    int64_t batch_dims,
    double norm_type,
    const std::string& process_group,
    int64_t process_group_size,
    const std::optional<at::Tensor>& counts) {
  const NormGroups groups{batch_dims, norm_type, process_group, process_group_size};
  return in_ordinary_context(&gradscale::clip_gradient_norm, x, max_norm, groups, counts.value_or(at::Tensor()));
}

py::object clip_gradient_value(const at::Tensor& x, const Value& min, const Value& max) {
  return in_ordinary_context(&gradscale::clip_gradient_value, x, min, max);
}

py::object normalize_gradient(const at::Tensor& x, const Value& norm, int64_t batch_dims, double norm_type) {
  return in_ordinary_context(&gradscale::normalize_gradient, x, norm, NormGroups{batch_dims, norm_type});
}

// The loss, or None when the fused pass does not take these tensors.
py::object l2_loss(std::vector<at::Tensor> parameters, double weight) {
  if (!gradscale::ordinary_context()) {
    return py::none();
  }
  for (const at::Tensor& parameter : parameters) {
    if (!gradscale::ordinary_tensor(parameter) || !gradscale::has_element(parameter)) {
      return py::none();
    }
  }
  return py::cast(gradscale::l2_loss(std::move(parameters), weight));
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = GRADSCALE_TORCH_VERSION;
  m.attr("cuda_version") = GRADSCALE_CUDA_VERSION;
  m.def("cpu_capability", &at::get_cpu_capability);
  m.def("ordinary_context", &gradscale::ordinary_context);
  m.def("scale_gradient", &scale_gradient);
  m.def("reverse_gradient", &reverse_gradient);
  m.def("clip_gradient_norm", &clip_gradient_norm);
  m.def("clip_gradient_value", &clip_gradient_value);
  m.def("normalize_gradient", &normalize_gradient);
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def(py::init(&make_plan));
  m.def("multi_step_loss", &multi_step_loss);
  m.def("set_differentiable_gradients", &gradscale::set_differentiable_gradients);
  m.def("decode", &decode);
  m.def("l2_loss", &l2_loss);
}
