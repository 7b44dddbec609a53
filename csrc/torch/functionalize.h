// Functionalization: torch.compile and torch.func.functionalize trace a function with wrapped tensors, and replace its
// in-place operations. PyTorch itself unwraps the arguments of an operator only if its schema has no aliases.
#pragma once

#include "arguments.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace gradscale {

// Calls an operator that returns one tensor with unwrapped arguments, and wraps its result if an argument was wrapped.
inline at::Tensor called_below_functionalization(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  namespace functional = at::functionalization::impl;
  torch::jit::Stack stack;
  bool wraps = false;
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      wraps = wraps || functional::isFunctionalTensor(argument.toTensor());
      functional::sync(argument.toTensor());
      stack.emplace_back(functional::from_functional_tensor(argument.toTensor(), /*assert_functional=*/false));
    } else {
      stack.push_back(argument);
    }
  }
  const at::AutoDispatchSkipFunctionalize below;
  op.callBoxed(stack);
  const at::Tensor result = stack.at(0).toTensor();
  return wraps ? functional::to_functional_tensor(result) : result;
}

} // namespace gradscale
