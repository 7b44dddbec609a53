// An eager entry point reads the objects that Python gives, and returns a result, or throws a Refusal.
#pragma once

#include "refusal.h"
#include "tensor_element.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>

namespace gradscale {

// The function that Python calls for an eager entry point: it returns what the entry point returns, or its Refusal.
template <class Result, class... Arguments>
auto run_or_refuse(Result (*entry_point)(Arguments...)) {
  return [entry_point](Arguments... arguments) -> pybind11::object {
    try {
      return entry_point(std::forward<Arguments>(arguments)...);
    } catch (const Refusal& refusal) {
      return pybind11::cast(refusal);
    }
  };
}

C10_NOINLINE inline std::string type_of(pybind11::handle given) {
  return std::string("is of type ") + Py_TYPE(given.ptr())->tp_name;
}

// Refuses transforms and modes, which must see the operators.
inline void require_ordinary_context() {
  if (!ordinary_or_inference_context()) {
    throw Refusal{};
  }
}

// A tensor that the kernels read, of any dtype. Call it in ordinary contexts. words() returns the words for the
// argument in messages.
template <class Words>
at::Tensor read_tensor(pybind11::handle given, Words words) {
  if (!THPVariable_Check(given.ptr())) {
    throw Refusal{words(), type_of(given)};
  }
  at::Tensor tensor;
  if (!read_ordinary(THPVariable_Unpack(given.ptr()), tensor)) {
    if (has_tangent(tensor) || !(tensor.is_cpu() || runs_kernels(tensor.device()))) {
      throw Refusal{};
    }
    throw Refusal{words(), type_of(given) + ", not a plain torch.Tensor: convert it"};
  }
  return tensor;
}

// A tensor with an Element.
template <class Words>
at::Tensor read_floats(pybind11::handle given, Words words) {
  at::Tensor tensor = read_tensor(given, words);
  if (!has_element(tensor)) {
    throw Refusal{words(), "is " + pybind11::str(given.attr("dtype")).cast<std::string>() + ": write .float()"};
  }
  return tensor;
}

} // namespace gradscale
