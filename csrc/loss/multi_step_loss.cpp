#include "multi_step_loss.h"

#include "../host/autograd.h"
#include "../host/device.h"
#include "../host/tensor_element.h"
#include "device_calls.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

namespace gradscale {

namespace {

namespace autograd = torch::autograd;

// Never freed: a module of an interpreter that ends may be gone before the last node is.
py::function* differentiable_gradients = nullptr;

at::Tensor without_edge(const at::Tensor& tensor) {
  return with_edge(tensor, autograd::Edge());
}

py::object optional_to_python(const at::Tensor& tensor) {
  return tensor.defined() ? py::cast(without_edge(tensor)) : py::object(py::none());
}

template <class AsItWas>
py::object entries_to_python(const Entries& entries, AsItWas as_it_was) {
  if (entries.tensors.empty()) {
    return py::none();
  }
  std::vector<at::Tensor> tensors;
  std::transform(entries.tensors.begin(), entries.tensors.end(), std::back_inserter(tensors), as_it_was);
  return entries.stacked ? py::cast(tensors[0]) : py::cast(tensors);
}

py::object step_numbers_to_python(const StepNumbers& numbers) {
  return numbers.numbers.empty() ? optional_to_python(numbers.tensor) : py::cast(numbers.numbers);
}

const char* reduction_name(Reduction reduction) {
  switch (reduction) {
    case Reduction::mean:
      return "mean";
    case Reduction::sum:
      return "sum";
    case Reduction::none:
      return "none";
    case Reduction::valid_mean:
      break;
  }
  return "valid_mean";
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

// What a backward pass reads of the call.
struct Saved {
  Arguments arguments;
  std::vector<int64_t> versions; // of the arguments, as the forward pass read them
  DeviceState state;
  std::shared_ptr<Plan> plan;

  void check_unchanged() const {
    TORCH_CHECK(
        versions_of(arguments) == versions,
        "MultiStepLoss: a prediction, target, weight or mask was modified by an in-place operation after the loss was "
        "computed, but this backward pass needs it as it was");
  }
};

bool wants_half(const Arguments& arguments) {
  for (size_t h = 0; h < arguments.predictions.size(); ++h) {
    for (size_t i = 0; i < arguments.wants[h].size(); ++i) {
      if (arguments.wants[h][i] && arguments.predictions[h].tensors[i].element_size() == 2) {
        return true;
      }
    }
  }
  return false;
}

// Held by nobody else, who could see that it is written to.
bool is_ours(const at::Tensor& gradient) {
  return !gradient.defined() || gradient.use_count() == 1;
}

bool all_ours(const Gradients& gradients) {
  return std::all_of(gradients.begin(), gradients.end(), [](const std::vector<at::Tensor>& of_head) {
    return std::all_of(of_head.begin(), of_head.end(), is_ours);
  });
}

autograd::variable_list flat(Gradients gradients) {
  autograd::variable_list result;
  for (std::vector<at::Tensor>& of_head : gradients) {
    std::move(of_head.begin(), of_head.end(), std::back_inserter(result));
  }
  return result;
}

// grad_output as it multiplies a gradient: itself, or [B] beside the batch dimension.
at::Tensor factor_for(const at::Tensor& gradient, const at::Tensor& grad_output, int64_t batch_dim) {
  if (grad_output.dim() == 0) {
    return grad_output;
  }
  std::vector<int64_t> shape(gradient.dim(), 1);
  shape[batch_dim] = grad_output.size(0);
  return grad_output.reshape(shape);
}

// The gradients of the forward pass, in their own memory where nobody else holds it.
autograd::variable_list multiplied(
    Gradients gradients, const Arguments& arguments, const at::Tensor& grad_output, bool is_one) {
  for (size_t h = 0; h < gradients.size(); ++h) {
    const int64_t batch_dim = arguments.predictions[h].stacked && !arguments.batch_first ? 1 : 0;
    for (at::Tensor& gradient : gradients[h]) {
      if (!gradient.defined()) {
        continue;
      }
      const bool ours = is_ours(gradient);
      if (is_one) {
        gradient = ours ? gradient : gradient.clone();
      } else {
        const at::Tensor factor = factor_for(gradient, grad_output, batch_dim);
        gradient = ours ? gradient.mul_(factor) : at::mul(gradient, factor).to(gradient.scalar_type());
      }
    }
  }
  return flat(std::move(gradients));
}

// The kernel once more, with grad_output as another factor of each sample.
autograd::variable_list run_again(const Saved& saved, const at::Tensor& grad_output) {
  saved.check_unchanged();
  Arguments weighted = saved.arguments;
  const at::Tensor factor = grad_output.to(at::kDouble).expand({weighted.batch});
  const at::Tensor& weights = weighted.importance_weights;
  weighted.importance_weights = weights.defined() ? weights.to(at::kDouble).mul(factor) : factor;
  return flat(run_loss(saved.plan->table, saved.plan->gradient_memory, weighted).gradients);
}

class MultiStepLossBackward : public BackwardNode {
 public:
  void set(Gradients gradients, std::shared_ptr<const Saved> saved) {
    gradients_ = std::move(gradients);
    saved_ = std::move(saved);
  }

  std::string name() const override {
    return "MultiStepLossBackward";
  }

  void will_release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_last_use_ = true;
  }

  void release_variables() override {
    Gradients gradients;
    std::shared_ptr<const Saved> saved;
    const std::lock_guard<std::mutex> lock(mutex_); // ends first: nothing is freed under it
    gradients.swap(gradients_);
    saved.swap(saved_);
  }

  autograd::variable_list apply(autograd::variable_list&& inputs) override {
    const auto [saved, is_last_use] = begin_pass();
    const at::Tensor grad_output = std::move(inputs[0]);
    if (!grad_output.defined()) {
      return autograd::variable_list(num_outputs());
    }
    if (at::GradMode::is_enabled()) {
      return by_reference(*saved, grad_output, /*create_graph=*/true);
    }
    if (!ordinary_context() || !ordinary_tensor(grad_output)) { // batched, or of another kind
      return by_reference(*saved, grad_output, /*create_graph=*/false);
    }
    if (device_kernels<LossKernels>(grad_output.device()) != nullptr) {
      saved->check_unchanged();
      return on_device(*saved, take_gradients(is_last_use), grad_output);
    }
    const bool is_one = grad_output.dim() == 0 && grad_output.item<double>() == 1.0;
    // Half gradients would be rounded a second time, and 0 * inf would be NaN in masked entries.
    if (!is_one && (wants_half(saved->arguments) || !grad_output.isfinite().all().item<bool>())) {
      return run_again(*saved, grad_output);
    }
    Gradients gradients = take_gradients(is_last_use);
    return gradients.empty() ? run_again(*saved, grad_output)
                             : multiplied(std::move(gradients), saved->arguments, grad_output, is_one);
  }

 private:
  // What was saved, and whether the pass that begins is the last.
  std::pair<std::shared_ptr<const Saved>, bool> begin_pass() {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(saved_ != nullptr, autograd::ERR_BACKWARD_TWICE);
    return {saved_, std::exchange(is_last_use_, false)};
  }

  // Those of the forward pass, which leave the node with the last pass. None, where that one failed further on.
  Gradients take_gradients(bool is_last_use) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_last_use ? std::exchange(gradients_, {}) : gradients_;
  }

  // Whether grad_output is 1 is seen on the device alone: elsewhere the kernel runs again, as it does for half types on
  // the CPU.
  static autograd::variable_list on_device(const Saved& saved, Gradients gradients, const at::Tensor& grad_output) {
    if (!all_ours(gradients)) {
      gradients.clear();
    }
    return flat(multiplied_on_device(
        saved.plan->table,
        saved.plan->gradient_memory,
        saved.arguments,
        std::move(gradients),
        grad_output,
        saved.state));
  }

  autograd::variable_list by_reference(const Saved& saved, const at::Tensor& grad_output, bool create_graph) const {
    saved.check_unchanged();
    const Arguments& arguments = saved.arguments;
    py::gil_scoped_acquire gil;
    py::list predictions, targets, masks;
    uint32_t edge = 0;
    for (size_t h = 0; h < arguments.predictions.size(); ++h) {
      predictions.append(entries_to_python(
          arguments.predictions[h], [&](const at::Tensor& tensor) { return with_edge(tensor, next_edge(edge++)); }));
      targets.append(entries_to_python(arguments.targets[h], without_edge));
      masks.append(optional_to_python(arguments.masks[h]));
    }
    py::dict options;
    options["step_weights"] = step_numbers_to_python(arguments.step_weights);
    options["step_gradient_scale"] = step_numbers_to_python(arguments.step_gradient_scale);
    options["importance_weights"] = optional_to_python(arguments.importance_weights);
    options["reduction"] = reduction_name(arguments.reduction);
    options["nonfinite"] = arguments.skip_nonfinite ? "skip" : "propagate";
    options["batch_first"] = arguments.batch_first;
    const py::object result =
        (*differentiable_gradients)(saved.plan->heads, predictions, targets, masks, options, grad_output, create_graph);
    autograd::variable_list gradients_of_inputs;
    for (const auto& gradient : result) {
      gradients_of_inputs.push_back(gradient.is_none() ? at::Tensor() : gradient.cast<at::Tensor>());
    }
    return gradients_of_inputs;
  }

  Gradients gradients_; // for grad_output 1
  std::shared_ptr<const Saved> saved_;
  bool is_last_use_ = false;
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
    std::vector<int64_t> versions = versions_of(arguments);
    node->set(
        std::move(result.gradients),
        std::make_shared<const Saved>(Saved{std::move(arguments), std::move(versions), std::move(result.state), plan}));
    autograd::set_history(result.outputs.loss, handle);
  }
  return std::move(result.outputs);
}

} // namespace gradscale
