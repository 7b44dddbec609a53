// The common part of all gradient-flow operators. The result is a view of x with the operator's gradient function.
//
// An operator is a struct with
//
//   static constexpr const char* kName, *kNodeName;
//   std::array<Value*, n> values();                      its arguments that may be tensors
//   std::vector<c10::IValue> others() const              the arguments that follow them in its schema
//   void check(const at::Tensor& x) const;               raises for wrong arguments
//   at::Tensor gradient(at::Tensor incoming) const;      the result for a dense gradient
//   at::Tensor tangent(const at::Tensor& incoming) const the result for a tangent in forward mode, or raises
//   bool keeps_zeros() const                             true if gradient() accepts the values of a sparse gradient
#pragma once

#include "../torch/autograd.h"
#include "value.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/detach.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace gradscale {

inline void check_differentiable(const char* name, const at::Tensor& x) {
  TORCH_CHECK_TYPE(
      x.is_floating_point() || x.is_complex(),
      name,
      ": x must be a floating or complex tensor, but its dtype is ",
      dtype_name(x));
  TORCH_CHECK_TYPE(!x.is_sparse() && !x.is_sparse_csr(), name, ": x must be dense, but its layout is ", x.layout());
}

// A view without a graph. It does not require grad, like the result of any operation while no gradient is recorded.
inline at::Tensor without_gradient(const at::Tensor& x) {
  return x.requires_grad() ? at::detach(x) : at::alias(x);
}

// The result below autograd: a plain view. Inside a torch.func transform, the operator is called again, so that the
// outer transforms see it too.
template <class Operator>
at::Tensor below_this_level(const at::Tensor& x, Operator& op) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (!inside_transform()) {
    return at::alias(x);
  }
  std::vector<c10::IValue> stack{x};
  bool has_tensor = false;
  for (const Value* value : op.values()) {
    has_tensor = has_tensor || std::holds_alternative<at::Tensor>(*value);
    std::visit([&](const auto& argument) { stack.emplace_back(argument); }, *value);
  }
  for (c10::IValue& argument : op.others()) {
    stack.push_back(std::move(argument));
  }
  const std::string name = std::string("gradscale_ext::") + Operator::kName;
  c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), has_tensor ? "tensor" : "").callBoxed(stack);
  return stack.at(0).toTensor();
}

// A view for autograd, so that in-place operations on x and on the result increment the same version counter. It is
// marked as created in a custom function, so that an in-place operation that would lose the operator raises.
// apply_operator() adds the tangent of forward mode.
template <class Operator>
at::Tensor operator_view(const at::Tensor& x, Operator& op) {
  return torch::autograd::as_view(
      x,
      below_this_level(x, op),
      /*is_bw_differentiable=*/true,
      /*is_fw_differentiable=*/false,
      /*view_func=*/nullptr,
      /*rev_view_func=*/nullptr,
      torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
}

// The operator as a node of the graph. Its tensor arguments are saved tensors of autograd: changing them in place
// afterwards raises in the backward pass, and hooks on saved tensors see them.
template <class Operator>
class OperatorBackward : public BackwardNode {
 public:
  void set(Operator op) {
    operator_ = std::move(op);
    const auto values = operator_->values();
    for (size_t i = 0; i < values.size(); ++i) {
      if (const at::Tensor* tensor = std::get_if<at::Tensor>(values[i])) {
        saved_[i] = torch::autograd::SavedVariable(*tensor, /*is_output=*/false);
        *values[i] = at::Tensor();
        saves_ = true;
      }
    }
  }

  std::string name() const override {
    return Operator::kNodeName;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& saved : saved_) {
      saved.reset_data();
    }
    released_ = saves_;
  }

  // For compiled autograd, numbers are constants of the graph, and saved tensors are inputs, which apply_with_saved()
  // replaces by tensors of the graph.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    Operator op = *operator_;
    for (const c10::IValue& other : op.others()) {
      if (other.isInt()) {
        args.collect(other.toInt());
      } else if (other.isDouble()) {
        args.collect(other.toDouble());
      } else if (other.isString()) {
        args.collect(other.toStringRef());
      } else if (other.toTensor().defined()) { // counters, which the graph would have to update
        return BackwardNode::compiled_args(args);
      }
    }
    for (const Value* value : op.values()) {
      args.collect(std::holds_alternative<double>(*value) ? std::get<double>(*value) : kNoNumber);
    }
    for (const auto& saved : saved_) {
      args.collect(saved, /*is_output=*/false);
    }
  }

  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& gradients, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    for (auto& saved : saved_) {
      swap.before(saved);
    }
    auto result = apply(torch::autograd::variable_list(gradients));
    for (auto& saved : saved_) {
      swap.after(saved);
    }
    return result;
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const Operator op = unpacked();
    torch::autograd::variable_list result(1);
    at::Tensor gradient = std::move(gradients[0]);
    gradients.clear();
    if (gradient.defined()) {
      result[0] = gradient.layout() == at::kStrided ? op.gradient(std::move(gradient)) : sparse_gradient(op, gradient);
    }
    return result;
  }

 private:
  static constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

  Operator unpacked() {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    Operator op = *operator_;
    const auto values = op.values();
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::holds_alternative<at::Tensor>(*values[i])) {
        *values[i] = saved_[i].unpack();
      }
    }
    return op;
  }

  static at::Tensor sparse_gradient(const Operator& op, const at::Tensor& gradient) {
    TORCH_CHECK_TYPE(
        gradient.layout() == at::kSparse && op.keeps_zeros(),
        Operator::kName,
        ": the gradient must be dense here, but its layout is ",
        gradient.layout(),
        "; make it dense (sparse=False in an embedding)");
    const at::Tensor summed = gradient.coalesce();
    return at::_sparse_coo_tensor_unsafe(
        summed._indices(), op.gradient(summed._values()), summed.sizes(), summed.options(), /*is_coalesced=*/true);
  }

  std::optional<Operator> operator_;
  std::array<torch::autograd::SavedVariable, std::tuple_size_v<decltype(std::declval<Operator&>().values())>> saved_;
  bool saves_ = false;
  bool released_ = false;
};

// Returns a view of x whose gradient passes through the operator on its way to x.
template <class Operator>
at::Tensor apply_operator(const at::Tensor& x, Operator op) {
  check_differentiable(Operator::kName, x);
  op.check(x);
  for (Value* value : op.values()) {
    *value = read_if_free(std::move(*value));
  }
  const at::Tensor& tangent = x._fw_grad(/*level=*/0);
  const bool records = at::GradMode::is_enabled();
  if (!records && !tangent.defined()) {
    return inside_transform() ? below_this_level(x, op) : without_gradient(x);
  }
  const at::Tensor result = operator_view(x, op);
  if (tangent.defined()) {
    result._set_fw_grad(op.tangent(tangent), /*level=*/0, /*is_inplace_op=*/false);
  }
  if (records && x.requires_grad()) {
    OperatorBackward<Operator>* node = nullptr;
    const NodePtr handle = make_node(node);
    node->set(std::move(op));
    node->set_next_edges(torch::autograd::collect_next_edges(x));
    torch::autograd::set_history(result, handle);
  }
  return result;
}

// The kernel below autograd of an operator with the given autograd kernel. It records no gradient.
template <class... Arguments>
auto below_autograd(at::Tensor (* /*autograd_kernel*/)(const at::Tensor&, Arguments...)) {
  return +[](const at::Tensor& x, Arguments... /*arguments*/) { return without_gradient(x); };
}

[[noreturn]] inline void no_forward_mode(const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      name,
      ": it changes gradients in a nonlinear way, which has no meaning for the tangents of forward mode (jvp, jacfwd, "
      "hessian, forward_ad); use reverse mode (grad, vjp, jacrev; jacrev(jacrev(f)) in place of hessian(f))");
}

} // namespace gradscale
