// The loss as a registered operator, which the compiler and export keep in their graphs. The entries of all heads come
// in one list; `layout` has three numbers a head: how many tensors its prediction is (0: one with a step dimension),
// how many its target is (-1: none), and where its mask is in `masks` (-1: none).
//
// Returns loss, per_sample, head_means, num_nonfinite, per_step of every head, expected of every categorical head, and
// for every prediction tensor in `wants` its gradient for grad_output 1. Only the loss has a gradient function;
// autograd fills in `wants`.
#include "../host/autograd.h"
#include "../host/context.h"
#include "run.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace gradscale {

namespace {

namespace autograd = torch::autograd;

using OptionalTensor = const std::optional<at::Tensor>&;
using Tensors = std::vector<at::Tensor>;
using Signature = Tensors(
    at::TensorList predictions,
    at::TensorList targets,
    at::TensorList masks,
    OptionalTensor step_weights,
    OptionalTensor step_gradient_scale,
    OptionalTensor importance_weights,
    at::ArrayRef<double> heads,
    at::IntArrayRef layout,
    at::IntArrayRef wants,
    std::string reduction,
    bool skip_nonfinite,
    bool batch_first);

constexpr const char* kSchema =
    "multi_step_loss(Tensor[] predictions, Tensor[] targets, Tensor[] masks, Tensor? step_weights, "
    "Tensor? step_gradient_scale, Tensor? importance_weights, float[] heads, int[] layout, int[] wants, "
    "str reduction, bool skip_nonfinite, bool batch_first) -> Tensor[]";

constexpr int64_t kNumbersOfLayout = 3;

// Takes the next entries of a head from a list of all.
Entries next_entries(at::TensorList tensors, size_t& next, int64_t count) {
  Entries entries;
  entries.stacked = count == 0;
  for (int64_t taken = 0; taken < std::max<int64_t>(count, 1); ++taken) {
    TORCH_CHECK(next < tensors.size(), "multi_step_loss: layout names more tensors than there are");
    entries.tensors.push_back(tensors[next++]);
  }
  return entries;
}

Tensors kernel(
    at::TensorList predictions,
    at::TensorList targets,
    at::TensorList masks,
    OptionalTensor step_weights,
    OptionalTensor step_gradient_scale,
    OptionalTensor importance_weights,
    at::ArrayRef<double> heads,
    at::IntArrayRef layout,
    at::IntArrayRef wants,
    std::string reduction,
    bool skip_nonfinite,
    bool batch_first) {
  const HeadTable table(heads);
  TORCH_CHECK(layout.size() == kNumbersOfLayout * table.size(), "multi_step_loss: layout must have 3 numbers a head");
  Arguments arguments;
  arguments.batch_first = batch_first;
  arguments.skip_nonfinite = skip_nonfinite;
  arguments.step_weights.tensor = step_weights.value_or(at::Tensor());
  arguments.step_gradient_scale.tensor = step_gradient_scale.value_or(at::Tensor());
  arguments.importance_weights = importance_weights.value_or(at::Tensor());
  const auto kind_of_reduction = read_reduction(reduction);
  TORCH_CHECK_VALUE(kind_of_reduction, "multi_step_loss: unknown reduction '", reduction, "'");
  arguments.reduction = *kind_of_reduction;
  size_t next_prediction = 0, next_target = 0;
  for (size_t h = 0; h < table.size(); ++h) {
    const int64_t* numbers = layout.data() + kNumbersOfLayout * h;
    const size_t first = next_prediction;
    arguments.predictions.push_back(next_entries(predictions, next_prediction, numbers[0]));
    arguments.targets.push_back(numbers[1] < 0 ? Entries() : next_entries(targets, next_target, numbers[1]));
    TORCH_CHECK(
        numbers[2] < static_cast<int64_t>(masks.size()), "multi_step_loss: layout names a mask that is not there");
    arguments.masks.push_back(numbers[2] < 0 ? at::Tensor() : masks[numbers[2]]);
    std::vector<bool>& of_head = arguments.wants.emplace_back();
    for (size_t i = first; i < next_prediction; ++i) {
      of_head.push_back(std::find(wants.begin(), wants.end(), static_cast<int64_t>(i)) != wants.end());
    }
    const int64_t steps = count_steps(arguments.predictions[h], batch_first);
    arguments.steps = std::max(arguments.steps, table[h].first_step + steps);
  }
  TORCH_CHECK(on_one_device(arguments), "multi_step_loss: all tensors must be on the device of the predictions");
  const Entries& entries = arguments.predictions[0];
  arguments.batch = entries.tensors[0].size(entries.stacked && !batch_first ? 1 : 0);
  const GradientMemory memory(/*keeps=*/false);
  RunResult result = run_loss(table, memory, arguments, /*wide=*/true);
  const Outputs& outputs = result.outputs;
  Tensors all{outputs.loss, outputs.per_sample, outputs.head_means, outputs.num_nonfinite};
  const auto add_defined = [&](const Tensors& tensors) {
    std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(all), [](const at::Tensor& tensor) {
      return tensor.defined();
    });
  };
  add_defined(outputs.per_step);
  add_defined(outputs.expected);
  std::for_each(result.gradients.begin(), result.gradients.end(), add_defined);
  return all;
}

struct MultiStepLossOperatorBackward : public BackwardNode {
  struct Gradient {
    at::Tensor tensor; // of the type of sums; undefined where none is wanted
    at::ScalarType type;
    int64_t batch_dim;
  };
  std::vector<Gradient> gradients;
  bool released = false;

  std::string name() const override {
    return "MultiStepLossOperatorBackward";
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    gradients.clear();
    released = true;
  }

  autograd::variable_list apply(autograd::variable_list&& inputs) override {
    const std::vector<Gradient> gradients = kept();
    const at::Tensor grad_output = std::move(inputs[0]);
    autograd::variable_list result(gradients.size());
    if (!grad_output.defined()) {
      return result;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(),
        "multi_step_loss: a compiled or exported loss has no second derivative; call it outside torch.compile, or use "
        "gradscale_ext.reference.multi_step_loss inside");
    for (size_t i = 0; i < gradients.size(); ++i) {
      const Gradient& gradient = gradients[i];
      if (!gradient.tensor.defined()) {
        continue;
      }
      std::vector<int64_t> shape(gradient.tensor.dim(), 1);
      at::Tensor factor = grad_output;
      if (grad_output.dim() == 1) {
        shape[gradient.batch_dim] = -1;
        factor = grad_output.reshape(shape);
      }
      // What is masked stays 0, also where grad_output is infinite.
      const at::Tensor product =
          at::where(at::eq(gradient.tensor, 0), gradient.tensor, at::mul(gradient.tensor, factor));
      result[i] = product.to(gradient.type);
    }
    return result;
  }

 private:
  std::vector<Gradient> kept() {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released, autograd::ERR_BACKWARD_TWICE);
    return gradients;
  }
};

Tensors autograd_kernel(
    at::TensorList predictions,
    at::TensorList targets,
    at::TensorList masks,
    OptionalTensor step_weights,
    OptionalTensor step_gradient_scale,
    OptionalTensor importance_weights,
    at::ArrayRef<double> heads,
    at::IntArrayRef layout,
    at::IntArrayRef wants,
    std::string reduction,
    bool skip_nonfinite,
    bool batch_first) {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("gradscale_ext::multi_step_loss", "").typed<Signature>();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !inside_transform() && std::none_of(
                                 predictions.begin(),
                                 predictions.end(),
                                 [](const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }),
      "gradscale_ext::multi_step_loss: torch.func transforms and forward mode need gradscale_ext.multi_step_loss, "
      "which "
      "chooses plain PyTorch for them");
  std::vector<int64_t> wanted(wants.begin(), wants.end());
  if (at::GradMode::is_enabled()) {
    for (size_t i = 0; i < predictions.size(); ++i) {
      if (predictions[i].requires_grad() &&
          std::find(wants.begin(), wants.end(), static_cast<int64_t>(i)) == wants.end()) {
        wanted.push_back(static_cast<int64_t>(i));
      }
    }
    std::sort(wanted.begin(), wanted.end());
  }
  Tensors results;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    results = handle.call(
        predictions,
        targets,
        masks,
        step_weights,
        step_gradient_scale,
        importance_weights,
        heads,
        layout,
        wanted,
        reduction,
        skip_nonfinite,
        batch_first);
  }
  const bool records = at::GradMode::is_enabled() &&
                       std::any_of(predictions.begin(), predictions.end(), [](const at::Tensor& prediction) {
                         return prediction.requires_grad();
                       });
  if (!records) {
    return results;
  }
  MultiStepLossOperatorBackward* node = nullptr;
  const NodePtr node_handle = make_node(node);
  size_t gradient = results.size() - wanted.size();
  for (size_t h = 0, i = 0; h < layout.size() / kNumbersOfLayout; ++h) {
    const int64_t count = layout[kNumbersOfLayout * h];
    const int64_t batch_dim = count == 0 && !batch_first ? 1 : 0;
    for (const size_t end = i + std::max<int64_t>(count, 1); i < end; ++i) {
      const at::Tensor& prediction = predictions[i];
      const bool is_wanted = std::binary_search(wanted.begin(), wanted.end(), static_cast<int64_t>(i));
      const at::Tensor found = is_wanted ? results[gradient++] : at::Tensor();
      const bool needed = prediction.requires_grad();
      node->gradients.push_back({needed ? found : at::Tensor(), prediction.scalar_type(), batch_dim});
      node->add_next_edge(needed ? autograd::impl::gradient_edge(prediction) : autograd::Edge());
    }
  }
  autograd::set_history(results[0], node_handle);
  return results;
}

} // namespace

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  m.def(kSchema);
}

TORCH_LIBRARY_IMPL(gradscale_ext, CPU, m) {
  m.impl("multi_step_loss", kernel);
}

#if GRADSCALE_WITH_CUDA
TORCH_LIBRARY_IMPL(gradscale_ext, CUDA, m) {
  m.impl("multi_step_loss", kernel);
}
#endif

TORCH_LIBRARY_IMPL(gradscale_ext, Autograd, m) {
  m.impl("multi_step_loss", autograd_kernel);
}

} // namespace gradscale
