// The arguments of a registered operator as the members of a struct, whose function each(self, visit) calls
// visit(name, member) in the operator's order. The visitors are SchemaWriter, which writes the operator's schema,
// ArgumentReader, which reads the members from a stack of arguments, and ArgumentWriter, which pushes them to a stack.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/SymInt.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <variant>

namespace gradscale {

// A number, or a tensor that is read on its device.
using Value = std::variant<double, at::Tensor>;

// ---- One argument ---------------------------------------------------------------------------------------------------

inline const char* schema_type(const at::Tensor&) { // undefined: None
  return "Tensor?";
}
inline const char* schema_type(const Value& value) {
  return std::holds_alternative<double>(value) ? "float" : "Tensor";
}
inline const char* schema_type(double) {
  return "float";
}
inline const char* schema_type(int64_t) {
  return "int";
}
inline const char* schema_type(const c10::SymInt&) {
  return "SymInt";
}
inline const char* schema_type(bool) {
  return "bool";
}
inline const char* schema_type(const std::string&) {
  return "str";
}
inline const char* schema_type(const std::array<bool, 3>&) {
  return "bool[3]";
}

inline void read_argument(const char*, const c10::IValue& given, at::Tensor& tensor) {
  tensor = given.isNone() ? at::Tensor() : given.toTensor();
}
inline void read_argument(const char*, const c10::IValue& given, Value& value) {
  value = given.isTensor() ? Value(given.toTensor()) : Value(given.toDouble());
}
inline void read_argument(const char*, const c10::IValue& given, double& number) {
  number = given.toDouble();
}
inline void read_argument(const char*, const c10::IValue& given, int64_t& number) {
  number = given.toInt();
}
inline void read_argument(const char*, const c10::IValue& given, c10::SymInt& number) {
  number = given.toSymInt();
}
inline void read_argument(const char*, const c10::IValue& given, bool& flag) {
  flag = given.toBool();
}
inline void read_argument(const char*, const c10::IValue& given, std::string& text) {
  text = given.toStringRef();
}
inline void read_argument(const char*, const c10::IValue& given, std::array<bool, 3>& flags) {
  const c10::List<bool> list = given.toBoolList();
  std::copy(list.begin(), list.end(), flags.begin());
}

inline c10::IValue as_argument(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}
inline c10::IValue as_argument(const Value& value) {
  return std::visit([](const auto& argument) { return c10::IValue(argument); }, value);
}
inline c10::IValue as_argument(const std::array<bool, 3>& flags) {
  return c10::List<bool>({flags[0], flags[1], flags[2]});
}
template <class T>
c10::IValue as_argument(const T& argument) {
  return argument;
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
