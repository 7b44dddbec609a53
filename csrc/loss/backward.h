// The gradient function of the loss: one node, for calls in eager mode and for calls of the registered operator.
#pragma once

#include "python.h"

#include <c10/core/SymInt.h>

#include <memory>
#include <vector>

namespace gradscale {

// The operator's gradients of all predictions of one dtype, concatenated. They are float, or double for double, because
// they are multiplied before they are rounded.
struct JoinedGradients {
  at::ScalarType type; // of the predictions
  c10::SymInt size = 0;
  at::Tensor data;

  at::ScalarType data_type() const {
    return type == at::kDouble ? at::kDouble : at::kFloat;
  }
};

// A contiguous gradient within JoinedGradients.
struct Gradient {
  size_t prediction;
  size_t joined;
  c10::SymInt offset;
  std::vector<c10::SymInt> sizes, strides;
  int64_t batch_dim;

  at::Tensor in(const std::vector<JoinedGradients>& all) const {
    return all[joined].data.as_strided_symint(sizes, strides, offset);
  }
};

// The gradients of the predictions whose gradients are wanted. The layout has no gaps, because nothing would write to
// them.
struct Layout {
  std::vector<JoinedGradients> joined;
  std::vector<Gradient> gradients;

  explicit Layout(const Call& call);
};

// Gives the loss of a call its gradient function, a node of the graph that keeps the call, but not its outputs.
void record_call(Call call, std::shared_ptr<Plan> plan);

// The same for the operator, where a tracer may see its tensors. `differentiable` are the predictions and the head
// weights that are tensors; `shares` are the shares of these weights, undefined where one gets no gradient.
void record_operator(const at::Tensor& loss, const Tensors& differentiable, Layout layout, Tensors shares);

} // namespace gradscale
