// Targets from trajectories: the functions, their adjoints, and MuZero's windows.
#pragma once

#include "kernels.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <pybind11/pybind11.h>

#include <array>
#include <iterator>
#include <vector>

namespace gradscale {

struct FunctionOverTrajectories {
  const char* name;
  const char* type_name; // the names of kernels and of autograd nodes begin with it
  int64_t num_results;
  Values values;
  bool has_ratios;

  bool reads_own_values() const {
    return values == Values::states || values == Values::actions;
  }
};

// In the order of Formula.
#define GRADSCALE_FUNCTION(name, type_name, ...) {#name, #type_name, __VA_ARGS__},
constexpr FunctionOverTrajectories kFunctions[] = {GRADSCALE_FUNCTIONS(GRADSCALE_FUNCTION)};
#undef GRADSCALE_FUNCTION

constexpr const FunctionOverTrajectories& function_of(Formula formula) {
  return kFunctions[static_cast<size_t>(formula)];
}

constexpr auto names_of(Formula) {
  std::array<const char*, std::size(kFunctions)> names{};
  for (size_t i = 0; i < names.size(); ++i) {
    names[i] = kFunctions[i].name;
  }
  return names;
}

// A linear function of its inputs: one of the functions, or its adjoint. Discounts and steps of n-step transitions are
// constants. The adjoint of n-step transitions is the adjoint of n-step returns.
struct LinearCall {
  bool is_adjoint;
  Formula formula;
  // Rewards, values and next values; of an adjoint, the gradients of the results. Undefined inputs are zero.
  std::array<at::Tensor, 3> inputs;
  // True if values and next values are one input, the values [B, T+1] of all observations.
  bool observations;
  std::array<bool, 3> wants; // of an adjoint: the gradients that are computed
  // Constants. Undefined tensors are absent; `discount`, `lambda` and `limits` are used where `discounts`, `lambdas`
  // and `clips` are undefined. A clip has one element.
  at::Tensor ratios;
  at::Tensor discounts;
  at::Tensor lambdas;
  std::array<at::Tensor, 3> clips;
  at::Tensor terminated;
  at::Tensor truncated;
  at::Tensor mask;
  double discount;
  double lambda;
  std::array<double, 3> limits;
  c10::SymInt n;
  bool batch_first;

  // Visits the arguments of the operator.
  template <class Self, class Visit>
  static void each(Self& self, Visit visit) {
    visit("is_adjoint", self.is_adjoint);
    visit("function", self.formula);
    visit("wants", self.wants);
    visit("observations", self.observations);
    visit("rewards", self.inputs[0]);
    visit("values", self.inputs[1]);
    visit("next_values", self.inputs[2]);
    visit("ratios", self.ratios);
    visit("discounts", self.discounts);
    visit("lambdas", self.lambdas);
    visit("clip_0", self.clips[0]);
    visit("clip_1", self.clips[1]);
    visit("clip_2", self.clips[2]);
    visit("terminated", self.terminated);
    visit("truncated", self.truncated);
    visit("mask", self.mask);
    visit("discount", self.discount);
    visit("lambda_", self.lambda);
    visit("limit_0", self.limits[0]);
    visit("limit_1", self.limits[1]);
    visit("limit_2", self.limits[2]);
    visit("n", self.n);
    visit("batch_first", self.batch_first);
  }

  // Visits the tensors among the arguments, the inputs first.
  template <class Visit>
  void each_tensor(Visit visit) {
    each(*this, [&](const char*, auto& argument) {
      if constexpr (std::is_same_v<decltype(argument), at::Tensor&>) {
        visit(argument);
      }
    });
  }
};

// The results, on the inputs' device. No gradients are recorded.
std::vector<at::Tensor> compute_returns(const LinearCall& call);

// The same results, recorded by autograd. `is_plain`: the tensors are of PyTorch's own class, and nothing but autograd
// is active.
std::vector<at::Tensor> returns(const LinearCall& call, bool is_plain);

struct MuZeroWindows {
  at::Tensor rewards;
  at::Tensor root_values;
  at::Tensor lengths;
  at::Tensor terminated;
  at::Tensor to_play;
  at::Tensor root_reward;
  at::Tensor discounts;
  at::Tensor horizons; // used instead of `td_steps` if defined
  double discount;
  c10::SymInt num_unroll_steps;
  c10::SymInt td_steps;
  c10::SymInt prefix_horizon; // 0: none
  bool batch_first;
  bool is_checked; // not an argument of the operator; on a CPU: look for rows that are invalid

  // Visits the arguments of the operator.
  template <class Self, class Visit>
  static void each(Self& self, Visit visit) {
    visit("rewards", self.rewards);
    visit("root_values", self.root_values);
    visit("lengths", self.lengths);
    visit("terminated", self.terminated);
    visit("to_play", self.to_play);
    visit("root_reward", self.root_reward);
    visit("discounts", self.discounts);
    visit("horizons", self.horizons);
    visit("discount", self.discount);
    visit("num_unroll_steps", self.num_unroll_steps);
    visit("td_steps", self.td_steps);
    visit("prefix_horizon", self.prefix_horizon);
    visit("batch_first", self.batch_first);
  }
};

// Raises a ValueError if an argument requires grad or has a tangent.
void check_constants(const MuZeroWindows& windows);

// (values, rewards, mask, policy_mask); empty if a row of a checked call is invalid.
std::vector<at::Tensor> muzero_targets(const MuZeroWindows& windows);

// Defines the functions that Python calls in eager mode.
void define_returns(pybind11::module_& m);

} // namespace gradscale
