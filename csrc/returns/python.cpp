#include "returns.h"

#include "../torch/arguments.h"
#include "../torch/python_numbers.h"
#include "../torch/run_or_refuse.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

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

// Refuses a call that is not read here. Python then checks its arguments, says what is wrong, or calls the operator.
void require(bool condition) {
  if (C10_UNLIKELY(!condition)) {
    throw Refusal{};
  }
}

// Reads the arguments of a call, or refuses it. Values are only looked at on a CPU.
class ReturnsReader {
 public:
  using Accepts = bool (*)(at::ScalarType);

  ReturnsReader(py::handle rewards, py::handle batch_first) {
    require_ordinary_context();
    require(PyBool_Check(batch_first.ptr()) && THPVariable_Check(rewards.ptr()));
    is_batch_first = batch_first.ptr() == Py_True;
    const at::Tensor& tensor = THPVariable_Unpack(rewards.ptr());
    require(is_readable(tensor) && tensor.dim() == 2);
    device_ = tensor.device();
    rows_ = tensor.size(is_batch_first ? 0 : 1);
    steps_ = tensor.size(is_batch_first ? 1 : 0);
  }

  // A tensor with as many steps as rewards, and `more`; undefined if None is given.
  at::Tensor by_step(py::handle given, Accepts accepts, int64_t more = 0) const {
    at::Tensor tensor = ordinary(given);
    require(!tensor.defined() || (accepts(tensor.scalar_type()) && tensor.sizes().equals(sizes(steps_ + more))));
    return tensor;
  }

  // A tensor with one element per row; undefined if None is given.
  at::Tensor by_row(py::handle given, Accepts accepts) const {
    at::Tensor tensor = ordinary(given);
    require(!tensor.defined() || (accepts(tensor.scalar_type()) && tensor.sizes().equals(rows_)));
    return tensor;
  }

  // Values that the function does not read: of the states, or of all observations.
  at::Tensor unread_values(py::handle given) const {
    const bool has_all = THPVariable_Check(given.ptr()) && THPVariable_Unpack(given.ptr()).numel() > rows_ * steps_;
    return by_step(given, has_element, has_all ? 1 : 0);
  }

  // Stores a number from `low` to 1 in `number`, or returns a tensor.
  at::Tensor coefficient(py::handle given, double low, double& number, bool per_step = true) const {
    number = 1;
    if (PyFloat_Check(given.ptr()) || !THPVariable_Check(given.ptr())) { // the second takes longer, except for tensors
      number = real(given);
      require(low <= number && number <= 1);
      return {};
    }
    at::Tensor tensor = ordinary(given);
    require(has_element(tensor) && (tensor.dim() == 0 || tensor.dim() == 2));
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      require(tensor.size(i) == 1 || tensor.size(i) == sizes(per_step ? steps_ : 1)[i]);
    }
    return tensor;
  }

  static double limit(py::handle given) {
    const double number = given.is_none() ? std::numeric_limits<double>::infinity() : real(given);
    require(number >= 0);
    return number;
  }

  static int64_t integer(py::handle given, int64_t least) {
    const std::optional<int64_t> number = integer_number(given);
    require(number && *number >= least);
    return *number;
  }

  // Stores an integer of at least 1 in `number`, or returns int64 numbers by row, or by row and one of `num_steps`
  // steps.
  at::Tensor horizons(py::handle given, int64_t num_steps, c10::SymInt& number) const {
    if (PyLong_Check(given.ptr()) || !THPVariable_Check(given.ptr())) {
      number = integer(given, 1);
      return {};
    }
    const bool is_per_row = THPVariable_Unpack(given.ptr()).dim() == 1;
    return is_per_row ? by_row(given, is_long) : by_step(given, is_long, num_steps - steps_);
  }

  bool is_batch_first;

 private:
  static double real(py::handle given) {
    const std::optional<double> number = real_number(given);
    require(number.has_value());
    return *number;
  }

  // A tensor that PyTorch negates lazily is negated here.
  at::Tensor ordinary(py::handle given) const {
    if (given.is_none()) {
      return {};
    }
    require(THPVariable_Check(given.ptr()));
    const at::Tensor& lazy = THPVariable_Unpack(given.ptr());
    require(is_readable(lazy));
    at::Tensor tensor = lazy.is_neg() ? lazy.resolve_neg() : lazy;
    require(!has_tangent(tensor) || has_only_keys(tensor._fw_grad(/*level=*/0), {}));
    require(tensor.device() == device_);
    return tensor;
  }

  std::array<int64_t, 2> sizes(int64_t steps) const {
    return {is_batch_first ? rows_ : steps, is_batch_first ? steps : rows_};
  }

  c10::Device device_{c10::kCPU};
  int64_t rows_ = 0;
  int64_t steps_ = 0;
};

// The items of a tuple. One tuple is passed sooner than a dozen arguments.
template <size_t count>
std::array<py::handle, count> items(const py::tuple& given) {
  TORCH_CHECK(given.size() == count, "expected ", count, " arguments, but ", given.size(), " are given");
  std::array<py::handle, count> result;
  for (size_t i = 0; i < count; ++i) {
    result[i] = PyTuple_GET_ITEM(given.ptr(), i);
  }
  return result;
}

// `given` has the order of Trajectories in gradscale_ext/_trajectories.py.
py::object returns_in_eager_mode(const std::string& name, const py::tuple& given) {
  const auto
      [rewards, values, next_values, ratios, discount, lambda, terminated, truncated, mask, clips, n, batch_first] =
          items<12>(given);
  const ReturnsReader read(rewards, batch_first);
  LinearCall call{};
  call.formula = named<Formula>("function", name);
  const FunctionOverTrajectories& function = function_of(call.formula);
  call.observations = next_values.is_none() && function.values != Values::none;
  require(!call.observations || (truncated.is_none() && function.values != Values::actions));
  const bool reads_values = call.observations || function.reads_own_values();
  require(!reads_values || !values.is_none());
  call.inputs = {
      read.by_step(rewards, has_element),
      reads_values ? read.by_step(values, has_element, call.observations ? 1 : 0) : at::Tensor(),
      read.by_step(next_values, has_element)};
  const at::Tensor unread = reads_values ? at::Tensor() : read.unread_values(values);
  call.batch_first = read.is_batch_first;
  call.ratios = read.by_step(ratios, has_element);
  require(call.ratios.defined() == function.has_ratios);
  call.discounts = read.coefficient(discount, -1, call.discount);
  call.lambdas = read.coefficient(lambda, 0, call.lambda);
  call.terminated = read.by_step(terminated, is_bool);
  call.truncated = read.by_step(truncated, is_bool);
  call.mask = read.by_step(mask, is_bool);
  for (int i = 0; i < 3; ++i) {
    call.limits[i] = ReturnsReader::limit(PyTuple_GET_ITEM(clips.ptr(), i));
  }
  call.n = has_n(call.formula) ? ReturnsReader::integer(n, 1) : 0;
  return without_gil([&] {
    if (unread.defined() && unread.scalar_type() == at::kDouble) {
      call.inputs[0] = call.inputs[0].to(at::kDouble); // the dtype of the results depends on the dtype of values
    }
    return returns(call, /*is_plain=*/true);
  });
}

bool is_word(py::handle given, const char* text) {
  return PyUnicode_Check(given.ptr()) && PyUnicode_CompareWithASCIIString(given.ptr(), text) == 0;
}

// `given` has the order of Window in gradscale_ext/_windows.py.
py::object muzero_targets_in_eager_mode(const py::tuple& given) {
  const auto
      [rewards,
       root_values,
       num_unroll_steps,
       td_steps,
       discount,
       lengths,
       terminated,
       to_play,
       reward,
       prefix_horizon,
       root_reward,
       batch_first] = items<12>(given);
  const ReturnsReader read(rewards, batch_first);
  const bool is_prefix = is_word(reward, "value_prefix");
  require(is_prefix ? to_play.is_none() : is_word(reward, "reward"));
  require(!root_values.is_none() && (lengths.is_none() || !terminated.is_none()));
  MuZeroWindows windows{};
  windows.rewards = read.by_step(rewards, has_element);
  windows.root_values = read.by_step(root_values, has_element, 1);
  windows.lengths = read.by_row(lengths, is_long);
  windows.terminated = read.by_row(terminated, is_bool);
  windows.to_play = read.by_step(to_play, is_integral, 1);
  windows.root_reward = read.by_row(root_reward, has_element);
  windows.discounts = read.coefficient(discount, -1, windows.discount, /*per_step=*/false);
  const int64_t unroll_steps = ReturnsReader::integer(num_unroll_steps, 0);
  require(unroll_steps <= std::numeric_limits<int32_t>::max());
  windows.num_unroll_steps = unroll_steps;
  windows.horizons = read.horizons(td_steps, unroll_steps + 1, windows.td_steps);
  const int64_t longest = std::max<int64_t>(1, unroll_steps);
  const int64_t horizon = prefix_horizon.is_none() ? longest : ReturnsReader::integer(prefix_horizon, 1);
  windows.prefix_horizon = is_prefix ? horizon : 0;
  windows.batch_first = read.is_batch_first;
  windows.is_checked = windows.rewards.is_cpu();
  check_constants(windows);
  return without_gil([&] {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> results = muzero_targets(windows);
    require(!results.empty()); // lengths, td_steps or to_play have values out of range
    return results;
  });
}

} // namespace

void define_returns(py::module_& m) {
  m.def("returns", run_or_refuse(&returns_in_eager_mode));
  m.def("muzero_targets", run_or_refuse(&muzero_targets_in_eager_mode));
}

} // namespace gradscale
