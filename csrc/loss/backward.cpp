#include "backward.h"

#include "../cuda/driver.h"
#include "../torch/autograd.h"
#include "../torch/tensor_element.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <mutex>
#include <optional>
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

// A call in eager mode, as saved for the backward pass.
struct SavedCall {
  Call call;
  std::vector<int64_t> versions; // of the given tensors, as the forward pass read them
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

bool has_sums(const Call& call) {
  bool any = false;
  call.each_prediction(
      [&](const Entries& entries, const at::Tensor&, size_t) { any = any || entries.sums_gradient(); });
  return any;
}

// True if the node has the only reference to the gradient, which can then be overwritten.
bool is_ours(const at::Tensor& gradient) {
  return !gradient.defined() || gradient.use_count() == 1;
}

// grad_output in a shape that broadcasts to `gradient`: a scalar as it is, and [B] along the batch dimension.
at::Tensor factor_for(const at::Tensor& gradient, const at::Tensor& grad_output, int64_t batch_dim) {
  if (grad_output.dim() == 0) {
    return grad_output;
  }
  std::vector<int64_t> shape(gradient.dim(), 1);
  shape[batch_dim] = -1;
  return grad_output.reshape(shape);
}

// 0 stays 0, also if the factor is infinite: masked entries, and shares of nothing.
at::Tensor multiplied(const at::Tensor& gradient, const at::Tensor& factor) {
  return at::where(at::eq(gradient, 0), gradient, at::mul(gradient, factor));
}

// The gradient of a head weight, from the head's share of the loss before this weight. It has the type of the loss;
// autograd converts it to the weight's type.
at::Tensor head_weight_gradient(const at::Tensor& share, const at::Tensor& grad_output) {
  const at::Tensor gradient = multiplied(share, grad_output);
  return share.dim() == 0 ? gradient : gradient.sum();
}

// The gradients of the operator, by prediction, multiplied and rounded with operations that tracers record. Reads no
// values itself.
Tensors traced_gradients(Layout layout, const at::Tensor& grad_output, size_t num_predictions) {
  const bool per_sample = grad_output.dim() != 0;
  for (JoinedGradients& joined : layout.joined) {
    joined.data = per_sample ? joined.data : multiplied(joined.data, grad_output).to(joined.type);
  }
  Tensors result(num_predictions);
  for (const Gradient& gradient : layout.gradients) {
    at::Tensor own = gradient.in(layout.joined);
    if (per_sample) {
      const at::Tensor factor = factor_for(own, grad_output, gradient.batch_dim);
      own = multiplied(own, factor).to(layout.joined[gradient.joined].type);
    }
    result[gradient.prediction] = own;
  }
  return result;
}

// Multiplies the gradients of the forward pass by a finite grad_output, in place if nothing else refers to their
// memory.
Tensors scaled(Tensors gradients, const Call& call, const at::Tensor& grad_output, bool is_one) {
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
Tensors run_again(const SavedCall& saved, Tensors gradients, const at::Tensor& grad_output) {
  saved.check_unchanged();
  at::Tensor incoming = grad_output.to(saved.call.sum_options);
  if (grad_output.dim() != 0) { // raises if a caller other than the engine passes another size
    incoming = incoming.expand({saved.call.batch});
  }
  const bool ours = std::all_of(gradients.begin(), gradients.end(), is_ours);
  if (ours && !gradients.empty() && saved.call.launches != nullptr) {
    run_again(saved.call, incoming);
    saved.call.sum_scales(gradients, /*adds_norms=*/false);
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
py::object to_python(const Entries& entries, bool has_steps) {
  if (entries.tensors.empty()) {
    return py::none();
  }
  return entries.stacked || entries.shared || !has_steps ? py::cast(entries.tensors[0]) : py::cast(entries.tensors);
}

// The same of one field without a name, or of several by their names. If the first may be alone, the others decide.
py::object to_python(
    const std::vector<Entries>& fields, const std::vector<const char*>& names, bool may_be_tensor, bool has_steps) {
  if (names.empty() || (may_be_tensor && fields.back().tensors.empty())) {
    return to_python(fields[0], has_steps);
  }
  py::dict by_name;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!fields[i].tensors.empty()) {
      by_name[names[i]] = to_python(fields[i], has_steps);
    }
  }
  return by_name;
}

class MultiStepLossBackward : public BackwardNode {
 public:
  // Everything that a pass reads, except the gradients of a call.
  struct Saved {
    Tensors shares;                         // of the head weights, undefined where one gets no gradient
    std::unique_ptr<const SavedCall> eager; // null for the operator, which has a layout instead
    std::optional<Layout> layout;
  };

  // The gradients are those for grad_output 1, by prediction; none for the operator.
  void set(Saved saved, Tensors gradients) {
    saved_ = std::make_shared<const Saved>(std::move(saved));
    gradients_ = std::move(gradients);
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
    const at::Tensor given = std::move(inputs[0]);
    const auto [saved, is_last_use] = begin_pass();
    if (!given.defined()) {
      return autograd::variable_list(num_outputs());
    }
    const bool create_graph = at::GradMode::is_enabled();
    TORCH_CHECK_NOT_IMPLEMENTED(
        saved->eager != nullptr || !create_graph,
        "multi_step_loss: a compiled or exported loss has no second derivative; call it outside torch.compile, or use "
        "gradscale_ext.reference.multi_step_loss inside");
    at::Tensor grad_output = given;
    if (saved->eager != nullptr && (create_graph || !ordinary_context() || !read_ordinary(given, grad_output))) {
      return by_reference(*saved->eager, given, create_graph); // also in a transform (vmap), and for a tensor subclass
    }
    autograd::variable_list result =
        saved->eager != nullptr ? call_gradients(*saved->eager, grad_output, is_last_use)
                                : traced_gradients(*saved->layout, grad_output, num_outputs() - saved->shares.size());
    for (const at::Tensor& share : saved->shares) { // head weights have the last edges
      result.push_back(share.defined() ? head_weight_gradient(share, grad_output) : at::Tensor());
    }
    return result;
  }

 private:
  // Returns what was saved, and true if this pass is the last.
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

  // The gradients of a call in eager mode, by prediction.
  Tensors call_gradients(const SavedCall& saved, const at::Tensor& grad_output, bool is_last_use) {
    if (runs_kernels(grad_output.device())) {
      return run_again(saved, take_gradients(is_last_use), grad_output);
    }
    const bool is_one = grad_output.dim() == 0 && grad_output.item<double>() == 1.0;
    // Half gradients would be rounded a second time, 0 * inf would be NaN in masked entries, and a sum over samples
    // cannot be multiplied by a factor for each.
    const bool needs_rows = grad_output.dim() != 0 && has_sums(saved.call);
    if (!is_one && (wants_half(saved.call) || needs_rows || !grad_output.isfinite().all().item<bool>())) {
      return run_again(saved, {}, grad_output);
    }
    Tensors gradients = take_gradients(is_last_use);
    return gradients.empty() ? run_again(saved, {}, grad_output)
                             : scaled(std::move(gradients), saved.call, grad_output, is_one);
  }

  autograd::variable_list by_reference(const SavedCall& saved, const at::Tensor& grad_output, bool create_graph) const {
    saved.check_unchanged();
    py::gil_scoped_acquire gil;
    py::list predictions, targets;
    uint32_t edge = 0;
    const Heads& heads = saved.plan->table;
    for (size_t h = 0; h < heads.size(); ++h) {
      std::vector<Entries> predicted = saved.call.predictions[h], wanted = saved.call.targets[h];
      for (Entries& entries : predicted) {
        for (at::Tensor& tensor : entries.tensors) {
          tensor = with_edge(tensor, next_edge(edge++));
        }
      }
      for (Entries& entries : wanted) {
        for (at::Tensor& tensor : entries.tensors) {
          tensor = with_edge(tensor, {});
        }
      }
      predictions.append(to_python(predicted, heads.kind(h).prediction, false, saved.call.steps));
      targets.append(to_python(wanted, heads.kind(h).target, heads.kind(h).may_be_tensor, saved.call.steps));
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

  Tensors gradients_;
  std::shared_ptr<const Saved> saved_;
  bool is_last_use_ = false;
};

void record(
    const at::Tensor& loss, const Tensors& differentiable, MultiStepLossBackward::Saved saved, Tensors gradients) {
  MultiStepLossBackward* node = nullptr;
  const NodePtr handle = make_node(node);
  node->set_next_edges(autograd::collect_next_edges(differentiable));
  node->set(std::move(saved), std::move(gradients));
  autograd::set_history(loss, handle);
}

} // namespace

Layout::Layout(const Call& call) {
  call.each_prediction([&](const Entries& entries, const at::Tensor& prediction, size_t index) {
    if (!call.wants[index]) {
      return;
    }
    auto found = std::find_if(joined.begin(), joined.end(), [&](const JoinedGradients& known) {
      return known.type == prediction.scalar_type();
    });
    if (found == joined.end()) {
      found = joined.insert(found, JoinedGradients{prediction.scalar_type()});
    }
    const auto sizes = prediction.sym_sizes();
    std::vector<c10::SymInt> strides(sizes.size());
    c10::SymInt count = 1;
    for (size_t dim = sizes.size(); dim-- > 0; count *= sizes[dim]) {
      strides[dim] = count;
    }
    const size_t position = found - joined.begin();
    gradients.push_back({index, position, found->size, sizes.vec(), std::move(strides), call.batch_dim(entries)});
    found->size += count;
  });
}

void record_call(Call call, std::shared_ptr<Plan> plan) {
  Tensors differentiable;
  call.each_prediction(
      [&](const Entries&, const at::Tensor& prediction, size_t) { differentiable.push_back(prediction); });
  for (const HeadWeight& weight : call.head_weights.values) {
    differentiable.push_back(weight.tensor);
  }
  Outputs outputs = std::exchange(call.outputs, {});
  Tensors gradients = std::exchange(call.gradients, {});
  outputs.shares.resize(call.head_weights.values.size());
  std::vector<int64_t> versions = versions_of(call);
  auto eager = std::make_unique<const SavedCall>(SavedCall{std::move(call), std::move(versions), std::move(plan)});
  record(outputs.loss, differentiable, {std::move(outputs.shares), std::move(eager), {}}, std::move(gradients));
}

void record_operator(const at::Tensor& loss, const Tensors& differentiable, Layout layout, Tensors shares) {
  record(loss, differentiable, {std::move(shares), nullptr, std::move(layout)}, {});
}

} // namespace gradscale
