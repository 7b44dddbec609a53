// The arguments of one call of the multi-step loss, as Python gives them.
#pragma once

#include "gradient_memory.h"
#include "head_table.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

namespace gradscale {

// Dimensions of a prediction and of its target behind the batch; a class is an int64 index.
struct Layout {
  int64_t prediction_dims;
  int64_t target_dims; // -1: no target
  bool classes;
};

// The heads of a loss, read once from the dataclasses.
struct Plan {
  Plan(c10::ArrayRef<double> numbers, bool keeps_memory) : table(numbers), gradient_memory(keeps_memory) {
  }
  py::object heads; // dict of name -> dataclass
  std::vector<py::object> names;
  HeadTable table;
  std::vector<std::vector<Layout>> layouts; // by head
  GradientMemory gradient_memory;
};

enum class Reduction { mean, sum, none, valid_mean };

// One tensor per step, or one tensor with a step dimension.
struct Entries {
  std::vector<at::Tensor> tensors; // empty: the head has no target
  bool stacked = false;
};

// None, a number per step, or a tensor [T] or [B, T] ([T, B] without batch_first).
struct StepNumbers {
  std::vector<double> numbers;
  at::Tensor tensor;
};

struct Arguments {
  std::vector<Entries> predictions; // by head
  std::vector<Entries> targets;
  std::vector<at::Tensor> masks; // by head [B, T] ([T, B] without batch_first); undefined: nothing is masked
  StepNumbers step_weights;
  StepNumbers step_gradient_scale;
  at::Tensor importance_weights;
  Reduction reduction = Reduction::mean;
  bool skip_nonfinite = false;
  bool batch_first = true;
  int64_t batch = 0;
  int64_t steps = 0;                    // T
  std::vector<std::vector<bool>> wants; // by head, whether the gradient of each of its prediction tensors is wanted

  bool wants_any() const;

  // The dimension of the samples in whatever has one of steps too.
  int64_t batch_dim() const {
    return batch_first ? 0 : 1;
  }
};

// Whether all tensors are where the first prediction is.
bool on_one_device(const Arguments& arguments);

// As in Python.
std::optional<Reduction> read_reduction(const std::string& reduction);

// Steps of a tensor with a step dimension, or tensors.
int64_t count_steps(const Entries& entries, bool batch_first);

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
