#include "python.h"

#include "backward.h"

#include "../torch/python_numbers.h"
#include "../torch/tensor_element.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace gradscale {

namespace {

bool read_tensor(py::handle object, at::Tensor& tensor) {
  return THPVariable_Check(object.ptr()) && read_ordinary(THPVariable_Unpack(object.ptr()), tensor);
}

// Targets and weights must not require grad.
bool read_constant(py::handle object, at::Tensor& tensor) {
  return read_tensor(object, tensor) && !tensor.requires_grad();
}

template <class Read>
bool read_entries(py::handle object, Entries& entries, Read read) {
  PyObject* items = object.ptr();
  if (!PyList_Check(items) && !PyTuple_Check(items)) {
    entries.stacked = true;
    return read(object, entries.tensors.emplace_back());
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
  entries.tensors.resize(count);
  for (Py_ssize_t k = 0; k < count; ++k) {
    if (!read(PySequence_Fast_GET_ITEM(items, k), entries.tensors[k])) {
      return false;
    }
  }
  return count > 0;
}

// Predictions and targets of all heads, from two dicts.
bool read_all_entries(const Plan& plan, py::handle predictions, py::handle targets, Call& call) {
  const size_t heads = plan.table.size();
  if (!PyDict_Check(predictions.ptr()) || !PyDict_Check(targets.ptr()) ||
      PyDict_Size(predictions.ptr()) != static_cast<Py_ssize_t>(heads)) {
    return false;
  }
  call.predictions.resize(heads);
  call.targets.resize(heads);
  Py_ssize_t found_targets = 0;
  for (size_t h = 0; h < heads; ++h) {
    PyObject* prediction = PyDict_GetItem(predictions.ptr(), plan.names[h].ptr());
    PyObject* target = PyDict_GetItem(targets.ptr(), plan.names[h].ptr());
    found_targets += target != nullptr ? 1 : 0;
    if (prediction == nullptr || !read_entries(prediction, call.predictions[h], read_tensor)) {
      return false;
    }
    const bool is_given = target != nullptr && target != Py_None;
    if (is_given && !read_entries(target, call.targets[h], read_constant)) {
      return false;
    }
  }
  return found_targets == PyDict_Size(targets.ptr());
}

// ---- Options --------------------------------------------------------------------------------------------------------

bool is_text(py::handle given, const char* text) {
  return PyUnicode_Check(given.ptr()) && PyUnicode_CompareWithASCIIString(given.ptr(), text) == 0;
}

bool read_weights(py::handle given, at::Tensor& weights) {
  return given.is_none() || read_constant(given, weights);
}

bool read_mask(py::handle given, at::Tensor& mask) {
  return read_tensor(given, mask) && mask.scalar_type() == at::kBool;
}

bool read_head_weight(py::handle given, HeadWeight& weight) {
  if (THPVariable_Check(given.ptr())) {
    const bool is_read = read_tensor(given, weight.tensor);
    weight.wants_gradient = at::GradMode::is_enabled() && weight.tensor.requires_grad();
    return is_read;
  }
  const std::optional<double> number = real_number(given);
  weight.number = number.value_or(0);
  return number && *number >= 0 && std::isfinite(*number);
}

bool read_num_entries(py::handle given, NumEntries& entries) {
  if (THPVariable_Check(given.ptr())) {
    return read_constant(given, entries.tensor);
  }
  entries.number = real_number(given).value_or(0);
  return entries.number > 0 && std::isfinite(entries.number);
}

// True for a list, a tuple or a range, and for other objects with a length and items in one dimension, such as a deque
// or a NumPy array; is_sequence() of gradscale_ext/call/checks.py is the same. False for text and mappings.
bool is_sequence(py::handle given) {
  PyObject* items = given.ptr();
  if (PyList_Check(items) || PyTuple_Check(items) || PyRange_Check(items)) {
    return true;
  }
  const bool is_text = PyUnicode_Check(items) || PyBytes_Check(items) || PyByteArray_Check(items);
  return PySequence_Check(items) && !is_text && !py::hasattr(given, "items") &&
         py::getattr(given, "ndim", py::int_(1)).equal(py::int_(1));
}

bool read_step_numbers(py::handle given, int64_t steps, StepNumbers& numbers) {
  PyObject* items = given.ptr();
  if (given.is_none() || THPVariable_Check(items)) {
    return given.is_none() || read_constant(given, numbers.tensor);
  }
  if (!is_sequence(given)) {
    return false;
  }
  // Read a copy: converting an item to a number may run Python code (`__float__`), which could change the list.
  const bool has_steps = PySequence_Size(items) == steps;
  const auto copy = py::reinterpret_steal<py::tuple>(has_steps ? PySequence_Tuple(items) : nullptr);
  if (failed() || !copy) {
    return false;
  }
  for (const py::handle item : copy) {
    at::Tensor tensor; // reading a number from another device would synchronize
    if (THPVariable_Check(item.ptr()) && !(read_constant(item, tensor) && tensor.is_cpu())) {
      return false;
    }
    numbers.numbers.push_back(PyFloat_AsDouble(item.ptr()));
    if (failed()) {
      return false;
    }
  }
  return !numbers.numbers.empty();
}

// Step numbers, or "unroll": 1 for the root and 1/K after.
bool read_gradient_scale(py::handle given, int64_t steps, StepNumbers& numbers) {
  if (!is_text(given, "unroll")) {
    return read_step_numbers(given, steps, numbers);
  }
  numbers.numbers = {1.0};
  numbers.numbers.resize(std::max<int64_t>(steps, 1), 1.0 / static_cast<double>(steps - 1));
  return true;
}

template <class Choice>
bool read_choice(py::handle given, Choice& choice) {
  constexpr auto names = names_of(Choice());
  for (size_t i = 0; i < names.size(); ++i) {
    if (is_text(given, names[i])) {
      choice = static_cast<Choice>(i);
      return true;
    }
  }
  return false;
}

// Reads one value for all heads, or a dict with a value for each head.
template <class T, class Read>
bool read_by_head(const Plan& plan, py::handle given, ByHead<T>& by_head, Read read) {
  if (given.is_none()) {
    return true;
  }
  if (!PyDict_Check(given.ptr())) {
    return read(given, by_head.values.emplace_back());
  }
  by_head.values.resize(plan.table.size());
  Py_ssize_t found = 0;
  for (size_t h = 0; h < by_head.values.size(); ++h) {
    // A new reference: reading may run Python code, which could remove the value from the dict.
    const auto value = py::reinterpret_borrow<py::object>(PyDict_GetItem(given.ptr(), plan.names[h].ptr()));
    if (value && !read(value, by_head.values[h])) {
      return false;
    }
    found += value ? 1 : 0;
  }
  return found == PyDict_Size(given.ptr());
}

// Reads the options, a tuple in the order of Option, into a call that already has its predictions.
bool read_options(const Plan& plan, py::handle options, Call& call) {
  const auto given = [=](Option option) -> py::handle {
    return PyTuple_GET_ITEM(options.ptr(), static_cast<Py_ssize_t>(option));
  };
  const py::handle batch_first = given(Option::batch_first);
  const py::handle head_weights = given(Option::head_weights), num_entries = given(Option::num_entries);
  const auto is_by_head = [](py::handle value) { return value.is_none() || PyDict_Check(value.ptr()); };
  call.batch_first = batch_first.ptr() == Py_True;
  const int64_t steps = call.count_steps(plan.table);
  const auto step_numbers = [=](py::handle value, StepNumbers& to) { return read_step_numbers(value, steps, to); };
  const auto gradient_scale = [=](py::handle value, StepNumbers& to) { return read_gradient_scale(value, steps, to); };
  return PyBool_Check(batch_first.ptr()) && is_by_head(head_weights) && is_by_head(num_entries) &&
         read_by_head(plan, given(Option::step_weights), call.step_weights, step_numbers) &&
         read_by_head(plan, given(Option::step_gradient_scale), call.step_gradient_scale, gradient_scale) &&
         read_by_head(plan, given(Option::importance_weights), call.importance_weights, read_weights) &&
         read_by_head(plan, given(Option::mask), call.mask, read_mask) &&
         read_by_head(plan, head_weights, call.head_weights, read_head_weight) &&
         read_by_head(plan, num_entries, call.num_entries, read_num_entries) &&
         read_choice(given(Option::reduction), call.reduction) && read_choice(given(Option::nonfinite), call.nonfinite);
}

// Raises if an unmasked class is out of range, for which the kernel would return NaN. Classes on a device are not
// checked, because reading them would synchronize.
void check_classes(const Plan& plan, size_t h, const Call& call) {
  const Entries& targets = call.targets[h];
  if (targets.tensors.empty() || !targets.tensors[0].is_cpu()) {
    return;
  }
  const int64_t first_step = plan.table[h].first_step, number = call.predictions[h].tensors[0].size(-1);
  const StepMask mask = call.step_mask(h);
  for (int64_t step = first_step; step < call.steps; ++step) {
    const Rows classes = call.rows_of(targets, step - first_step);
    if (classes.element != Element::int64) {
      continue;
    }
    for (int64_t b = 0; b < call.batch; ++b) {
      const int64_t chosen = static_cast<const int64_t*>(classes.data)[b * classes.stride];
      TORCH_CHECK_VALUE(
          !mask.includes(b, step) || (chosen >= 0 && chosen < number),
          "multi_step_loss: the target of head '",
          py::str(plan.names[h]).cast<std::string>(),
          "' at step ",
          step,
          " must be classes from 0 to ",
          number - 1,
          ", but sample ",
          b,
          " has ",
          chosen);
    }
  }
}

// Reads and checks the arguments of a call; false if the kernels do not accept it.
bool read_call(const Plan& plan, py::handle predictions, py::handle targets, py::handle options, Call& call) {
  if (!ordinary_or_inference_context() || !PyTuple_Check(options.ptr()) ||
      !read_all_entries(plan, predictions, targets, call) || !read_options(plan, options, call) ||
      !call.settle(plan.table)) {
    return false;
  }
  const bool records = at::GradMode::is_enabled();
  for (size_t h = 0; h < plan.table.size(); ++h) {
    check_classes(plan, h, call);
  }
  call.each_prediction([&](const Entries&, const at::Tensor& prediction, size_t) {
    call.wants.push_back(records && prediction.requires_grad());
  });
  return true;
}

// The number of a head in [heads], as a tensor without dimensions that shares its memory. It is no view in the sense of
// autograd, because users never see the base.
at::Tensor number_of(const at::Tensor& numbers, size_t head) {
  at::Tensor number = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(numbers.storage()), numbers.key_set(), numbers.dtype());
  number.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(), at::IntArrayRef(), static_cast<int64_t>(head));
  return number;
}

py::dict outputs_to_python(const Plan& plan, const Call& call) {
  const Outputs& outputs = call.outputs;
  py::dict per_step, details[3]; // indexed by Detail
  py::dict head_means, head_losses, head_gradient_norms, max_abs_logit;
  for (size_t h = 0; h < plan.table.size(); ++h) {
    const py::object& name = plan.names[h];
    per_step[name] = outputs.per_step[h];
    details[static_cast<size_t>(plan.table[h].detail)][name] = outputs.details[h];
    head_means[name] = number_of(outputs.head_means, h);
    head_losses[name] = number_of(outputs.head_losses, h);
    if (call.wants_head(h)) {
      head_gradient_norms[name] = number_of(outputs.head_gradient_norms, h);
    }
    if (has_largest_logit(plan.table[h].kind)) {
      max_abs_logit[name] = number_of(outputs.max_abs_logit, h);
    }
  }
  py::dict result;
  result["loss"] = outputs.loss;
  result["per_sample"] = outputs.per_sample;
  result["per_step"] = per_step;
  result["expected"] = details[static_cast<size_t>(Detail::expected)];
  result["entropy"] = details[static_cast<size_t>(Detail::entropy)];
  result["head_means"] = head_means;
  result["head_losses"] = head_losses;
  result["head_gradient_norms"] = head_gradient_norms;
  result["max_abs_logit"] = max_abs_logit;
  result["num_nonfinite"] = outputs.num_nonfinite;
  return result;
}

// Makes a plan whose deleter takes the GIL: its last owner may be a node of the graph that a thread of autograd frees.
std::shared_ptr<Plan> make_plan(
    py::dict heads, const std::vector<std::string>& names, const std::vector<double>& numbers) {
  return {new Plan(std::move(heads), names, numbers), [](Plan* plan) {
            const py::gil_scoped_acquire gil;
            delete plan;
          }};
}

// Computes the loss. `options` is an `Options` of gradscale_ext/call/options.py, whose fields have the order of the C++
// Options (tests/test_loss_contexts.py checks it). Returns the fields of `MultiStepLossOutput` by name, or None if the
// fused kernels do not accept the call: an argument is wrong, for which Python then raises the error, or a tensor is of
// another kind (subclass, transform, device), for which Python has another path.
py::object multi_step_loss(
    const std::shared_ptr<Plan>& plan, py::handle predictions, py::handle targets, py::handle options) {
  Call call;
  if (!read_call(*plan, predictions, targets, options, call)) {
    return py::none();
  }
  {
    py::gil_scoped_release no_gil;
    at::NoGradGuard no_grad;
    run(call);
  }
  py::dict result = outputs_to_python(*plan, call);
  if (call.wants_any()) {
    record_call(std::move(call), plan);
  }
  return result;
}

} // namespace

Plan::Plan(py::dict heads, const std::vector<std::string>& head_names, const std::vector<double>& numbers)
    : heads(std::move(heads)), table(head_names, numbers) {
  for (const auto& item : this->heads) {
    names.push_back(py::reinterpret_borrow<py::object>(item.first));
  }
}

void define_loss(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def(py::init(&make_plan));
  m.def("multi_step_loss", &multi_step_loss);
  m.def("outputs", [] { // name -> true for a list by head; in the order in which the operator returns them
    const Outputs none;
    py::dict outputs;
    Outputs::each(none, [&](const char* name, const auto& output) {
      outputs[name] = !std::is_same_v<std::decay_t<decltype(output)>, at::Tensor>;
    });
    return outputs;
  });
}

} // namespace gradscale
