// Hand-written autograd nodes: an operator registered for the Autograd keys that behaves as PyTorch's own operators do.
//
// torch::autograd::Function refuses torch.func, and a Python Function is dropped by some combinations of compile and
// transforms. A kernel that builds its own Node, and sets its own forward-mode tangent, is treated by every level of
// PyTorch as a native operator, so that one mechanism is right in every context.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <memory>
#include <type_traits>

namespace gradscale {

// Nodes are held by std::shared_ptr in some versions of torch and by c10::intrusive_ptr in others.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class T, class Ptr = NodePtr>
Ptr make_node(T*& node) {
  node = new T();
  if constexpr (std::is_same_v<Ptr, std::shared_ptr<torch::autograd::Node>>) {
    return Ptr(node, [](auto* pointer) { deleteNode(pointer); });
  } else {
    return Ptr::unsafe_steal_from_new(node);
  }
}

} // namespace gradscale
