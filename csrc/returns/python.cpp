#include "returns.h"

#include "../torch/python_numbers.h"
#include "../torch/tensor_element.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <limits>
#include <optional>

namespace gradscale {

namespace {

namespace py = pybind11;

// The results of a call; none if an argument is unusual or wrong. Python then checks the call, and says what is wrong.
// Values are only looked at on a CPU.
using Results = std::optional<std::vector<at::Tensor>>;

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

// Reads the arguments of a call. `usual` becomes false if Python has to handle the call; then no tensors are read.
class Reader {
 public:
  static constexpr int64_t kPerRow = std::numeric_limits<int64_t>::min();

  explicit Reader(py::handle rewards, py::handle batch_first) {
    is_batch_first = batch_first.ptr() == Py_True;
    usual = ordinary_or_inference_context() && (is_batch_first || batch_first.ptr() == Py_False) &&
            THPVariable_Check(rewards.ptr());
    if (usual) {
      const at::Tensor& tensor = THPVariable_Unpack(rewards.ptr());
      usual = is_readable(tensor) && tensor.dim() == 2;
      if (usual) {
        device = tensor.device();
        rows = tensor.size(is_batch_first ? 0 : 1);
        steps = tensor.size(is_batch_first ? 1 : 0);
      }
    }
  }

  // A tensor of an accepted dtype, with `more` additional steps, or with one element per row if `more` is kPerRow;
  // undefined if None is given.
  at::Tensor tensor(py::handle given, bool (*accepts)(at::ScalarType), int64_t more = 0) {
    at::Tensor tensor = ordinary(given);
    require(!tensor.defined() || (accepts(tensor.scalar_type()) && has_shape(tensor, more)));
    return tensor;
  }

  // Values that the function does not read: of the states, or of all observations.
  at::Tensor unread_values(py::handle given) {
    at::Tensor tensor = ordinary(given);
    require(!tensor.defined() || (has_element(tensor) && (has_shape(tensor, 0) || has_shape(tensor, 1))));
    return tensor;
  }

  at::Tensor constant(at::Tensor tensor) {
    require(!has_tangent(tensor));
    require(!tensor.defined() || !at::GradMode::is_enabled() || !tensor.requires_grad());
    return tensor;
  }

  // Stores a number from `low` to 1 in `number`, or returns a tensor.
  at::Tensor coefficient(py::handle given, double low, double& number, bool per_step = true) {
    number = 1;
    if (PyFloat_Check(given.ptr()) || !THPVariable_Check(given.ptr())) { // the second takes longer, except for tensors
      number = real(given);
      require(low <= number && number <= 1);
      return {};
    }
    at::Tensor tensor = constant(ordinary(given, /*may_be_cpu_scalar=*/true));
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
    const double number = real(given);
    require(number >= 0);
    return number;
  }

  int64_t integer(py::handle given, int64_t least, int64_t if_none) {
    if (given.is_none()) {
      return if_none;
    }
    const int64_t number = integer_number(given).value_or(-1);
    require(number >= least);
    return number;
  }

  // Stores an integer of at least 1 in `number`, or returns int64 numbers by row, or by row and one of `num_steps`
  // steps.
  at::Tensor horizons(py::handle given, int64_t num_steps, c10::SymInt& number) {
    if (PyLong_Check(given.ptr()) || !THPVariable_Check(given.ptr())) {
      const int64_t n = integer(given, 1, 0);
      require(n >= 1);
      number = n;
      return {};
    }
    const bool is_per_row = usual && THPVariable_Unpack(given.ptr()).dim() == 1;
    return tensor(given, is_long, is_per_row ? kPerRow : num_steps - steps);
  }

  void require(bool condition) {
    usual = usual && condition;
  }

  bool usual;
  bool is_batch_first;

 private:
  double real(py::handle given) {
    const std::optional<double> number = real_number(given);
    require(number.has_value());
    return number.value_or(0);
  }

  // A tensor that PyTorch negates lazily is negated here.
  at::Tensor ordinary(py::handle given, bool may_be_cpu_scalar = false) {
    if (!usual || given.is_none()) {
      return {};
    }
    if (!THPVariable_Check(given.ptr())) {
      usual = false;
      return {};
    }
    const at::Tensor& lazy = THPVariable_Unpack(given.ptr());
    require(is_readable(lazy));
    at::Tensor tensor = usual && lazy.is_neg() ? lazy.resolve_neg() : lazy;
    require(!has_tangent(tensor) || has_only_keys(tensor._fw_grad(/*level=*/0), {}));
    require(tensor.device() == device || (may_be_cpu_scalar && tensor.dim() == 0 && tensor.is_cpu()));
    return tensor;
  }

  bool has_shape(const at::Tensor& tensor, int64_t more) const {
    if (more == kPerRow) {
      return usual && tensor.dim() == 1 && tensor.size(0) == rows;
    }
    return usual && tensor.dim() == 2 && tensor.size(is_batch_first ? 0 : 1) == rows &&
           tensor.size(is_batch_first ? 1 : 0) == steps + more;
  }

  c10::Device device{c10::kCPU};
  int64_t rows = 0;
  int64_t steps = 0;
};

Results returns_in_eager_mode(
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
  Reader read(rewards, batch_first);
  LinearCall call{};
  const auto function = static_cast<Formula>(formula);
  call.formula = formula;
  const bool has_n = function == Formula::n_step_returns || function == Formula::n_step_transitions;
  call.observations = next_values.is_none() && function != Formula::n_step_transitions;
  const bool reads_values = call.observations || !(has_n || function == Formula::lambda_returns);
  read.require(!(reads_values && values.is_none()));
  read.require(!(call.observations && (!truncated.is_none() || function == Formula::retrace)));
  call.inputs = {
      read.tensor(rewards, has_element),
      reads_values ? read.tensor(values, has_element, call.observations ? 1 : 0) : at::Tensor(),
      read.tensor(next_values, has_element)};
  const at::Tensor unread = reads_values ? at::Tensor() : read.unread_values(values);
  call.batch_first = read.is_batch_first;
  call.ratios = read.constant(read.tensor(ratios, has_element));
  read.require(call.ratios.defined() == (function == Formula::vtrace || function == Formula::retrace));
  call.discounts = read.coefficient(discount, -1, call.discount);
  call.lambdas = read.coefficient(lambda, 0, call.lambda);
  call.terminated = read.tensor(terminated, is_bool);
  call.truncated = read.tensor(truncated, is_bool);
  call.mask = read.tensor(mask, is_bool);
  for (int i = 0; i < 3; ++i) {
    call.limits[i] = read.limit(PyTuple_GET_ITEM(limits.ptr(), i));
  }
  const int64_t num_steps = read.integer(n, 1, 0);
  read.require(has_n == (num_steps > 0));
  if (!read.usual) {
    return std::nullopt;
  }
  call.n = num_steps;
  const py::gil_scoped_release no_gil;
  if (unread.defined() && unread.scalar_type() == at::kDouble) {
    call.inputs[0] = call.inputs[0].to(at::kDouble); // the dtype of the results depends on the dtype of values
  }
  return returns(call, /*is_plain=*/true);
}

Results muzero_targets_in_eager_mode(
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
  Reader read(rewards, batch_first);
  const auto is_reward = [&](const char* text) {
    return PyUnicode_Check(reward.ptr()) && PyUnicode_CompareWithASCIIString(reward.ptr(), text) == 0;
  };
  const bool is_prefix = is_reward("value_prefix");
  read.require(is_prefix ? to_play.is_none() : is_reward("reward"));
  MuZeroWindows windows{};
  windows.rewards = read.constant(read.tensor(rewards, has_element));
  read.require(!root_values.is_none());
  windows.root_values = read.constant(read.tensor(root_values, has_element, 1));
  windows.lengths = read.tensor(lengths, is_long, Reader::kPerRow);
  windows.terminated = read.tensor(terminated, is_bool, Reader::kPerRow);
  windows.to_play = read.tensor(to_play, is_integral, 1);
  windows.root_reward = read.constant(read.tensor(root_reward, has_element, Reader::kPerRow));
  windows.discounts = read.coefficient(discount, -1, windows.discount, /*per_step=*/false);
  const int64_t unroll_steps = read.integer(num_unroll_steps, 0, -1);
  windows.num_unroll_steps = unroll_steps;
  windows.horizons = read.horizons(td_steps, unroll_steps + 1, windows.td_steps);
  const int64_t horizon = read.integer(prefix_horizon, 1, std::max<int64_t>(1, unroll_steps));
  windows.prefix_horizon = is_prefix ? horizon : 0;
  windows.batch_first = read.is_batch_first;
  read.require(unroll_steps >= 0 && unroll_steps <= std::numeric_limits<int32_t>::max());
  read.require(!windows.lengths.defined() || windows.terminated.defined());
  if (!read.usual) {
    return std::nullopt;
  }
  const py::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  windows.is_checked = windows.rewards.is_cpu();
  const std::vector<at::Tensor> results = muzero_targets(windows);
  return results.empty() ? Results() : results;
}

// Numbers of any shape, and a mask, both contiguous and on the CPU. Nothing if they are unusual or wrong, and Python
// has to handle the call.
struct NumbersAndMask {
  at::Tensor numbers;
  at::Tensor mask; // undefined if None is given
};

bool is_plain_on_cpu(py::handle given) {
  if (!THPVariable_CheckExact(given.ptr())) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(given.ptr());
  return tensor.is_cpu() && ordinary_tensor(tensor);
}

std::optional<NumbersAndMask> numbers_and_mask(py::handle numbers, py::handle mask) {
  if (!ordinary_or_inference_context() || !is_plain_on_cpu(numbers) || !(mask.is_none() || is_plain_on_cpu(mask))) {
    return std::nullopt;
  }
  const at::Tensor& x = THPVariable_Unpack(numbers.ptr());
  if (!has_element(x)) {
    return std::nullopt;
  }
  const at::NoGradGuard no_grad;
  if (mask.is_none()) {
    return NumbersAndMask{x.contiguous(), {}};
  }
  const at::Tensor& flags = THPVariable_Unpack(mask.ptr());
  if (!is_bool(flags.scalar_type()) || flags.sizes() != x.sizes()) {
    return std::nullopt;
  }
  return NumbersAndMask{x.contiguous(), flags.contiguous()};
}

std::optional<at::Tensor> standardize_in_eager_mode(py::handle x, py::handle mask, double eps) {
  const std::optional<NumbersAndMask> given = numbers_and_mask(x, mask);
  if (!given) {
    return std::nullopt;
  }
  const py::gil_scoped_release no_gil;
  return standardize(given->numbers, given->mask, eps);
}

std::optional<at::Tensor> standardize_gradient_in_eager_mode(
    py::handle x, py::handle mask, double eps, py::handle gradient) {
  const std::optional<NumbersAndMask> given = numbers_and_mask(x, mask);
  if (!given || !is_plain_on_cpu(gradient)) {
    return std::nullopt;
  }
  const at::Tensor& tensor = THPVariable_Unpack(gradient.ptr());
  const at::ScalarType dtype = given->numbers.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (tensor.scalar_type() != dtype || tensor.sizes() != given->numbers.sizes()) {
    return std::nullopt;
  }
  const py::gil_scoped_release no_gil;
  return standardize_gradient(given->numbers, given->mask, eps, tensor.contiguous());
}

// A tuple of the percentiles, or of None if no entry counts; None if Python has to handle the call.
py::object percentiles_in_eager_mode(py::handle x, py::handle mask, double low, double high) {
  const std::optional<NumbersAndMask> given = numbers_and_mask(x, mask);
  if (!given) {
    return py::none();
  }
  at::Tensor found;
  {
    const py::gil_scoped_release no_gil;
    found = percentiles(given->numbers, given->mask, low, high);
  }
  return py::make_tuple(found.defined() ? py::cast(found) : py::none());
}

} // namespace

void define_returns(py::module_& m) {
  py::dict functions; // name -> number of results, in the order of Formula
  for (const FunctionOverTrajectories& function : kFunctions) {
    functions[function.name] = function.num_results;
  }
  m.attr("functions_over_trajectories") = functions;
  m.def("standardize", &standardize_in_eager_mode);
  m.def("standardize_gradient", &standardize_gradient_in_eager_mode);
  m.def("percentiles", &percentiles_in_eager_mode);
  m.def("returns", &returns_in_eager_mode);
  m.def("muzero_targets", &muzero_targets_in_eager_mode);
}

} // namespace gradscale
