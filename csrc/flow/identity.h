// The common part of all gradient-flow operators. The result is a view of x with the operator's gradient function. Each
// operator is in the file of its name; reverse_gradient is in the file of scale_gradient, and normalize_gradient in the
// file of clip_gradient_norm.
//
// An operator is a struct with
//
//   static constexpr const char* kName, *kNodeName;
//   static constexpr bool kLinear;                   true if gradient() also computes tangents in forward mode
//   static constexpr Overload kOverloads[];
//   static void each(Self& self, Visit visit)        visits its arguments after x
//   void check(const at::Tensor& x) const;           raises for wrong arguments
//   at::Tensor gradient(at::Tensor incoming) const;  the result for a dense gradient
//   bool keeps_zeros() const                         true if gradient() accepts the values of a sparse gradient
#pragma once

#include "../torch/arguments.h"
#include "../torch/autograd.h"
#include "../torch/compiled_autograd.h"
#include "../torch/functionalize.h"
#include "../torch/tensor_element.h"
#include "../torch/to_device.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/detach.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace gradscale {

// ---- Values: how they are read and checked --------------------------------------------------------------------------

// The dtype as Python writes it.
inline std::string dtype_name(const at::Tensor& tensor) {
  return std::string("torch.") + std::string(c10::getDtypeNames(tensor.scalar_type()).first);
}

// The type that gradients of the given dtype are computed in.
inline at::ScalarType precise_type(at::ScalarType dtype) {
  return c10::toRealValueType(dtype) == at::kDouble ? at::kDouble : at::kFloat;
}

// Reads a scalar tensor on the CPU at once, unless a transform or a tracer has to see the tensor.
inline Value read_if_free(Value value) {
  if (const at::Tensor* tensor = std::get_if<at::Tensor>(&value)) {
    if (tensor->dim() == 0 && tensor->is_cpu() && ordinary_context() && ordinary_tensor(*tensor)) {
      return tensor->item<double>();
    }
  }
  return value;
}

// The widest type of real numbers that a device has.
inline at::ScalarType widest_type(c10::Device device) {
  return device.is_mps() || device.is_xpu() ? at::kFloat : at::kDouble;
}

// A number in the given type. PyTorch refuses a number beyond the range of float; the cast makes it infinite.
inline double rounded_to(double number, at::ScalarType type) {
  return type == at::kFloat ? static_cast<float>(number) : number;
}

// The value of an operator's argument as a tensor of the given type, float or double, on the gradient's device.
inline at::Tensor value_like(
    const at::Tensor& gradient, const Value& value, at::ScalarType type, const char* name, const char* argument) {
  if (const double* number = std::get_if<double>(&value)) {
    return at::scalar_tensor(rounded_to(*number, type), gradient.options().dtype(type));
  }
  return to_device(std::get<at::Tensor>(value), gradient.device(), type, name, argument);
}

// True for a tensor whose kind the C++ code knows: not nested, sparse, quantized or of a Python type of its own.
// `gradscale_ext._flow_rules.check_kinds` names the others.
inline bool is_of_known_kind(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

// Raises unless a tensor argument is real, without a gradient, broadcastable to `shape` (called `what`), and on x's
// device.
inline void check_value(
    const char* name,
    const char* argument,
    const Value& value,
    const at::Tensor& x,
    c10::SymIntArrayRef shape,
    const char* what) {
  if (!std::holds_alternative<at::Tensor>(value)) {
    return;
  }
  const at::Tensor& tensor = std::get<at::Tensor>(value);
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      at::isIntegralType(dtype, /*includeBool=*/false) || (at::isFloatingType(dtype) && dtype != at::kFloat4_e2m1fn_x2),
      name,
      ": ",
      argument,
      " must be real, but it is a tensor of dtype ",
      dtype_name(tensor));
  TORCH_CHECK_VALUE(
      !tensor.requires_grad(), name, ": ", argument, " requires grad, but it gets no gradient; detach() it");
  TORCH_CHECK_VALUE(
      !tensor._fw_grad(/*level=*/0).defined(),
      name,
      ": ",
      argument,
      " has a tangent of forward mode, but it gets no gradient; detach() it");
  const int64_t dims = static_cast<int64_t>(shape.size());
  bool broadcasts = tensor.dim() <= dims;
  for (int64_t i = 1; broadcasts && i <= tensor.dim(); ++i) {
    broadcasts = tensor.sym_size(-i) == 1 || tensor.sym_size(-i) == shape[dims - i];
  }
  TORCH_CHECK_VALUE(
      broadcasts,
      name,
      ": ",
      argument,
      " must broadcast to ",
      what,
      ", ",
      shape,
      ", but its shape is ",
      tensor.sym_sizes());
  TORCH_CHECK_VALUE(
      tensor.device() == x.device() || (tensor.dim() == 0 && tensor.device().is_cpu()),
      name,
      ": ",
      argument,
      " must be on the device of x, ",
      x.device(),
      ", but it is on ",
      tensor.device());
}

// ---- Gradients that the kernels process, and whose memory they may overwrite ----------------------------------------

// True if `gradient`, as a backward function received it, has no other owner, so that its memory may be overwritten: no
// graph of the backward pass is built, no other tensor shares the storage, and the memory is PyTorch's own (a buffer
// that came from NumPy or DLPack is not resizable).
inline bool owned_by_nobody_else(const at::Tensor& gradient) {
  return !at::GradMode::is_enabled() && torch::autograd::impl::is_tensor_stealable(gradient) &&
         gradient.layout() == at::kStrided && !at::isTensorSubclassLike(gradient) && !gradient._is_zerotensor() &&
         !gradient.is_conj() && !gradient.is_neg() && !gradient.is_inference() && gradient.has_storage() &&
         gradient.storage().use_count() == 1 && gradient.storage().unsafeGetStorageImpl()->resizable() &&
         gradient.is_non_overlapping_and_dense();
}

// True if the C++ kernels can process a gradient with these arguments: no graph is being recorded, and all defined
// tensors are ordinary tensors on one device.
inline bool fused(const at::Tensor& gradient, std::initializer_list<at::Tensor> arguments) {
  if (at::GradMode::is_enabled() || !ordinary_context() || !ordinary_tensor(gradient) ||
      !has_element(c10::toRealValueType(gradient.scalar_type()))) {
    return false;
  }
  return std::all_of(arguments.begin(), arguments.end(), [&](const at::Tensor& argument) {
    return !argument.defined() || (ordinary_tensor(argument) && argument.device() == gradient.device());
  });
}

// ---- The view and its node ------------------------------------------------------------------------------------------

constexpr size_t kMostValues = 2; // of an operator

// The dtypes of gradients. float8_e8m0fnu has no zero, and PyTorch cannot convert float4.
inline bool has_gradients(at::ScalarType dtype) {
  return (at::isFloatingType(dtype) && dtype != at::kFloat8_e8m0fnu && dtype != at::kFloat4_e2m1fn_x2) ||
         at::isComplexType(dtype);
}

inline void check_differentiable(const char* name, const at::Tensor& x) {
  TORCH_CHECK_TYPE(
      has_gradients(x.scalar_type()),
      name,
      ": x must be a floating or complex tensor, but its dtype is ",
      dtype_name(x),
      x.is_floating_point() ? ", which has no gradients; write .float()" : "");
  TORCH_CHECK_TYPE(x.layout() == at::kStrided, name, ": x must be dense, but its layout is ", x.layout());
}

// A view without a graph. It does not require grad, like the result of any operation while no gradient is recorded.
inline at::Tensor without_gradient(const at::Tensor& x) {
  return x.requires_grad() ? at::detach(x) : at::alias(x);
}

// The arguments that may be tensors.
template <class Operator>
c10::SmallVector<Value*, kMostValues> values_of(Operator& op) {
  c10::SmallVector<Value*, kMostValues> values;
  Operator::each(op, [&](const char*, auto& argument) {
    if constexpr (std::is_same_v<decltype(argument), Value&>) {
      values.push_back(&argument);
    }
  });
  return values;
}

inline bool is_tensor(const Value* value) {
  return std::holds_alternative<at::Tensor>(*value);
}

// An overload of a registered operator: a name, and the Values that are tensors, from the lowest bit on.
struct Overload {
  const char* name;
  unsigned tensors;
};

// The name of the overload that accepts the operator's Values.
template <class Operator>
const char* overload_of(Operator& op) {
  unsigned tensors = 0;
  unsigned bit = 1;
  for (const Value* value : values_of(op)) {
    tensors |= is_tensor(value) ? bit : 0;
    bit <<= 1;
  }
  return std::find_if(
             std::begin(Operator::kOverloads),
             std::end(Operator::kOverloads),
             [&](const Overload& overload) { return overload.tensors == tensors; })
      ->name;
}

// The result below autograd: a plain view. Inside a torch.func transform, the operator is called again, so that the
// outer transforms see it too.
template <class Operator>
at::Tensor below_this_level(const at::Tensor& x, Operator& op) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (!inside_transform()) {
    return at::alias(x);
  }
  torch::jit::Stack stack{x};
  Operator::each(op, ArgumentWriter{stack});
  const std::string name = std::string("gradscale_ext::") + Operator::kName;
  c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload_of(op)).callBoxed(stack);
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

// The operator as a node of the graph, which saves the Values that are tensors.
template <class Operator>
class OperatorBackward : public SavingNode {
 public:
  void set(Operator op) {
    operator_ = std::move(op);
    for (Value* value : values_of(operator_)) {
      if (is_tensor(value)) {
        save(std::get<at::Tensor>(*value));
        *value = at::Tensor();
      }
    }
  }

  std::string name() const override {
    return Operator::kNodeName;
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const Operator op = with_saved_tensors();
    at::Tensor gradient = std::move(gradients[0]);
    gradients.clear();
    return gradients_of(op, std::move(gradient));
  }

  // For compiled autograd, numbers are constants of the graph, and tensors are its inputs.
  void compiled_args(CompiledNodeArgs& args) const override {
    Operator::each(operator_, [&](const char*, const auto& argument) {
      if constexpr (std::is_same_v<std::decay_t<decltype(argument)>, Value>) {
        args.collect(is_tensor(&argument) ? std::nullopt : std::optional(std::get<double>(argument)));
      } else {
        args.collect(argument);
      }
    });
    args.collect(saved_, /*is_output=*/false);
  }

  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& gradients, SwapSavedVariables& swap) override {
    const auto for_each_tensor = [&](auto visit) {
      Operator::each(operator_, [&](const char*, auto& argument) {
        if constexpr (std::is_same_v<std::decay_t<decltype(argument)>, at::Tensor>) {
          visit(argument);
        }
      });
      visit(saved_);
    };
    for_each_tensor([&](auto& tensors) { swap.before(tensors); });
    const Operator op = with_saved_tensors();
    torch::jit::Stack arguments;
    Operator::each(op, ArgumentWriter{arguments});
    const auto traced = [](const torch::autograd::variable_list& gradients, const std::vector<c10::IValue>& arguments) {
      Operator op{};
      Operator::each(op, ArgumentReader{arguments.data()});
      return gradients_of(op, gradients[0]);
    };
    auto result = call_in_graph(swap, Operator::kNodeName, traced, gradients, arguments, next_edges());
    for_each_tensor([&](auto& tensors) { swap.after(tensors); });
    return result;
  }

 private:
  Operator with_saved_tensors() {
    Operator op = operator_;
    auto tensors = unpacked();
    auto next = tensors.begin();
    for (Value* value : values_of(op)) {
      if (is_tensor(value)) {
        *value = read_if_free(std::move(*next++));
      }
    }
    return op;
  }

  static torch::autograd::variable_list gradients_of(const Operator& op, at::Tensor gradient) {
    torch::autograd::variable_list result(1);
    if (gradient.defined()) {
      result[0] = gradient.layout() == at::kStrided ? op.gradient(std::move(gradient)) : sparse_gradient(op, gradient);
    }
    return result;
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

  Operator operator_{};
};

// Returns a view of x whose gradient passes through the operator on its way to x.
template <class Operator>
at::Tensor apply_operator(const at::Tensor& x, Operator op) {
  check_differentiable(Operator::kName, x);
  op.check(x);
  for (Value* value : values_of(op)) {
    *value = read_if_free(std::move(*value));
  }
  const at::Tensor& tangent = x._fw_grad(/*level=*/0);
  const bool records = at::GradMode::is_enabled();
  if (!records && !tangent.defined()) {
    return inside_transform() ? below_this_level(x, op) : without_gradient(x);
  }
  const at::Tensor result = operator_view(x, op);
  if (tangent.defined()) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        Operator::kLinear,
        Operator::kName,
        ": it changes gradients in a nonlinear way, which has no meaning for the tangents of forward mode (jvp, "
        "jacfwd, hessian, forward_ad); use reverse mode (grad, vjp, jacrev; jacrev(jacrev(f)) in place of "
        "hessian(f))");
    result._set_fw_grad(op.gradient(tangent), /*level=*/0, /*is_inplace_op=*/false);
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

// ---- Registration ---------------------------------------------------------------------------------------------------

template <class Operator>
void autograd_kernel(const c10::OperatorHandle& schema, torch::jit::Stack* stack) {
  const at::ArrayRef<c10::IValue> arguments = arguments_of(schema, *stack);
  const at::Tensor x = arguments[0].toTensor();
  Operator op{};
  Operator::each(op, ArgumentReader{&arguments[1]});
  return_from(schema, *stack, apply_operator(x, std::move(op)));
}

// Below autograd, where no gradient is recorded.
inline void view_kernel(const c10::OperatorHandle& schema, torch::jit::Stack* stack) {
  const at::Tensor x = arguments_of(schema, *stack)[0].toTensor();
  return_from(schema, *stack, without_gradient(x));
}

// In a function that is functionalized. Autograd is below functionalization and sees the operator there. The result is
// a view that functionalization does not know, so that x and the result must not be changed in place afterwards: they
// are frozen.
inline void functionalized_kernel(const c10::OperatorHandle& schema, torch::jit::Stack* stack) {
  const at::ArrayRef<c10::IValue> arguments = arguments_of(schema, *stack);
  const at::Tensor result = called_below_functionalization(schema, arguments);
  for (const at::Tensor& tensor : {arguments[0].toTensor(), result}) {
    if (at::functionalization::impl::isFunctionalTensor(tensor)) {
      at::functionalization::impl::freeze_functional_tensor(tensor);
    }
  }
  return_from(schema, *stack, result);
}

// Functions that add an operator to the Python module. Its calls have less overhead than calls of the dispatcher.
inline std::vector<void (*)(pybind11::module_&)>& eager_operators() {
  static std::vector<void (*)(pybind11::module_&)> all;
  return all;
}

template <class T>
const T& unwrapped(const T& argument) {
  return argument;
}
inline at::Tensor unwrapped(const std::optional<at::Tensor>& argument) {
  return argument.value_or(at::Tensor());
}

// Adds a function of x and the operator's arguments. It returns None where a transform, a tracer, a dispatch mode or a
// tensor subclass must see the registered operator, and for kinds of tensors that the operators refuse.
template <class Operator, class... Arguments>
void add_eager(pybind11::module_& m) {
  m.def(Operator::kName, [](const at::Tensor& x, const Arguments&... arguments) -> pybind11::object {
    Operator op{unwrapped(arguments)...};
    const auto values = values_of(op);
    const bool known = is_of_known_kind(x) && std::all_of(values.begin(), values.end(), [](const Value* value) {
                         return !is_tensor(value) || is_of_known_kind(std::get<at::Tensor>(*value));
                       });
    return known && ordinary_context() ? pybind11::cast(apply_operator(x, std::move(op))) : pybind11::none();
  });
}

// Registers the overloads of the operator, and its function in the Python module, which has the types `Arguments` after
// x.
template <class Operator, class... Arguments>
void register_operator(torch::Library& library) {
  Operator op{};
  for (const Overload& overload : Operator::kOverloads) {
    unsigned tensors = overload.tensors;
    for (Value* value : values_of(op)) {
      *value = (tensors & 1) != 0 ? Value(at::Tensor()) : Value(0.0);
      tensors >>= 1;
    }
    const std::string name = std::string(Operator::kName) + (*overload.name != 0 ? "." : "") + overload.name;
    std::string schema = name + "(Tensor(a) x, ";
    Operator::each(op, SchemaWriter{schema});
    library.def(torch::schema((schema + ") -> Tensor(a)").c_str()));
    using Function = torch::CppFunction;
    using Key = c10::DispatchKey;
    library.impl(name.c_str(), Key::Autograd, Function::makeFromBoxedFunction<&autograd_kernel<Operator>>());
    library.impl(name.c_str(), Key::CompositeExplicitAutograd, Function::makeFromBoxedFunction<&view_kernel>());
    library.impl(name.c_str(), Key::Functionalize, Function::makeFromBoxedFunction<&functionalized_kernel>());
  }
  eager_operators().push_back(&add_eager<Operator, Arguments...>);
}

} // namespace gradscale
