// The arguments of one call of the multi-step loss, as Python gives them.
#pragma once

#include "segment.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace gradscale {

// The memory that gradients are written to. Fresh pages cost more at their first touch than the loss itself, so that a
// module keeps its block, and takes it again when no gradient of the last call is alive any more.
class GradientMemory {
 public:
  explicit GradientMemory(bool keeps) : keeps_(keeps) {
  }
  c10::Storage take(int64_t size) const;

 private:
  bool keeps_;
  mutable std::mutex mutex_;
  mutable c10::Storage block_;
};

// The heads of a loss, read once from the dataclasses.
struct Plan {
  explicit Plan(bool keeps_memory) : gradient_memory(keeps_memory) {
  }
  py::object heads; // dict of name -> dataclass
  std::vector<py::object> names;
  std::vector<Head> table;
  GradientMemory gradient_memory;
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
// Python then has the words, or a tensor of another kind (subclass, transform, device), for which Python has another
// path.
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
