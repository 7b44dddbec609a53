// The arguments of one call of the multi-step loss, as Python gives them.
#pragma once

#include "segment.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

namespace gradscale {

// The heads of a loss, read once from the dataclasses.
struct Plan {
  py::object heads; // dict of name -> dataclass
  std::vector<py::object> names;
  std::vector<Head> table;
};

enum class Reduction { mean, sum, none, valid_mean };

// One tensor per step, or one tensor with a step dimension.
struct Entries {
  std::vector<at::Tensor> tensors;
  bool stacked = false;
};

// None, a number per step, or a tensor [T] or [B, T].
struct StepNumbers {
  std::vector<double> numbers;
  at::Tensor tensor;
};

struct Arguments {
  std::vector<Entries> predictions; // by head
  std::vector<Entries> targets;
  std::vector<at::Tensor> masks; // by head; undefined: nothing is masked
  StepNumbers step_weights;
  StepNumbers step_gradient_scale;
  at::Tensor importance_weights;
  Reduction reduction = Reduction::mean;
  bool skip_nonfinite = false;
  bool batch_first = true;
  int64_t batch = 0;
  int64_t steps = 0; // T
};

// Reads and checks the arguments. Empty when something is not as the fused kernel takes it: a wrong argument, for which
// Python then has the words, or a tensor of another kind (subclass, transform, device), for which Python has another path.
std::optional<Arguments> read_arguments(
    const Plan& plan,
    py::handle predictions,
    py::handle targets,
    py::handle step_weights,
    py::handle step_gradient_scale,
    py::handle importance_weights,
    py::handle mask,
    const std::string& reduction,
    const std::string& nonfinite,
    bool batch_first);

} // namespace gradscale
