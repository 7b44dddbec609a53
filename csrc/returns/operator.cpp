// The operators that autograd, torch.func transforms and compilers see. A function and its adjoint are both linear, and
// each computes the gradient of the other, so these two cover every order of forward- and reverse-mode differentiation.
// One operator computes both: with is_adjoint, its inputs are the gradients of the results.
#include "../torch/arguments.h"
#include "../torch/autograd.h"
#include "../torch/tensor_element.h"
#include "returns.h"

#include <ATen/LegacyVmapTransforms.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

namespace gradscale {

namespace {

namespace autograd = torch::autograd;
using Tensors = std::vector<at::Tensor>;

// Calls the registered operator through PyTorch's dispatcher, with the dispatch keys that are not excluded yet.
Tensors call_operator(const LinearCall& call) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("gradscale_ext::returns", "");
  torch::jit::Stack stack;
  LinearCall::each(call, ArgumentWriter{stack});
  op.callBoxed(stack);
  return stack.at(0).toTensorVector();
}

// The results of a call by their index: an adjoint returns only the wanted gradients.
std::array<at::Tensor, 3> by_index(const LinearCall& call, Tensors results) {
  std::array<at::Tensor, 3> placed;
  size_t next = 0;
  for (size_t i = 0; i < placed.size() && next < results.size(); ++i) {
    if (!call.is_adjoint || call.wants[i]) {
      placed[i] = std::move(results[next++]);
    }
  }
  return placed;
}

// The call that computes the wanted gradients of a call's inputs from the gradients of its results.
LinearCall transposed(const LinearCall& call, Tensors gradients, const std::array<bool, 3>& wants) {
  LinearCall result = call;
  result.is_adjoint = !call.is_adjoint;
  result.inputs = by_index(call, std::move(gradients));
  result.wants = wants;
  return result;
}

// The autograd node of a call, which saves the coefficients.
class LinearBackward : public SavingNode {
 public:
  void set(const LinearCall& call) {
    call_ = call;
    for (size_t i = 0; i < call_.inputs.size(); ++i) {
      at::Tensor& input = call_.inputs[i];
      if (input.defined()) {
        dtypes_[i] = input.scalar_type();
      }
      input = at::Tensor();
    }
    call_.each_tensor([&](at::Tensor& tensor) {
      save(tensor);
      tensor = at::Tensor();
    });
  }

  std::string name() const override {
    return std::string(function_of(call_.formula).type_name) + (call_.is_adjoint ? "BackwardBackward" : "Backward");
  }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    autograd::variable_list result(call_.inputs.size());
    result.resize(num_outputs());
    LinearCall call = call_;
    Tensors saved = unpacked();
    size_t next = 0;
    call.each_tensor([&](at::Tensor& tensor) { tensor = std::move(saved[next++]); });
    if (std::none_of(gradients.begin(), gradients.end(), [](const at::Tensor& x) { return x.defined(); })) {
      return result;
    }
    std::array<bool, 3> wants{};
    for (size_t i = 0; i < num_outputs(); ++i) {
      wants[i] = dtypes_[i] && task_should_compute_output(i);
    }
    const LinearCall backward = transposed(call, std::move(gradients), wants);
    const std::array<at::Tensor, 3> computed = by_index(backward, call_operator(backward));
    for (size_t i = 0; i < num_outputs(); ++i) {
      if (wants[i] && computed[i].defined()) {
        result[i] = computed[i].to(*dtypes_[i]);
      }
    }
    return result;
  }

 private:
  LinearCall call_{};
  std::array<std::optional<at::ScalarType>, 3> dtypes_;
};

void check_constant(const char* function, const char* name, const at::Tensor& tensor) {
  const bool requires_grad = autograd::compute_requires_grad(tensor);
  TORCH_CHECK_VALUE(
      !requires_grad && !has_tangent(tensor),
      function,
      ": ",
      name,
      requires_grad ? " requires grad" : " has a tangent of forward mode",
      ", but it is a constant and gets no gradient; write ",
      name,
      ".detach()");
}

} // namespace

void check_constants(const MuZeroWindows& windows) {
  constexpr const char* function = "muzero_targets";
  check_constant(function, "rewards", windows.rewards);
  check_constant(function, "root_values", windows.root_values);
  check_constant(function, "root_reward", windows.root_reward);
  check_constant(function, "discount", windows.discounts);
}

std::vector<at::Tensor> returns(const LinearCall& call, bool is_plain) {
  const char* function = function_of(call.formula).name;
  check_constant(function, "ratios", call.ratios);
  check_constant(function, "discount", call.discounts);
  check_constant(function, "lambda_", call.lambdas);
  const auto& [rewards, values, next_values] = call.inputs;
  const bool requires_grad = autograd::compute_requires_grad(rewards, values, next_values);
  Tensors results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = is_plain ? compute_returns(call) : call_operator(call);
  }
  // Discounts and steps of n-step transitions are constants.
  const bool is_transitions = call.formula == Formula::n_step_transitions && !call.is_adjoint;
  const size_t differentiable = is_transitions ? 1 : results.size();
  if (std::any_of(call.inputs.begin(), call.inputs.end(), has_tangent)) {
    LinearCall tangents = call;
    for (at::Tensor& input : tangents.inputs) {
      if (input.defined()) {
        const at::Tensor tangent = input._fw_grad(/*level=*/0);
        input = tangent.defined() ? tangent : at::zeros_symint(input.sym_sizes(), input.options());
      }
    }
    const Tensors result_tangents = returns(tangents, is_plain);
    for (size_t i = 0; i < differentiable; ++i) {
      results[i]._set_fw_grad(result_tangents[i], /*level=*/0, /*is_inplace_op=*/false);
    }
  }
  if (requires_grad) {
    LinearBackward* node = nullptr;
    const NodePtr handle = make_node(node);
    node->set(call);
    node->set_next_edges(autograd::collect_next_edges(rewards, values, next_values));
    for (size_t i = 0; i < differentiable; ++i) {
      autograd::set_history(results[i], handle);
    }
  }
  return results;
}

namespace {

template <class Call>
Call call_from(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  Call call{};
  Call::each(call, ArgumentReader{arguments_of(op, stack).data()});
  return call;
}

template <class Call, Tensors (*compute)(const Call&)>
void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  return_from(op, *stack, compute(call_from<Call>(op, *stack)));
}

// Batching for `is_grads_batched` and for `vectorize` of torch.autograd.functional: the examples become rows of one
// call. gradscale_ext/_returns_operator.py has the rule for torch.func.vmap.
Tensors batched_returns(const LinearCall& call) {
  LinearCall flat = call;
  std::vector<at::Tensor*> places;
  Tensors tensors;
  flat.each_tensor([&](at::Tensor& tensor) {
    if (tensor.defined() && (tensor.dim() != 0 || at::isBatchedTensor(tensor))) {
      places.push_back(&tensor);
      tensors.push_back(tensor);
    }
  });
  const bool batch_first = call.batch_first;
  const int64_t rows = tensors[0].size(batch_first ? 0 : 1);
  // In these views, the dimensions of the examples come first, with the same sizes in all tensors.
  const at::VmapPhysicalViewVec views = at::MultiBatchVmapTransform::logicalToPhysical(tensors);
  const int64_t dims = views[0].numBatchDims();
  const auto example_sizes = views[0].tensor().sizes().slice(0, dims).vec();
  for (size_t i = 0; i < places.size(); ++i) {
    const bool is_scalar = tensors[i].dim() == 0;
    at::Tensor tensor = views[i].tensor();
    tensor = is_scalar ? tensor.unsqueeze(-1).unsqueeze(-1) : batch_first ? tensor : tensor.transpose(-1, -2);
    std::vector<int64_t> sizes = example_sizes;
    sizes.insert(sizes.end(), {rows, tensor.size(-1)});
    tensor = tensor.expand(sizes).flatten(0, dims);
    *places[i] = batch_first ? tensor : tensor.t();
  }
  Tensors results = call_operator(flat);
  std::vector<int64_t> sizes = example_sizes;
  sizes.push_back(rows);
  for (at::Tensor& result : results) {
    result = batch_first ? result.unflatten(0, sizes) : result.t().unflatten(0, sizes).transpose(-1, -2).contiguous();
    result = views[0].getPhysicalToLogicalMap().apply(result);
  }
  return results;
}

Tensors returns_with_autograd(const LinearCall& call) {
  return returns(call, /*is_plain=*/false);
}

void muzero_with_checks(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_constants(call_from<MuZeroWindows>(op, *stack));
  at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

template <auto function>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<function>();
}

template <class Call>
void define(torch::Library& m, const char* name) {
  std::string schema = std::string(name) + "(";
  const Call call{};
  Call::each(call, SchemaWriter{schema});
  m.def(torch::schema((schema + ") -> Tensor[]").c_str()));
}

} // namespace

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  define<LinearCall>(m, "returns");
  define<MuZeroWindows>(m, "muzero_targets");
}

TORCH_LIBRARY_IMPL(gradscale_ext, Autograd, m) {
  m.impl("returns", boxed<&kernel<LinearCall, returns_with_autograd>>());
  m.impl("muzero_targets", boxed<&muzero_with_checks>());
}

TORCH_LIBRARY_IMPL(gradscale_ext, Batched, m) {
  m.impl("returns", boxed<&kernel<LinearCall, batched_returns>>());
}

TORCH_LIBRARY_IMPL(gradscale_ext, CompositeExplicitAutograd, m) {
  m.impl("returns", boxed<&kernel<LinearCall, compute_returns>>());
  m.impl("muzero_targets", boxed<&kernel<MuZeroWindows, muzero_targets>>());
}

} // namespace gradscale
