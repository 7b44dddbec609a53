// The operators that autograd, torch.func transforms and compilers see. A function and its adjoint are both linear, and
// each computes the gradient of the other, so these two cover every order of forward- and reverse-mode differentiation.
#include "../torch/autograd.h"
#include "../torch/tensor_element.h"
#include "returns.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <optional>

namespace gradscale {

namespace {

namespace autograd = torch::autograd;
using Tensors = std::vector<at::Tensor>;
using Optional = std::optional<at::Tensor>;

Optional optional(const at::Tensor& tensor) {
  return tensor.defined() ? Optional(tensor) : std::nullopt;
}

} // namespace

std::vector<at::Tensor> call_operator(const LinearCall& call) {
  static const auto function = c10::Dispatcher::singleton().findSchemaOrThrow("gradscale_ext::returns", "");
  static const auto adjoint = c10::Dispatcher::singleton().findSchemaOrThrow("gradscale_ext::returns_adjoint", "");
  const ReturnsCoefficients& c = call.coefficients;
  std::vector<c10::IValue> stack{static_cast<int64_t>(call.function)};
  if (call.is_adjoint) {
    stack.emplace_back(c10::List<bool>({call.wants[0], call.wants[1], call.wants[2]}));
    stack.emplace_back(call.observations);
    stack.emplace_back(optional(call.inputs[0]));
    stack.emplace_back(optional(call.inputs[1]));
  } else {
    stack.emplace_back(call.inputs[0]);
    stack.emplace_back(optional(call.inputs[1]));
    stack.emplace_back(optional(call.inputs[2]));
  }
  for (const at::Tensor* tensor : {&c.ratios, &c.discounts, &c.lambdas, &c.terminated, &c.truncated, &c.mask}) {
    stack.emplace_back(optional(*tensor));
  }
  for (const double number : {c.discount, c.lambda, c.limits[0], c.limits[1], c.limits[2]}) {
    stack.emplace_back(number);
  }
  stack.emplace_back(c.n);
  stack.emplace_back(c.batch_first);
  (call.is_adjoint ? adjoint : function).callBoxed(stack);
  return stack.at(0).toTensorVector();
}

namespace {

bool reads_values(Formula function) {
  return function == Formula::advantages || function == Formula::vtrace || function == Formula::retrace;
}

// Returns the call that computes the wanted gradients of a call's inputs from the gradients of its results. Replaces a
// missing gradient that the function reads with zeros of `shape`, the shape of the first input.
LinearCall transposed(
    const LinearCall& call,
    Tensors gradients,
    const std::array<bool, 3>& wants,
    const std::vector<c10::SymInt>& shape) {
  LinearCall result{!call.is_adjoint, call.function, {}, call.observations, wants, call.coefficients};
  if (!call.is_adjoint) {
    for (size_t i = 0; i < gradients.size(); ++i) {
      result.inputs[i] = std::move(gradients[i]);
    }
    return result;
  }
  const at::Tensor* given = nullptr;
  size_t next = 0;
  for (int i = 0; i < 3; ++i) {
    if (call.wants[i]) {
      result.inputs[i] = std::move(gradients[next++]);
      given = result.inputs[i].defined() ? &result.inputs[i] : given;
    }
  }
  const at::TensorOptions options = given->options();
  const std::array<bool, 3> reads{true, call.observations || reads_values(call.function), !call.observations};
  for (int i = 0; i < 3; ++i) {
    if (reads[i] && !result.inputs[i].defined()) {
      std::vector<c10::SymInt> size = shape;
      if (i == 1 && call.observations) {
        c10::SymInt& steps = size[call.coefficients.batch_first ? 1 : 0];
        steps = steps + 1;
      }
      result.inputs[i] = at::zeros_symint(size, options);
    }
  }
  return result;
}

// The autograd node of a call. It saves the coefficients as SavedVariables, which detect in-place changes.
class LinearBackward : public BackwardNode {
 public:
  void set(const LinearCall& call) {
    call_ = call;
    for (size_t i = 0; i < call_.inputs.size(); ++i) {
      at::Tensor& input = call_.inputs[i];
      if (input.defined()) {
        dtypes_[i] = input.scalar_type();
        if (shape_.empty()) {
          shape_ = input.sym_sizes().vec();
        }
      }
      input = at::Tensor();
    }
    const auto tensors = call_.coefficients.tensors();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i]->defined()) {
        saved_[i] = autograd::SavedVariable(*tensors[i], /*is_output=*/false);
        *tensors[i] = at::Tensor();
        is_saved_[i] = true;
      }
    }
  }

  std::string name() const override {
    static const char* const names[] = {"LambdaReturns", "GeneralizedAdvantages", "VTrace", "Retrace", "NStepReturns"};
    return std::string(names[static_cast<int32_t>(call_.function)]) +
           (call_.is_adjoint ? "BackwardBackward" : "Backward");
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& saved : saved_) {
      saved.reset_data();
    }
    released_ = true;
  }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    autograd::variable_list result(call_.inputs.size());
    result.resize(num_outputs());
    const LinearCall call = unpacked();
    bool any = false;
    for (const at::Tensor& gradient : gradients) {
      any = any || gradient.defined();
    }
    if (!any) {
      return result;
    }
    std::array<bool, 3> wants{};
    for (size_t i = 0; i < num_outputs(); ++i) {
      wants[i] = dtypes_[i] && task_should_compute_output(i);
    }
    // The function returns all of its results, and the adjoint only the wanted gradients.
    const Tensors computed = call_operator(transposed(call, std::move(gradients), wants, shape_));
    size_t next = 0;
    for (size_t i = 0; i < num_outputs(); ++i) {
      const bool is_computed = call.is_adjoint ? i < computed.size() : wants[i];
      if (is_computed) {
        const at::Tensor& gradient = computed[call.is_adjoint ? i : next++];
        if (wants[i]) {
          result[i] = gradient.to(*dtypes_[i]);
        }
      }
    }
    return result;
  }

 private:
  LinearCall unpacked() {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released_, autograd::ERR_BACKWARD_TWICE);
    LinearCall call = call_;
    const auto tensors = call.coefficients.tensors();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (is_saved_[i]) {
        *tensors[i] = saved_[i].unpack();
      }
    }
    return call;
  }

  LinearCall call_{};
  std::array<std::optional<at::ScalarType>, 3> dtypes_;
  std::vector<c10::SymInt> shape_;
  std::array<autograd::SavedVariable, ReturnsCoefficients::kTensors> saved_;
  std::array<bool, ReturnsCoefficients::kTensors> is_saved_{};
  bool released_ = false;
};

bool is_differentiated(const at::Tensor& tensor) {
  return tensor.defined() && ((at::GradMode::is_enabled() && tensor.requires_grad()) || has_tangent(tensor));
}

void check_constant(const char* function, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      !is_differentiated(tensor),
      function,
      ": ",
      name,
      " requires grad, but it is a constant and gets no gradient; write ",
      name,
      ".detach()");
}

void check_constants(const LinearCall& call) {
  static const char* const functions[] = {
      "lambda_returns", "generalized_advantages", "vtrace", "retrace", "n_step_returns"};
  const char* function = functions[static_cast<int32_t>(call.function)];
  check_constant(function, "ratios", call.coefficients.ratios);
  check_constant(function, "discount", call.coefficients.discounts);
  check_constant(function, "lambda_", call.coefficients.lambdas);
}

} // namespace

std::vector<at::Tensor> returns(const LinearCall& call, bool is_plain) {
  check_constants(call);
  bool requires_grad = false, has_tangents = false;
  for (const at::Tensor& input : call.inputs) {
    if (input.defined()) {
      requires_grad = requires_grad || (at::GradMode::is_enabled() && input.requires_grad());
      has_tangents = has_tangents || input._fw_grad(/*level=*/0).defined();
    }
  }
  Tensors results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = is_plain ? compute_returns(call) : call_operator(call);
  }
  if (has_tangents) {
    LinearCall tangents = call;
    for (at::Tensor& input : tangents.inputs) {
      if (input.defined()) {
        const at::Tensor tangent = input._fw_grad(/*level=*/0);
        input = tangent.defined() ? tangent : at::zeros_symint(input.sym_sizes(), input.options());
      }
    }
    const Tensors result_tangents = returns(tangents, is_plain);
    for (size_t i = 0; i < results.size(); ++i) {
      results[i]._set_fw_grad(result_tangents[i], /*level=*/0, /*is_inplace_op=*/false);
    }
  }
  if (requires_grad) {
    LinearBackward* node = nullptr;
    const NodePtr handle = make_node(node);
    node->set(call);
    node->set_next_edges(autograd::collect_next_edges(call.inputs[0], call.inputs[1], call.inputs[2]));
    autograd::set_history(results, handle);
  }
  return results;
}

namespace {

ReturnsCoefficients make_coefficients(
    const Optional& ratios,
    const Optional& discounts,
    const Optional& lambdas,
    const Optional& terminated,
    const Optional& truncated,
    const Optional& mask,
    double discount,
    double lambda,
    double limit_0,
    double limit_1,
    double limit_2,
    c10::SymInt n,
    bool batch_first) {
  const auto tensor = [](const Optional& given) { return given.value_or(at::Tensor()); };
  return {
      tensor(ratios),
      tensor(discounts),
      tensor(lambdas),
      tensor(terminated),
      tensor(truncated),
      tensor(mask),
      discount,
      lambda,
      {limit_0, limit_1, limit_2},
      std::move(n),
      batch_first};
}

Tensors returns_with_autograd(const LinearCall& call) {
  return returns(call, /*is_plain=*/false);
}

using Kernel = Tensors (*)(const LinearCall&);

template <Kernel kernel>
Tensors returns_operator(
    int64_t formula,
    const at::Tensor& rewards,
    const Optional& values,
    const Optional& next_values,
    const Optional& ratios,
    const Optional& discounts,
    const Optional& lambdas,
    const Optional& terminated,
    const Optional& truncated,
    const Optional& mask,
    double discount,
    double lambda,
    double limit_0,
    double limit_1,
    double limit_2,
    c10::SymInt n,
    bool batch_first) {
  return kernel(
      {/*is_adjoint=*/false,
       static_cast<Formula>(formula),
       {rewards, values.value_or(at::Tensor()), next_values.value_or(at::Tensor())},
       /*observations=*/!next_values,
       {},
       make_coefficients(
           ratios,
           discounts,
           lambdas,
           terminated,
           truncated,
           mask,
           discount,
           lambda,
           limit_0,
           limit_1,
           limit_2,
           std::move(n),
           batch_first)});
}

template <Kernel kernel>
Tensors adjoint_operator(
    int64_t formula,
    std::array<bool, 3> wants,
    bool observations,
    const Optional& gradient,
    const Optional& second_gradient,
    const Optional& ratios,
    const Optional& discounts,
    const Optional& lambdas,
    const Optional& terminated,
    const Optional& truncated,
    const Optional& mask,
    double discount,
    double lambda,
    double limit_0,
    double limit_1,
    double limit_2,
    c10::SymInt n,
    bool batch_first) {
  return kernel(
      {/*is_adjoint=*/true,
       static_cast<Formula>(formula),
       {gradient.value_or(at::Tensor()), second_gradient.value_or(at::Tensor()), at::Tensor()},
       observations,
       wants,
       make_coefficients(
           ratios,
           discounts,
           lambdas,
           terminated,
           truncated,
           mask,
           discount,
           lambda,
           limit_0,
           limit_1,
           limit_2,
           std::move(n),
           batch_first)});
}

Tensors muzero_operator(
    const at::Tensor& rewards,
    const at::Tensor& root_values,
    const Optional& lengths,
    const Optional& terminated,
    const Optional& to_play,
    const Optional& root_reward,
    const Optional& discounts,
    double discount,
    c10::SymInt num_unroll_steps,
    c10::SymInt td_steps,
    c10::SymInt prefix_horizon,
    bool batch_first) {
  const auto tensor = [](const Optional& given) { return given.value_or(at::Tensor()); };
  return muzero_targets(
      {rewards,
       root_values,
       tensor(lengths),
       tensor(terminated),
       tensor(to_play),
       tensor(root_reward),
       discount,
       tensor(discounts),
       num_unroll_steps.expect_int(),
       td_steps.expect_int(),
       prefix_horizon.expect_int(),
       batch_first});
}

template <class... Numbers>
Tensors muzero_with_checks(
    const at::Tensor& rewards,
    const at::Tensor& root_values,
    const Optional& lengths,
    const Optional& terminated,
    const Optional& to_play,
    const Optional& root_reward,
    const Optional& discounts,
    Numbers... numbers) {
  check_constant("muzero_targets", "rewards", rewards);
  check_constant("muzero_targets", "root_values", root_values);
  check_constant("muzero_targets", "root_reward", root_reward.value_or(at::Tensor()));
  check_constant("muzero_targets", "discount", discounts.value_or(at::Tensor()));
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gradscale_ext::muzero_targets", "")
                             .typed<decltype(muzero_operator)>();
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(rewards, root_values, lengths, terminated, to_play, root_reward, discounts, std::move(numbers)...);
}

} // namespace

#define GRADSCALE_COEFFICIENTS                                                                                      \
  "Tensor? ratios, Tensor? discounts, Tensor? lambdas, Tensor? terminated, Tensor? truncated, Tensor? mask, float " \
  "discount, float lambda_, float limit_0, float limit_1, float limit_2, SymInt n, bool batch_first) -> Tensor[]"

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  m.def("returns(int formula, Tensor rewards, Tensor? values, Tensor? next_values, " GRADSCALE_COEFFICIENTS);
  m.def(
      "returns_adjoint(int formula, bool[3] wants, bool observations, Tensor? gradient, Tensor? "
      "second_gradient, " GRADSCALE_COEFFICIENTS);
  m.def(
      "muzero_targets(Tensor rewards, Tensor root_values, Tensor? lengths, Tensor? terminated, Tensor? to_play, "
      "Tensor? root_reward, Tensor? discounts, float discount, SymInt num_unroll_steps, SymInt td_steps, "
      "SymInt prefix_horizon, bool batch_first) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(gradscale_ext, Autograd, m) {
  m.impl("returns", returns_operator<returns_with_autograd>);
  m.impl("returns_adjoint", adjoint_operator<returns_with_autograd>);
  m.impl("muzero_targets", muzero_with_checks<double, c10::SymInt, c10::SymInt, c10::SymInt, bool>);
}

TORCH_LIBRARY_IMPL(gradscale_ext, Batched, m) {
  m.impl("returns", returns_operator<batched_returns>);
  m.impl("returns_adjoint", adjoint_operator<batched_returns>);
}

TORCH_LIBRARY_IMPL(gradscale_ext, CompositeExplicitAutograd, m) {
  m.impl("returns", returns_operator<compute_returns>);
  m.impl("returns_adjoint", adjoint_operator<compute_returns>);
  m.impl("muzero_targets", muzero_operator);
}

} // namespace gradscale
