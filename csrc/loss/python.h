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

} // namespace gradscale
