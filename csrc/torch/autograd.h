// Hand-written autograd nodes. With them, an operator registered for the Autograd keys behaves as PyTorch's own do.
//
// torch::autograd::Function refuses torch.func, and a Python Function is dropped by some combinations of compile and
// transforms. A kernel that builds its own Node, and sets its own forward-mode tangent, is treated by every level of
// PyTorch as a native operator, so that one mechanism is right in every context.
//
// All nodes follow these rules: several threads may run one node, and another may release it meanwhile, so that its
// members are read and written with `mutex_` held; a pass that fails in the middle, also in a hook or in another node,
// leaves the node able to run again; and the backward pass reads no property of an input that may have changed since
// the forward pass.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

namespace gradscale {

// The base of the package's nodes. It refuses compiled autograd, which traces a backward pass operation by operation.
struct BackwardNode : public torch::autograd::Node {
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        name(),
        ": compiled autograd cannot trace the backward pass of this call, which was made in eager mode; compile the "
        "function that makes the call (torch.compile), or leave compiled autograd off "
        "(torch._dynamo.config.compiled_autograd = False)");
  }
};

// A node that saves tensors. Changing them in place afterwards raises in the backward pass, and hooks on saved tensors
// see them.
class SavingNode : public BackwardNode {
 public:
  void save(const at::Tensor& tensor) {
    const bool is_inference = tensor.defined() && tensor.is_inference(); // PyTorch saves no tensor of inference mode
    saved_.emplace_back(is_inference ? tensor.clone() : tensor, /*is_output=*/false);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (torch::autograd::SavedVariable& saved : saved_) {
      saved.reset_data();
    }
    released_ = !saved_.empty();
  }

 protected:
  // The saved tensors whose index is wanted; the others are undefined.
  template <class Wants>
  std::vector<at::Tensor> unpacked(Wants wants) {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    std::vector<at::Tensor> tensors(saved_.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (wants(i)) {
        tensors[i] = saved_[i].unpack();
      }
    }
    return tensors;
  }
  std::vector<at::Tensor> unpacked() {
    return unpacked([](size_t) { return true; });
  }

  std::vector<torch::autograd::SavedVariable> saved_;

 private:
  bool released_ = false;
};

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

// The tensor as it was in the forward pass. Gradients of results computed from it follow that pass's edge, even if it
// was detached or began to require grad since. With an invalid edge, no gradient flows.
inline at::Tensor with_edge(const at::Tensor& tensor, const torch::autograd::Edge& edge) {
  at::Tensor alias = tensor.detach();
  if (edge.is_valid()) {
    torch::autograd::impl::set_gradient_edge(alias, edge);
  }
  return alias;
}

} // namespace gradscale
