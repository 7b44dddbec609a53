#include "returns.h"

#include "../torch/tensor_element.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <limits>

namespace gradscale {

namespace {

namespace py = pybind11;

// Reads the arguments of a call. `usual` becomes false at the first argument that is left to Python.
class Reader {
 public:
  explicit Reader(py::handle rewards, py::handle batch_first) {
    usual = batch_first.ptr() == Py_True || batch_first.ptr() == Py_False;
    is_batch_first = batch_first.ptr() == Py_True;
    if (usual && THPVariable_Check(rewards.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(rewards.ptr());
      usual = tensor.dim() == 2 && ordinary_tensor(tensor) && has_element(tensor);
      if (usual) {
        device = tensor.device();
        rows = tensor.size(is_batch_first ? 0 : 1);
        steps = tensor.size(is_batch_first ? 1 : 0);
      }
    } else {
      usual = false;
    }
  }

  // A floating tensor with `more` additional steps; undefined if None is given.
  at::Tensor floats(py::handle given, int64_t more = 0) {
    const at::Tensor tensor = ordinary(given);
    require(!tensor.defined() || (has_element(tensor) && has_shape(tensor, more)));
    return tensor;
  }

  at::Tensor flags(py::handle given) {
    const at::Tensor tensor = ordinary(given);
    require(!tensor.defined() || (tensor.scalar_type() == at::kBool && has_shape(tensor, 0)));
    return tensor;
  }

  at::Tensor constant(at::Tensor tensor) {
    require(!tensor.defined() || !((at::GradMode::is_enabled() && tensor.requires_grad()) || has_tangent(tensor)));
    return tensor;
  }

  // Stores a number from `low` to 1 in `number`, or returns a tensor.
  at::Tensor coefficient(py::handle given, double low, double& number, bool per_step = true) {
    number = 1;
    if (PyFloat_Check(given.ptr()) || (PyLong_Check(given.ptr()) && !PyBool_Check(given.ptr()))) {
      number = PyFloat_Check(given.ptr()) ? PyFloat_AS_DOUBLE(given.ptr()) : PyLong_AsDouble(given.ptr());
      require(PyErr_Occurred() == nullptr && low <= number && number <= 1);
      PyErr_Clear();
      return {};
    }
    require(!given.is_none());
    const at::Tensor tensor = constant(ordinary(given, /*may_be_cpu_scalar=*/true));
    if (tensor.defined()) {
      const int64_t num_steps = per_step ? steps : 1;
      const int64_t sizes[2] = {is_batch_first ? rows : num_steps, is_batch_first ? num_steps : rows};
      require(has_element(tensor) && (tensor.dim() == 0 || tensor.dim() == 2));
      for (int64_t i = 0; i < tensor.dim() && usual; ++i) {
        require(tensor.size(i) == 1 || tensor.size(i) == sizes[i]);
      }
    }
    return tensor;
  }

  double limit(py::handle given) {
    if (given.is_none()) {
      return std::numeric_limits<double>::infinity();
    }
    require(PyFloat_Check(given.ptr()) && PyFloat_AS_DOUBLE(given.ptr()) >= 0);
    return usual ? PyFloat_AS_DOUBLE(given.ptr()) : 0;
  }

  int64_t integer(py::handle given, int64_t least, int64_t if_none) {
    if (given.is_none()) {
      return if_none;
    }
    int overflow = 0;
    const int64_t value = PyLong_CheckExact(given.ptr()) ? PyLong_AsLongLongAndOverflow(given.ptr(), &overflow) : -1;
    require(value >= least && overflow == 0);
    return value;
  }

  // A tensor with an entry for each row; undefined if None is given.
  at::Tensor by_row(py::handle given) {
    const at::Tensor tensor = ordinary(given);
    require(!tensor.defined() || (tensor.dim() == 1 && tensor.size(0) == rows));
    return tensor;
  }

  // A tensor of any type with `more` additional steps; undefined if None is given.
  at::Tensor matrix(py::handle given, int64_t more) {
    const at::Tensor tensor = ordinary(given);
    require(!tensor.defined() || has_shape(tensor, more));
    return tensor;
  }

  void require(bool condition) {
    usual = usual && condition;
  }

  bool usual;
  bool is_batch_first;

 private:
  at::Tensor ordinary(py::handle given, bool may_be_cpu_scalar = false) {
    if (!usual || given.is_none()) {
      return {};
    }
    if (!THPVariable_Check(given.ptr())) {
      usual = false;
      return {};
    }
    const at::Tensor& tensor = THPVariable_Unpack(given.ptr());
    require(ordinary_tensor(tensor));
    require(tensor.device() == device || (may_be_cpu_scalar && tensor.dim() == 0 && tensor.is_cpu()));
    return tensor;
  }

  bool has_shape(const at::Tensor& tensor, int64_t more) const {
    return usual && tensor.dim() == 2 && tensor.size(is_batch_first ? 0 : 1) == rows &&
           tensor.size(is_batch_first ? 1 : 0) == steps + more;
  }

  c10::Device device{c10::kCPU};
  int64_t rows = 0;
  int64_t steps = 0;
};

py::object as_tuple(std::vector<at::Tensor> results) {
  py::tuple tuple(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    tuple[i] = py::cast(std::move(results[i]));
  }
  return tuple;
}

} // namespace

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
    py::handle limits,
    py::handle n,
    py::handle batch_first) {
  if (!ordinary_or_inference_context()) {
    return py::none();
  }
  Reader read(rewards, batch_first);
  if (!read.usual) {
    return py::none();
  }
  LinearCall call{};
  call.function = static_cast<Formula>(formula);
  call.observations = next_values.is_none();
  const bool reads_values =
      call.observations || (call.function != Formula::lambda_returns && call.function != Formula::n_step);
  read.require(!(reads_values && values.is_none()) && (reads_values || values.is_none()));
  read.require(!(call.observations && (!truncated.is_none() || call.function == Formula::retrace)));
  call.inputs = {read.floats(rewards), read.floats(values, call.observations ? 1 : 0), read.floats(next_values)};
  ReturnsCoefficients& c = call.coefficients;
  c.batch_first = read.is_batch_first;
  c.ratios = read.constant(read.floats(ratios));
  read.require(c.ratios.defined() == (call.function == Formula::vtrace || call.function == Formula::retrace));
  c.discounts = read.coefficient(discount, -1, c.discount);
  c.lambdas = read.coefficient(lambda, 0, c.lambda);
  c.terminated = read.flags(terminated);
  c.truncated = read.flags(truncated);
  c.mask = read.flags(mask);
  for (int i = 0; i < 3; ++i) {
    c.limits[i] = read.limit(PyTuple_GET_ITEM(limits.ptr(), i));
  }
  const int64_t num_steps = read.integer(n, 1, 0);
  read.require((call.function == Formula::n_step) == (num_steps > 0));
  if (!read.usual) {
    return py::none();
  }
  c.n = num_steps;
  std::vector<at::Tensor> results;
  {
    py::gil_scoped_release no_gil;
    results = returns(call, /*is_plain=*/true);
  }
  return as_tuple(std::move(results));
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
  if (!ordinary_or_inference_context()) {
    return py::none();
  }
  Reader read(rewards, batch_first);
  if (!read.usual || !PyUnicode_Check(reward.ptr())) {
    return py::none();
  }
  const bool is_prefix = PyUnicode_CompareWithASCIIString(reward.ptr(), "value_prefix") == 0;
  read.require(is_prefix ? to_play.is_none() : PyUnicode_CompareWithASCIIString(reward.ptr(), "reward") == 0);
  MuZeroWindows windows{};
  windows.rewards = read.constant(read.floats(rewards));
  read.require(!root_values.is_none());
  windows.root_values = read.constant(read.floats(root_values, 1));
  windows.lengths = read.by_row(lengths);
  windows.terminated = read.by_row(terminated);
  windows.to_play = read.matrix(to_play, 1);
  windows.root_reward = read.constant(read.by_row(root_reward));
  windows.discounts = read.coefficient(discount, -1, windows.discount, /*per_step=*/false);
  const int64_t unroll_steps = read.integer(num_unroll_steps, 0, -1), bootstrap_steps = read.integer(td_steps, 1, -1);
  windows.num_unroll_steps = unroll_steps;
  windows.td_steps = bootstrap_steps;
  const int64_t horizon = read.integer(prefix_horizon, 1, std::max<int64_t>(1, unroll_steps));
  windows.prefix_horizon = is_prefix ? horizon : 0;
  windows.batch_first = read.is_batch_first;
  read.require(unroll_steps >= 0 && unroll_steps <= std::numeric_limits<int32_t>::max() && bootstrap_steps >= 1);
  read.require(
      !windows.lengths.defined() || (windows.lengths.scalar_type() == at::kLong && windows.terminated.defined()));
  read.require(!windows.terminated.defined() || windows.terminated.scalar_type() == at::kBool);
  read.require(!windows.to_play.defined() || c10::isIntegralType(windows.to_play.scalar_type(), /*includeBool=*/true));
  read.require(!windows.root_reward.defined() || has_element(windows.root_reward));
  if (!read.usual) {
    return py::none();
  }
  std::vector<at::Tensor> results;
  {
    py::gil_scoped_release no_gil;
    at::NoGradGuard no_grad;
    results = muzero_targets(windows);
  }
  return as_tuple(std::move(results));
}

} // namespace gradscale
