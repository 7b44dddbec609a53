// The arguments of a call as Python gives them, and back.
#pragma once

#include "arguments.h"
#include "gradient_memory.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gradscale {

// The heads of a loss, read once from the dataclasses.
struct Plan {
  Plan(py::dict heads, c10::ArrayRef<std::string> names, c10::ArrayRef<double> numbers, bool keeps_memory);

  py::dict heads; // name -> dataclass
  std::vector<py::object> names;
  HeadTable table;
  GradientMemory gradient_memory;
};

// Makes a plan whose deleter takes the GIL: its last owner may be a node of the graph that a thread of autograd frees.
std::shared_ptr<Plan> make_plan(
    py::dict heads, const std::vector<std::string>& names, const std::vector<double>& numbers, bool keeps_memory);

// Reads and checks the arguments; `options` is an `Options` of gradscale_ext/_options.py, whose order
// tests/test_loss_contexts.py compares with ours. Empty when something is not as the fused kernel takes it: a wrong
// argument, for which Python then has the words, or a tensor of another kind (subclass, transform, device), for which
// Python has another path.
std::optional<Arguments> read_arguments(
    const Plan& plan, py::handle predictions, py::handle targets, py::handle options);

// The options by name, tensors without their edges.
py::dict options_to_python(const Arguments& arguments);

// One tensor, a list of tensors, or None for no tensors.
py::object to_python(const Entries& entries);

} // namespace gradscale
