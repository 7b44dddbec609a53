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

// Defines the functions that Python calls in eager mode.
void define_loss(py::module_& m);

} // namespace gradscale
