#include "python.h"

#include "../cuda/driver.h"
#include "../torch/autograd.h"
#include "../torch/tensor_element.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <mutex>
#include <type_traits>
#include <utility>

namespace gradscale {

namespace {

namespace autograd = torch::autograd;

// The version counters of all tensors of a call. A counter changes when its tensor is written to.
std::vector<int64_t> versions_of(const Call& call) {
  std::vector<int64_t> versions;
  call.each_tensor([&](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_inference()) {
      versions.push_back(static_cast<int64_t>(tensor._version()));
    }
  });
  return versions;
}

// The call, as saved for the backward pass.
struct Saved {
  Call call;
  std::vector<int64_t> versions; // of the given tensors, as the forward pass read them
  Tensors shares;                // by head, defined where the head weight gets a gradient
  std::shared_ptr<Plan> plan;

  void check_unchanged() const {
    TORCH_CHECK(
        versions_of(call) == versions,
        "MultiStepLoss: a prediction, target, weight or mask was modified by an in-place operation after the loss was "
        "computed, but this backward pass needs it as it was");
  }
};

bool wants_half(const Call& call) {
  bool any = false;
  call.each_prediction([&](const Entries&, const at::Tensor& tensor, size_t index) {
    any = any || (call.wants[index] && tensor.element_size() == 2);
  });
  return any;
}

// True if the node has the only reference to the gradient, which can then be overwritten.
bool is_ours(const at::Tensor& gradient) {
  return !gradient.defined() || gradient.use_count() == 1;
}

// Multiplies the gradients of the forward pass by grad_output, in place if nothing else refers to their memory.
Tensors multiplied(Tensors gradients, const Call& call, const at::Tensor& grad_output, bool is_one) {
  call.each_prediction([&](const Entries& entries, const at::Tensor&, size_t index) {
    at::Tensor& gradient = gradients[index];
    if (!gradient.defined()) {
      return;
    }
    const bool ours = is_ours(gradient);
    if (is_one) {
      gradient = ours ? gradient : gradient.clone();
    } else {
      const at::Tensor factor = factor_for(gradient, grad_output, call.batch_dim(entries));
      gradient = ours ? gradient.mul_(factor) : at::mul(gradient, factor).to(gradient.scalar_type());
    }
  });
  return gradients;
}

// Runs the kernel of the forward pass again for this grad_output: in the memory of the gradients for a grad_output of
// 1, unless something else refers to it. On a device, the kernel tests whether grad_output is 1.
Tensors run_again(const Saved& saved, Tensors gradients, const at::Tensor& grad_output) {
  saved.check_unchanged();
  at::Tensor incoming = grad_output.to(saved.call.sum_options);
  if (grad_output.dim() != 0) { // raises if a caller other than the engine passes another size
    incoming = incoming.expand({saved.call.batch});
  }
  const bool ours = std::all_of(gradients.begin(), gradients.end(), is_ours);
  if (ours && !gradients.empty() && saved.call.launches != nullptr) {
    run_again(saved.call, incoming);
    return gradients;
  }
  Call call = saved.call;
  if (ours) {
    call.gradients = std::move(gradients);
  }
  call.grad_output = std::move(incoming);
  run(call);
  return std::move(call.gradients);
}

// Options as Python objects. The tensors are detached from their graph, except head weights, which may get a gradient.
py::object written(const at::Tensor& tensor) {
  return tensor.defined() ? py::cast(with_edge(tensor, {})) : py::object(py::none());
}
py::object written(const StepNumbers& numbers) {
  return numbers.numbers.empty() ? written(numbers.tensor) : py::cast(numbers.numbers);
}
py::object written(const HeadWeight& weight) {
  return weight.tensor.defined() ? py::cast(weight.tensor) : py::object(py::float_(weight.number));
}
py::object written(const NumEntries& entries) {
  return entries.number == 0 ? written(entries.tensor) : py::object(py::float_(entries.number));
}
template <class T>
py::object written(const ByHead<T>& by_head) {
  py::list list;
  for (const T& value : by_head.values) {
    list.append(written(value));
  }
  return list;
}
py::object written(bool flag) {
  return py::bool_(flag);
}
template <class Choice, std::enable_if_t<std::is_enum_v<Choice>, int> = 0>
py::object written(Choice choice) {
  return py::str(names_of(choice)[static_cast<size_t>(choice)]);
}

// The options by name.
py::dict options_to_python(const Options& options) {
  py::dict by_name;
  Options::each(options, [&](const char* name, const auto& option) { by_name[name] = written(option); });
  return by_name;
}

// One tensor, a list of tensors, or None for no tensors.
py::object to_python(const Entries& entries) {
  if (entries.tensors.empty()) {
    return py::none();
  }
  return entries.stacked ? py::cast(entries.tensors[0]) : py::cast(entries.tensors);
}

class MultiStepLossBackward : public BackwardNode {
 public:
  void set(Tensors gradients, std::shared_ptr<const Saved> saved) {
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
    Tensors gradients;
    std::shared_ptr<const Saved> saved;
    const std::lock_guard<std::mutex> lock(mutex_); // destroyed first: nothing is freed while the mutex is held
    gradients.swap(gradients_);
    saved.swap(saved_);
  }

  autograd::variable_list apply(autograd::variable_list&& inputs) override {
    const auto [saved, is_last_use] = begin_pass();
    if (!inputs[0].defined()) {
      return autograd::variable_list(num_outputs());
    }
    at::Tensor grad_output;
    if (at::GradMode::is_enabled()) {
      return by_reference(*saved, inputs[0], /*create_graph=*/true);
    }
    if (!ordinary_context() || !read_ordinary(inputs[0], grad_output)) { // a transform (vmap), or a tensor subclass
      return by_reference(*saved, inputs[0], /*create_graph=*/false);
    }
    autograd::variable_list result = prediction_gradients(*saved, grad_output, is_last_use);
    for (size_t h = 0; h < saved->call.head_weights.values.size(); ++h) {
      const at::Tensor& share = saved->shares[h];
      result.push_back(share.defined() ? head_weight_gradient(share, grad_output) : at::Tensor());
    }
    return result;
  }

 private:
  Tensors prediction_gradients(const Saved& saved, const at::Tensor& grad_output, bool is_last_use) {
    if (runs_kernels(grad_output.device())) {
      return run_again(saved, take_gradients(is_last_use), grad_output);
    }
    const bool is_one = grad_output.dim() == 0 && grad_output.item<double>() == 1.0;
    // Half gradients would be rounded a second time, and 0 * inf would be NaN in masked entries.
    if (!is_one && (wants_half(saved.call) || !grad_output.isfinite().all().item<bool>())) {
      return run_again(saved, {}, grad_output);
    }
    Tensors gradients = take_gradients(is_last_use);
    return gradients.empty() ? run_again(saved, {}, grad_output)
                             : multiplied(std::move(gradients), saved.call, grad_output, is_one);
  }

  // Returns the saved call, and true if this pass is the last.
  std::pair<std::shared_ptr<const Saved>, bool> begin_pass() {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(saved_ != nullptr, autograd::ERR_BACKWARD_TWICE);
    return {saved_, std::exchange(is_last_use_, false)};
  }

  // The last pass moves the gradients out of the node. If that pass fails afterwards, the next one computes them again.
  Tensors take_gradients(bool is_last_use) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_last_use ? std::exchange(gradients_, {}) : gradients_;
  }

  autograd::variable_list by_reference(const Saved& saved, const at::Tensor& grad_output, bool create_graph) const {
    saved.check_unchanged();
    py::gil_scoped_acquire gil;
    py::list predictions, targets;
    uint32_t edge = 0;
    for (Entries entries : saved.call.predictions) {
      for (at::Tensor& tensor : entries.tensors) {
        tensor = with_edge(tensor, next_edge(edge++));
      }
      predictions.append(to_python(entries));
    }
    for (Entries entries : saved.call.targets) {
      for (at::Tensor& tensor : entries.tensors) {
        tensor = with_edge(tensor, {});
      }
      targets.append(to_python(entries));
    }
    Options options = saved.call;
    for (HeadWeight& weight : options.head_weights.values) {
      const autograd::Edge& own = next_edge(edge++);
      weight.tensor = weight.tensor.defined() ? with_edge(weight.tensor, own) : weight.tensor;
    }
    const py::module_ module = py::module_::import("gradscale_ext.loss.multi_step");
    const py::object result = module.attr("_differentiable_gradients")(
        saved.plan->heads, predictions, targets, options_to_python(options), grad_output, create_graph);
    autograd::variable_list input_gradients;
    for (const auto& gradient : result) {
      input_gradients.push_back(gradient.is_none() ? at::Tensor() : gradient.cast<at::Tensor>());
    }
    return input_gradients;
  }

  Tensors gradients_; // for grad_output 1
  std::shared_ptr<const Saved> saved_;
  bool is_last_use_ = false;
};

} // namespace

at::Tensor factor_for(const at::Tensor& gradient, const at::Tensor& grad_output, int64_t batch_dim) {
  if (grad_output.dim() == 0) {
    return grad_output;
  }
  std::vector<int64_t> shape(gradient.dim(), 1);
  shape[batch_dim] = -1;
  return grad_output.reshape(shape);
}

at::Tensor head_weight_gradient(const at::Tensor& share, const at::Tensor& grad_output) {
  // A share of 0 gives a gradient of 0, also if grad_output is infinite.
  const at::Tensor gradient = at::where(at::eq(share, 0), share, at::mul(share, grad_output));
  return share.dim() == 0 ? gradient : gradient.sum();
}

void record_call(Call call, std::shared_ptr<Plan> plan) {
  MultiStepLossBackward* node = nullptr;
  const NodePtr handle = make_node(node);
  Tensors differentiable;
  call.each_prediction(
      [&](const Entries&, const at::Tensor& prediction, size_t) { differentiable.push_back(prediction); });
  for (const HeadWeight& weight : call.head_weights.values) {
    differentiable.push_back(weight.tensor);
  }
  node->set_next_edges(autograd::collect_next_edges(differentiable));
  Outputs outputs = std::exchange(call.outputs, {});
  Tensors gradients = std::exchange(call.gradients, {});
  const auto saved = std::make_shared<Saved>();
  saved->shares = std::move(outputs.shares);
  saved->call = std::move(call);
  saved->plan = std::move(plan);
  saved->versions = versions_of(saved->call);
  node->set(std::move(gradients), saved);
  autograd::set_history(outputs.loss, handle);
}

} // namespace gradscale
