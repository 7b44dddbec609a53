#include "multi_step_loss.h"

#include "../autograd.h"
#include "../tensor_element.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mul.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <memory>

namespace gradscale {

namespace {

namespace autograd = torch::autograd;

// Never freed: a module of an interpreter that ends may be gone before the last node is.
py::function* differentiable_gradients = nullptr;

py::object entries_to_python(const Entries& entries) {
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
  Arguments arguments;           // for a second derivative
  std::vector<int64_t> versions; // of the arguments, as the forward pass read them
  std::unique_ptr<c10::SafePyObject> heads;
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
    released = true;
  }

  autograd::variable_list apply(autograd::variable_list&& inputs) override {
    TORCH_CHECK(!released, autograd::ERR_BACKWARD_TWICE);
    const at::Tensor grad_output = std::move(inputs[0]);
    if (!grad_output.defined()) {
      return autograd::variable_list(num_outputs());
    }
    if (at::GradMode::is_enabled()) {
      return differentiable(grad_output);
    }
    const bool readable = ordinary_context() && ordinary_tensor(grad_output);
    const bool is_one = readable && grad_output.dim() == 0 && grad_output.item<double>() == 1.0;
    // Half gradients would be rounded a second time, 0 * inf would be NaN in masked entries, and a batched grad_output
    // cannot be read here: these are computed anew.
    if (!is_one && (!readable || has_half_gradient() || !grad_output.isfinite().all().item<bool>())) {
      autograd::variable_list result = differentiable(grad_output);
      for (at::Tensor& gradient : result) {
        gradient = gradient.defined() ? gradient.detach() : gradient;
      }
      return result;
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

  autograd::variable_list differentiable(const at::Tensor& grad_output) {
    TORCH_CHECK(
        versions_of(arguments) == versions,
        "MultiStepLoss: a prediction, target, weight or mask was modified by an in-place operation after the loss was "
        "computed, but this backward pass needs it as it was");
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
    const py::object heads_object = py::reinterpret_borrow<py::object>(heads->ptr(getPyInterpreter()));
    const py::object result =
        (*differentiable_gradients)(heads_object, predictions, targets, masks, options, grad_output);
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

Outputs multi_step_loss(const Plan& plan, Arguments arguments) {
  bool wants_gradients = false;
  if (at::GradMode::is_enabled()) {
    for (const Entries& entries : arguments.predictions) {
      wants_gradients = wants_gradients || autograd::any_variable_requires_grad(entries.tensors);
    }
  }
  RunResult result;
  {
    py::gil_scoped_release no_gil;
    at::NoGradGuard no_grad;
    result = run_loss(plan, arguments, wants_gradients);
  }
  if (wants_gradients) {
    MultiStepLossBackward* node = nullptr;
    const NodePtr handle = make_node(node);
    for (const Entries& entries : arguments.predictions) {
      for (const at::Tensor& tensor : entries.tensors) {
        node->add_next_edge(tensor.requires_grad() ? autograd::impl::gradient_edge(tensor) : autograd::Edge());
      }
    }
    node->versions = versions_of(arguments);
    node->gradients = std::move(result.gradients);
    node->arguments = std::move(arguments);
    node->heads = std::make_unique<c10::SafePyObject>(py::object(plan.heads).release().ptr(), getPyInterpreter());
    autograd::set_history(result.outputs.loss, handle);
  }
  return std::move(result.outputs);
}

} // namespace gradscale
