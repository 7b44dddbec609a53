// The arguments of a registered operator as the members of a struct, whose function each(self, visit) calls
// visit(name, member) in the operator's order. The visitors are SchemaWriter, which writes the operator's schema,
// ArgumentReader, which reads the members from a stack of arguments, and ArgumentWriter, which pushes them to a stack.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

namespace gradscale {

// A number, or a tensor that is read on its device.
using Value = std::variant<double, at::Tensor>;

// The enumerator with this name among names_of(Choice()).
template <class Choice>
Choice named(const char* argument, const std::string& name) {
  constexpr auto names = names_of(Choice());
  const auto found = std::find(names.begin(), names.end(), name);
  TORCH_CHECK_VALUE(
      found != names.end(),
      "gradscale_ext: ",
      argument,
      " must be one of ",
      c10::Join(", ", names),
      ", but it is '",
      name,
      "'");
  return static_cast<Choice>(found - names.begin());
}

// ---- One argument ---------------------------------------------------------------------------------------------------

inline const char* schema_type(const at::Tensor&) { // undefined: None
  return "Tensor?";
}
inline const char* schema_type(const Value& value) {
  return std::holds_alternative<double>(value) ? "float" : "Tensor";
}
template <class T>
std::string schema_type(const T& /*argument*/) {
  if constexpr (std::is_enum_v<T>) {
    return "str";
  } else {
    return c10::getTypePtr<T>()->str();
  }
}

inline void read_argument(const char*, const c10::IValue& given, at::Tensor& tensor) {
  tensor = given.isNone() ? at::Tensor() : given.toTensor();
}
inline void read_argument(const char*, const c10::IValue& given, Value& value) {
  value = given.isTensor() ? Value(given.toTensor()) : Value(given.toDouble());
}
template <class T>
void read_argument(const char* name, const c10::IValue& given, T& argument) {
  if constexpr (std::is_enum_v<T>) {
    argument = named<T>(name, given.toStringRef());
  } else {
    argument = given.to<T>();
  }
}

inline c10::IValue as_argument(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}
inline c10::IValue as_argument(const Value& value) {
  return std::visit([](const auto& argument) { return c10::IValue(argument); }, value);
}
template <class T>
c10::IValue as_argument(const T& argument) {
  if constexpr (std::is_enum_v<T>) {
    return names_of(argument)[static_cast<size_t>(argument)];
  } else {
    return argument;
  }
}

// ---- All arguments --------------------------------------------------------------------------------------------------

struct SchemaWriter {
  std::string& schema;
  bool is_first = true;

  template <class T>
  void operator()(const char* name, const T& argument) {
    schema += std::string(std::exchange(is_first, false) ? "" : ", ") + schema_type(argument) + " " + name;
  }
};

struct ArgumentReader {
  const c10::IValue* next;

  template <class T>
  void operator()(const char* name, T& argument) {
    read_argument(name, *next++, argument);
  }
};

struct ArgumentWriter {
  torch::jit::Stack& stack;

  template <class T>
  void operator()(const char*, const T& argument) {
    stack.push_back(as_argument(argument));
  }
};

// The arguments of a call of an operator.
inline at::ArrayRef<c10::IValue> arguments_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return torch::jit::last(stack, op.schema().arguments().size());
}

// Replaces the arguments of a call by its result.
template <class Result>
void return_from(const c10::OperatorHandle& op, torch::jit::Stack& stack, Result result) {
  torch::jit::drop(stack, op.schema().arguments().size());
  torch::jit::push(stack, std::move(result));
}

} // namespace gradscale
