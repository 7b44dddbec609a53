// The record of one call of the multi-step loss, whether it is made in eager mode or by the registered operator.
#pragma once

#include "head_table.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

namespace gradscale {

enum class Reduction { mean, sum, none, valid_mean };
enum class Nonfinite { propagate, skip };

// The enumerators as users write them.
constexpr std::array<const char*, 4> names_of(Reduction) {
  return {"mean", "sum", "none", "valid_mean"};
}
constexpr std::array<const char*, 2> names_of(Nonfinite) {
  return {"propagate", "skip"};
}

// None, a number per step, or a tensor [T] or [B, T] ([T, B] without batch_first).
struct StepNumbers {
  std::vector<double> numbers;
  at::Tensor tensor;
};

struct GradientScale : StepNumbers {
  bool unroll = false; // 1 for the root and 1/K after
};

// Everything of a call but its heads, predictions and targets, in the order of `Options` in gradscale_ext/_options.py.
// Masks come by head, [B, T] ([T, B] without batch_first); undefined: nothing is masked. What "mean" and "valid_mean"
// divide by comes as float64 [heads] where it is not counted in this batch alone.
// clang-format off
#define GRADSCALE_OPTIONS(option)            \
  option(StepNumbers, step_weights)          \
  option(GradientScale, step_gradient_scale) \
  option(at::Tensor, importance_weights)     \
  option(std::vector<at::Tensor>, mask)      \
  option(Reduction, reduction)               \
  option(Nonfinite, nonfinite)               \
  option(bool, batch_first)                  \
  option(at::Tensor, num_entries)
// clang-format on

struct Options {
#define GRADSCALE_MEMBER(type, name) type name{}; // NOLINT(bugprone-macro-parentheses): a type
  GRADSCALE_OPTIONS(GRADSCALE_MEMBER)
#undef GRADSCALE_MEMBER

  // Calls visit(name, option) for all options.
  template <class Self, class Visit>
  static void each(Self& self, Visit&& visit) {
#define GRADSCALE_VISIT(type, name) visit(#name, self.name);
    GRADSCALE_OPTIONS(GRADSCALE_VISIT)
#undef GRADSCALE_VISIT
  }
};

// One tensor per step, or one tensor with a step dimension.
struct Entries {
  std::vector<at::Tensor> tensors; // empty: the head has no target
  bool stacked = false;

  // Dimensions behind those of batch and steps.
  int64_t dims() const {
    return tensors[0].dim() - (stacked ? 2 : 1);
  }
};

struct Arguments : Options {
  std::vector<Entries> predictions; // by head
  std::vector<Entries> targets;
  std::vector<std::vector<bool>> wants; // by head, whether the gradient of each of its prediction tensors is wanted
  int64_t batch = 0;
  int64_t steps = 0; // T

  // Finds batch and steps, and says whether all tensors are such as the kernels take, for these heads.
  bool settle(const HeadTable& heads);

  bool wants_any() const;

  // The dimension of the samples in a tensor that has one of steps too.
  int64_t batch_dim() const {
    return batch_first ? 0 : 1;
  }
  int64_t batch_dim(const Entries& entries) const {
    return entries.stacked ? batch_dim() : 0;
  }

  // Calls visit(tensor) for all tensors that are defined.
  template <class Visit>
  void each_tensor(Visit visit) const;
};

// The tensors of an option.
template <class Visit>
struct TensorsOfOption {
  Visit& visit;

  void operator()(const char*, const at::Tensor& tensor) {
    if (tensor.defined()) {
      visit(tensor);
    }
  }
  void operator()(const char* name, const StepNumbers& numbers) {
    (*this)(name, numbers.tensor);
  }
  void operator()(const char* name, const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      (*this)(name, tensor);
    }
  }
  template <class Choice, std::enable_if_t<!std::is_class_v<Choice>, int> = 0>
  void operator()(const char*, Choice) {
  }
};

template <class Visit>
void Arguments::each_tensor(Visit visit) const {
  for (const std::vector<Entries>* both : {&predictions, &targets}) {
    for (const Entries& entries : *both) {
      std::for_each(entries.tensors.begin(), entries.tensors.end(), visit);
    }
  }
  each(*this, TensorsOfOption<Visit>{visit});
}

} // namespace gradscale
