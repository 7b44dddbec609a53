// Compiled autograd, through a private header of PyTorch. No other file includes headers of torch/csrc/dynamo.
//
// Needed from torch/csrc/dynamo/compiled_autograd.h, because PyTorch has no public interface for nodes written in C++:
//
// - CompiledNodeArgs::collect(), in the node's compiled_args(): what distinguishes two graphs, and what is an input;
// - SwapSavedVariables::before() and after(), in apply_with_saved(): put the graph's variables in the place of saved
//   tensors;
// - getPyCompilerInterface() with bind_function() and call_function(), get_input_metadata() and IValuePacker: put a
//   call of a C++ function into the graph.
//
// BackwardNode in autograd.h also overrides compiled_args(), to refuse, and needs only the declaration of
// CompiledNodeArgs in torch/csrc/autograd/function.h. tests/test_flow.py and tests/test_autograd.py test all of this,
// for the oldest and the newest version of PyTorch in `make versions`.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <string>
#include <type_traits>
#include <vector>

namespace gradscale {

using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// Puts a call of function(gradients, arguments) into the graph, which traces it later: until then, gradients have
// neither shapes nor dtypes. `edges` are the edges of the node, and `name` its name.
template <class Function>
torch::autograd::variable_list call_in_graph(
    SwapSavedVariables& swap,
    const char* name,
    Function function,
    const torch::autograd::variable_list& gradients,
    const std::vector<c10::IValue>& arguments,
    const torch::autograd::edge_list& edges) {
  namespace compiled = torch::dynamo::autograd;
  std::vector<at::TypePtr> types;
  for (const c10::IValue& argument : arguments) {
    types.push_back(argument.isTensor() ? at::TensorType::get() : argument.type());
  }
  const auto outputs = compiled::get_input_metadata(edges);
  const auto& compiler = compiled::getPyCompilerInterface();
  const std::string bound =
      compiler->bind_function(swap.get_py_compiler(), name, function, types, /*is_custom_function=*/true);
  return compiler->call_function(
      swap.get_py_compiler(),
      "apply_functional",
      bound,
      gradients,
      arguments,
      compiled::IValuePacker<std::decay_t<decltype(outputs)>>::pack(outputs));
}

} // namespace gradscale
