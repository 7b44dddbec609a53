// Calls in eager mode: the arguments as Python gives them, and the results as Python reads them.
#pragma once

#include "call.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

namespace gradscale {

// The heads of a loss, read once from the dataclasses.
struct Plan {
  Plan(py::dict heads, const std::vector<std::string>& names, const std::vector<double>& numbers);

  py::dict heads; // name -> dataclass
  std::vector<py::object> names;
  Heads table;
};

// Makes a plan whose deleter takes the GIL: its last owner may be a node of the graph that a thread of autograd frees.
std::shared_ptr<Plan> make_plan(
    py::dict heads, const std::vector<std::string>& names, const std::vector<double>& numbers);

// Computes the loss. `options` is an `Options` of gradscale_ext/call/options.py, whose fields have the order of the C++
// Options (tests/test_loss_contexts.py checks it). Returns the fields of `MultiStepLossOutput` by name, or None if the
// fused kernels do not accept the call: an argument is wrong, for which Python then raises the error, or a tensor is of
// another kind (subclass, transform, device), for which Python has another path.
py::object multi_step_loss(
    const std::shared_ptr<Plan>& plan, py::handle predictions, py::handle targets, py::handle options);

// ---- The gradient function; the registered operator has its own, in operator.cpp ------------------------------------

// Gives the loss of a call its gradient function, a node of the graph that keeps the call, but not its outputs.
void record_call(Call call, std::shared_ptr<Plan> plan);

// The gradient of a head weight, from the head's share of the loss before this weight. It has the type of the loss;
// autograd converts it to the weight's type.
at::Tensor head_weight_gradient(const at::Tensor& share, const at::Tensor& grad_output);

// grad_output in a shape that broadcasts to `gradient`: a scalar as it is, and [B] along the batch dimension.
at::Tensor factor_for(const at::Tensor& gradient, const at::Tensor& grad_output, int64_t batch_dim);

} // namespace gradscale
