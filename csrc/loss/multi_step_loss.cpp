#include "multi_step_loss.h"

#include "../autograd.h"
#include "../device.h"
#include "../tensor_element.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <iterator>
#include <memory>

namespace gradscale {

namespace {

namespace autograd = torch::autograd;

// Never freed: a module of an interpreter that ends may be gone before the last node is.
py::function* differentiable_gradients = nullptr;

py::object entries_to_python(const Entries& entries) {
  if (entries.tensors.empty()) {
    return py::none();
  }
  if (entries.stacked) {
    return py::cast(entries.tensors[0]);
  }
  return py::cast(entries.tensors);
}

py::object step_numbers_to_python(const StepNumbers& numbers) {
  if (numbers.tensor.defined()) {
    return py::cast(numbers.tensor);
  }
  return numbers.numbers.empty() ? py::none().cast<py::object>() : py::cast(numbers.numbers);
}

const char* reduction_name(Reduction reduction) {
  switch (reduction) {
    case Reduction::mean:
      return "mean";
    case Reduction::sum:
      return "sum";
    case Reduction::none:
      return "none";
    default:
      return "valid_mean";
  }
}

// Versions of all tensors of a call: they differ from earlier ones when something was written to since.
std::vector<int64_t> versions_of(const Arguments& arguments) {
  std::vector<int64_t> versions;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_inference()) {
      versions.push_back(static_cast<int64_t>(tensor._version()));
    }
  };
  for (const std::vector<Entries>* both : {&arguments.predictions, &arguments.targets}) {
    for (const Entries& entries : *both) {
      std::for_each(entries.tensors.begin(), entries.tensors.end(), add);
    }
  }
  std::for_each(arguments.masks.begin(), arguments.masks.end(), add);
  add(arguments.step_weights.tensor);
  add(arguments.step_gradient_scale.tensor);
  add(arguments.importance_weights);
  return versions;
}

struct MultiStepLossBackward : public autograd::Node {
  Gradients gradients;           // for grad_output 1
  Arguments arguments;           // for another run
  std::vector<int64_t> versions; // of the arguments, as the forward pass read them
  DeviceState state;
  std::shared_ptr<Plan> plan;
  bool last_use = false;
  bool released = false;

  std::string name() const override {
    return "MultiStepLossBackward";
  }

  void will_release_variables() override {
    last_use = true;
  }

  void release_variables() override {
    gradients.clear();
    arguments = Arguments();
    state = DeviceState();
    released = true;
  }

  autograd::variable_list apply(autograd::variable_list&& inputs) override {
    TORCH_CHECK(!released, autograd::ERR_BACKWARD_TWICE);
    const at::Tensor grad_output = std::move(inputs[0]);
    if (!grad_output.defined()) {
      return autograd::variable_list(num_outputs());
    }
    if (at::GradMode::is_enabled()) {
      return by_reference(grad_output, /*create_graph=*/true);
    }
    if (!ordinary_context() || !ordinary_tensor(grad_output)) { // batched, or of another kind
      return by_reference(grad_output, /*create_graph=*/false);
    }
    if (device_kernels(grad_output.device()) != nullptr) {
      return on_device(grad_output);
    }
    const bool is_one = grad_output.dim() == 0 && grad_output.item<double>() == 1.0;
    // Half gradients would be rounded a second time, and 0 * inf would be NaN in masked entries: the kernel runs again.
    if (!is_one && (has_half_gradient() || !grad_output.isfinite().all().item<bool>())) {
      return run_again(grad_output);
    }
    autograd::variable_list result;
    result.reserve(num_outputs());
    for (size_t h = 0; h < gradients.size(); ++h) {
      for (at::Tensor& gradient : gradients[h]) {
        if (!gradient.defined()) {
          result.emplace_back();
          continue;
        }
        if (is_one) { // what is kept for another backward pass is not handed out: the receiver may write to it
          result.push_back(last_use ? std::move(gradient) : gradient.clone());
          continue;
        }
        const at::Tensor factor = factor_for(gradient, grad_output, arguments.predictions[h].stacked);
        result.push_back(last_use ? gradient.mul_(factor) : at::mul(gradient, factor).to(gradient.scalar_type()));
        if (last_use) {
          gradient.reset();
        }
      }
    }
    return result;
  }

 private:
  bool has_half_gradient() const {
    for (const std::vector<at::Tensor>& of_head : gradients) {
      for (const at::Tensor& gradient : of_head) {
        if (gradient.defined() && gradient.element_size() == 2) {
          return true;
        }
      }
    }
    return false;
  }

  // grad_output as it multiplies a gradient: itself, or [B] beside the batch dimension.
  at::Tensor factor_for(const at::Tensor& gradient, const at::Tensor& grad_output, bool stacked) const {
    if (grad_output.dim() == 0) {
      return grad_output;
    }
    std::vector<int64_t> shape(gradient.dim(), 1);
    shape[stacked && !arguments.batch_first ? 1 : 0] = grad_output.size(0);
    return grad_output.reshape(shape);
  }

  void check_unchanged() const {
    TORCH_CHECK(
        versions_of(arguments) == versions,
        "MultiStepLoss: a prediction, target, weight or mask was modified by an in-place operation after the loss was "
        "computed, but this backward pass needs it as it was");
  }

  // With grad_output as another factor of each sample.
  autograd::variable_list run_again(const at::Tensor& grad_output) {
    check_unchanged();
    Arguments weighted = arguments;
    const at::Tensor factor = grad_output.to(at::kDouble).expand({arguments.batch});
    const at::Tensor& weights = arguments.importance_weights;
    weighted.importance_weights = weights.defined() ? weights.to(at::kDouble).mul(factor) : factor;
    return flat(run_loss(plan->table, plan->gradient_memory, weighted).gradients);
  }

  // Whether grad_output is 1 is seen on the device alone: elsewhere the kernel runs again, as it does for half types on
  // the CPU.
  autograd::variable_list on_device(const at::Tensor& grad_output) {
    check_unchanged();
    Gradients kept = last_use ? std::move(gradients) : Gradients();
    return flat(
        multiplied_on_device(plan->table, plan->gradient_memory, arguments, std::move(kept), grad_output, state));
  }

  static autograd::variable_list flat(Gradients gradients) {
    autograd::variable_list result;
    for (std::vector<at::Tensor>& of_head : gradients) {
      std::move(of_head.begin(), of_head.end(), std::back_inserter(result));
    }
    return result;
  }

  autograd::variable_list by_reference(const at::Tensor& grad_output, bool create_graph) {
    check_unchanged();
    py::gil_scoped_acquire gil;
    py::list predictions, targets, masks;
    for (size_t h = 0; h < arguments.predictions.size(); ++h) {
      predictions.append(entries_to_python(arguments.predictions[h]));
      targets.append(entries_to_python(arguments.targets[h]));
      const at::Tensor& mask = arguments.masks[h];
      masks.append(mask.defined() ? py::cast(mask) : py::none().cast<py::object>());
    }
    py::dict options;
    options["step_weights"] = step_numbers_to_python(arguments.step_weights);
    options["step_gradient_scale"] = step_numbers_to_python(arguments.step_gradient_scale);
    options["importance_weights"] =
        arguments.importance_weights.defined() ? py::cast(arguments.importance_weights) : py::none().cast<py::object>();
    options["reduction"] = reduction_name(arguments.reduction);
    options["nonfinite"] = arguments.skip_nonfinite ? "skip" : "propagate";
    options["batch_first"] = arguments.batch_first;
    const py::object result =
        (*differentiable_gradients)(plan->heads, predictions, targets, masks, options, grad_output, create_graph);
    autograd::variable_list gradients_of_inputs;
    for (const auto& gradient : result) {
      gradients_of_inputs.push_back(gradient.is_none() ? at::Tensor() : gradient.cast<at::Tensor>());
    }
    return gradients_of_inputs;
  }
};

} // namespace

void set_differentiable_gradients(py::function function) {
  differentiable_gradients = new py::function(std::move(function));
}

Outputs multi_step_loss(const std::shared_ptr<Plan>& plan, Arguments arguments) {
  RunResult result;
  {
    py::gil_scoped_release no_gil;
    at::NoGradGuard no_grad;
    result = run_loss(plan->table, plan->gradient_memory, arguments);
  }
  if (arguments.wants_any()) {
    MultiStepLossBackward* node = nullptr;
    const NodePtr handle = make_node(node);
    for (size_t h = 0; h < arguments.predictions.size(); ++h) {
      const std::vector<at::Tensor>& tensors = arguments.predictions[h].tensors;
      for (size_t i = 0; i < tensors.size(); ++i) {
        node->add_next_edge(arguments.wants[h][i] ? autograd::impl::gradient_edge(tensors[i]) : autograd::Edge());
      }
    }
    node->versions = versions_of(arguments);
    node->gradients = std::move(result.gradients);
    node->state = std::move(result.state);
    node->arguments = std::move(arguments);
    node->plan = plan;
    autograd::set_history(result.outputs.loss, handle);
  }
  return std::move(result.outputs);
}

} // namespace gradscale
