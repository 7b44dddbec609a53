#include "returns.h"

#include "../torch/gate.h"
#include "../torch/python_numbers.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <optional>

namespace gradscale {

namespace {

namespace py = pybind11;

bool is_bool(at::ScalarType dtype) {
  return dtype == at::kBool;
}

bool is_long(at::ScalarType dtype) {
  return dtype == at::kLong;
}

bool is_integral(at::ScalarType dtype) {
  return c10::isIntegralType(dtype, /*includeBool=*/true);
}

// True for a tensor that can be read as an ordinary one, after `resolve_neg` if PyTorch negates it lazily.
bool is_readable(const at::Tensor& tensor) {
  return has_only_keys(tensor, c10::DispatchKeySet(c10::DispatchKey::Negative));
}

// Computes a result without the GIL. An undefined tensor becomes None.
template <class Compute>
py::object without_gil(Compute compute) {
  const auto result = [&] {
    const py::gil_scoped_release no_gil;
    return compute();
  }();
  return py::cast(result);
}

// Not inlined, so that the code of the checks stays short.
[[noreturn]] C10_NOINLINE void refuse(const char* argument, py::handle given) {
  throw Refusal{argument, came(given)};
}

// Reads the arguments of a call, or throws a Refusal. Values are only looked at on a CPU.
class ReturnsReader {
 public:
  static constexpr int64_t kPerRow = std::numeric_limits<int64_t>::min();

  ReturnsReader(py::handle rewards, py::handle batch_first) {
    require_ordinary_context();
    require(PyBool_Check(batch_first.ptr()), "batch_first", batch_first);
    is_batch_first = batch_first.ptr() == Py_True;
    require(THPVariable_Check(rewards.ptr()), "rewards", rewards);
    const at::Tensor& tensor = THPVariable_Unpack(rewards.ptr());
    require(is_readable(tensor) && tensor.dim() == 2, "rewards", rewards);
    device = tensor.device();
    rows = tensor.size(is_batch_first ? 0 : 1);
    steps = tensor.size(is_batch_first ? 1 : 0);
  }

  // A tensor of an accepted dtype, with `more` additional steps, or with one element per row if `more` is kPerRow;
  // undefined if None is given.
  at::Tensor tensor(const char* argument, py::handle given, bool (*accepts)(at::ScalarType), int64_t more = 0) const {
    at::Tensor tensor = ordinary(argument, given);
    require(!tensor.defined() || (accepts(tensor.scalar_type()) && has_shape(tensor, more)), argument, given);
    return tensor;
  }

  // Values that the function does not read: of the states, or of all observations.
  at::Tensor unread_values(py::handle given) const {
    at::Tensor tensor = ordinary("values", given);
    const bool fits = !tensor.defined() || (has_element(tensor) && (has_shape(tensor, 0) || has_shape(tensor, 1)));
    require(fits, "values", given);
    return tensor;
  }

  // A tensor that gets no gradient.
  at::Tensor constant(const char* argument, py::handle given, at::Tensor tensor) const {
    const bool is_constant = !tensor.defined() || !at::GradMode::is_enabled() || !tensor.requires_grad();
    require(is_constant && !has_tangent(tensor), argument, given);
    return tensor;
  }
  at::Tensor constant(const char* argument, py::handle given, bool (*accepts)(at::ScalarType), int64_t more = 0) const {
    return constant(argument, given, tensor(argument, given, accepts, more));
  }

  // Stores a number from `low` to 1 in `number`, or returns a tensor.
  at::Tensor coefficient(
      const char* argument, py::handle given, double low, double& number, bool per_step = true) const {
    number = 1;
    if (PyFloat_Check(given.ptr()) || !THPVariable_Check(given.ptr())) { // the second takes longer, except for tensors
      number = real(argument, given);
      require(low <= number && number <= 1, argument, given);
      return {};
    }
    at::Tensor tensor = constant(argument, given, ordinary(argument, given));
    const int64_t num_steps = per_step ? steps : 1;
    const int64_t sizes[2] = {is_batch_first ? rows : num_steps, is_batch_first ? num_steps : rows};
    require(has_element(tensor) && (tensor.dim() == 0 || tensor.dim() == 2), argument, given);
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      require(tensor.size(i) == 1 || tensor.size(i) == sizes[i], argument, given);
    }
    return tensor;
  }

  static double limit(py::handle given) {
    const double number = given.is_none() ? std::numeric_limits<double>::infinity() : real("clips", given);
    require(number >= 0, "clips", given);
    return number;
  }

  static int64_t integer(const char* argument, py::handle given, int64_t least, int64_t if_none) {
    if (given.is_none()) {
      return if_none;
    }
    const std::optional<int64_t> number = integer_number(given);
    require(number && *number >= least, argument, given);
    return *number;
  }

  // Stores an integer of at least 1 in `number`, or returns int64 numbers by row, or by row and one of `num_steps`
  // steps.
  at::Tensor horizons(const char* argument, py::handle given, int64_t num_steps, c10::SymInt& number) const {
    if (PyLong_Check(given.ptr()) || !THPVariable_Check(given.ptr())) {
      const int64_t n = integer(argument, given, 1, 0);
      require(n >= 1, argument, given);
      number = n;
      return {};
    }
    const bool is_per_row = THPVariable_Unpack(given.ptr()).dim() == 1;
    return tensor(argument, given, is_long, is_per_row ? kPerRow : num_steps - steps);
  }

  static void require(bool condition, const char* argument, py::handle given) {
    if (C10_UNLIKELY(!condition)) {
      refuse(argument, given);
    }
  }

  bool is_batch_first;

 private:
  static double real(const char* argument, py::handle given) {
    const std::optional<double> number = real_number(given);
    require(number.has_value(), argument, given);
    return *number;
  }

  // A tensor that PyTorch negates lazily is negated here.
  at::Tensor ordinary(const char* argument, py::handle given) const {
    if (given.is_none()) {
      return {};
    }
    require(THPVariable_Check(given.ptr()), argument, given);
    const at::Tensor& lazy = THPVariable_Unpack(given.ptr());
    require(is_readable(lazy), argument, given);
    at::Tensor tensor = lazy.is_neg() ? lazy.resolve_neg() : lazy;
    require(!has_tangent(tensor) || has_only_keys(tensor._fw_grad(/*level=*/0), {}), argument, given);
    require(tensor.device() == device, argument, given);
    return tensor;
  }

  bool has_shape(const at::Tensor& tensor, int64_t more) const {
    if (more == kPerRow) {
      return tensor.dim() == 1 && tensor.size(0) == rows;
    }
    return tensor.dim() == 2 && tensor.size(is_batch_first ? 0 : 1) == rows &&
           tensor.size(is_batch_first ? 1 : 0) == steps + more;
  }

  c10::Device device{c10::kCPU};
  int64_t rows = 0;
  int64_t steps = 0;
};

py::object returns_in_eager_mode(
    int64_t formula,
    py::handle rewards,
    py::handle values,
    py::handle next_values,
    py::handle ratios,
    py::handle discount,
    py::handle lambda,
    py::handle terminated,
    py::handle truncated,
    py::handle mask,
    py::handle limits, // a tuple of three
    py::handle n,
    py::handle batch_first) {
  return answer([&] {
    const ReturnsReader read(rewards, batch_first);
    LinearCall call{};
    const FunctionOverTrajectories& function = kFunctions[formula];
    call.formula = formula;
    const bool needs_n = has_n(static_cast<Formula>(formula));
    call.observations = next_values.is_none() && function.values != Values::none;
    const bool reads_values = call.observations || function.reads_own_values();
    ReturnsReader::require(!(reads_values && values.is_none()), "values", values);
    ReturnsReader::require(!(call.observations && !truncated.is_none()), "truncated", truncated);
    ReturnsReader::require(!(call.observations && function.values == Values::actions), "next_values", next_values);
    call.inputs = {
        read.tensor("rewards", rewards, has_element),
        reads_values ? read.tensor("values", values, has_element, call.observations ? 1 : 0) : at::Tensor(),
        read.tensor("next_values", next_values, has_element)};
    const at::Tensor unread = reads_values ? at::Tensor() : read.unread_values(values);
    call.batch_first = read.is_batch_first;
    call.ratios = read.constant("ratios", ratios, has_element);
    ReturnsReader::require(call.ratios.defined() == function.has_ratios, "ratios", ratios);
    call.discounts = read.coefficient("discount", discount, -1, call.discount);
    call.lambdas = read.coefficient("lambda_", lambda, 0, call.lambda);
    call.terminated = read.tensor("terminated", terminated, is_bool);
    call.truncated = read.tensor("truncated", truncated, is_bool);
    call.mask = read.tensor("mask", mask, is_bool);
    for (int i = 0; i < 3; ++i) {
      call.limits[i] = ReturnsReader::limit(PyTuple_GET_ITEM(limits.ptr(), i));
    }
    const int64_t num_steps = ReturnsReader::integer("n", n, 1, 0);
    ReturnsReader::require(needs_n == (num_steps > 0), "n", n);
    call.n = num_steps;
    return without_gil([&] {
      if (unread.defined() && unread.scalar_type() == at::kDouble) {
        call.inputs[0] = call.inputs[0].to(at::kDouble); // the dtype of the results depends on the dtype of values
      }
      return returns(call, /*is_plain=*/true);
    });
  });
}

py::object muzero_targets_in_eager_mode(
    py::handle rewards,
    py::handle root_values,
    py::handle num_unroll_steps,
    py::handle td_steps,
    py::handle discount,
    py::handle lengths,
    py::handle terminated,
    py::handle to_play,
    py::handle reward,
    py::handle prefix_horizon,
    py::handle root_reward,
    py::handle batch_first) {
  return answer([&] {
    const ReturnsReader read(rewards, batch_first);
    const auto is_reward = [&](const char* text) {
      return PyUnicode_Check(reward.ptr()) && PyUnicode_CompareWithASCIIString(reward.ptr(), text) == 0;
    };
    const bool is_prefix = is_reward("value_prefix");
    ReturnsReader::require(is_prefix ? to_play.is_none() : is_reward("reward"), "reward", reward);
    MuZeroWindows windows{};
    windows.rewards = read.constant("rewards", rewards, has_element);
    ReturnsReader::require(!root_values.is_none(), "root_values", root_values);
    windows.root_values = read.constant("root_values", root_values, has_element, 1);
    windows.lengths = read.tensor("lengths", lengths, is_long, ReturnsReader::kPerRow);
    windows.terminated = read.tensor("terminated", terminated, is_bool, ReturnsReader::kPerRow);
    windows.to_play = read.tensor("to_play", to_play, is_integral, 1);
    windows.root_reward = read.constant("root_reward", root_reward, has_element, ReturnsReader::kPerRow);
    windows.discounts = read.coefficient("discount", discount, -1, windows.discount, /*per_step=*/false);
    const int64_t unroll_steps = ReturnsReader::integer("num_unroll_steps", num_unroll_steps, 0, -1);
    const bool fits_int32 = unroll_steps >= 0 && unroll_steps <= std::numeric_limits<int32_t>::max();
    ReturnsReader::require(fits_int32, "num_unroll_steps", num_unroll_steps);
    windows.num_unroll_steps = unroll_steps;
    windows.horizons = read.horizons("td_steps", td_steps, unroll_steps + 1, windows.td_steps);
    const int64_t longest = std::max<int64_t>(1, unroll_steps);
    const int64_t horizon = ReturnsReader::integer("prefix_horizon", prefix_horizon, 1, longest);
    windows.prefix_horizon = is_prefix ? horizon : 0;
    windows.batch_first = read.is_batch_first;
    ReturnsReader::require(!windows.lengths.defined() || windows.terminated.defined(), "terminated", terminated);
    windows.is_checked = windows.rewards.is_cpu();
    return without_gil([&] {
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> results = muzero_targets(windows);
      if (results.empty()) {
        throw Refusal{"lengths, td_steps or to_play", "has values out of range"};
      }
      return results;
    });
  });
}

} // namespace

void define_returns(py::module_& m) {
  py::list functions; // in the order of Formula
  for (const FunctionOverTrajectories& function : kFunctions) {
    functions.append(function.name);
  }
  m.attr("functions_over_trajectories") = functions;
  m.def("returns", &returns_in_eager_mode);
  m.def("muzero_targets", &muzero_targets_in_eager_mode);
}

} // namespace gradscale
