#include "python.h"

#include "../torch/autograd.h"
#include "../torch/tensor_element.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

namespace gradscale {

namespace {

// Never freed: a destructor at the end of the process would run after the interpreter has shut down.
py::function* unroll_scale = nullptr;

bool read_tensor(py::handle object, at::Tensor& tensor) {
  if (!THPVariable_Check(object.ptr())) {
    return false;
  }
  tensor = THPVariable_Unpack(object.ptr());
  return ordinary_tensor(tensor);
}

// Targets and weights must not require grad.
bool read_constant(py::handle object, at::Tensor& tensor) {
  return read_tensor(object, tensor) && !tensor.requires_grad();
}

bool read_entries(py::handle object, Entries& entries) {
  PyObject* items = object.ptr();
  if (!PyList_Check(items) && !PyTuple_Check(items)) {
    entries.stacked = true;
    return read_tensor(object, entries.tensors.emplace_back());
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
  entries.tensors.resize(count);
  for (Py_ssize_t k = 0; k < count; ++k) {
    if (!read_tensor(PySequence_Fast_GET_ITEM(items, k), entries.tensors[k])) {
      return false;
    }
  }
  return count > 0;
}

bool requires_grad(const at::Tensor& tensor) {
  return tensor.requires_grad();
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
    if (prediction == nullptr || !read_entries(prediction, call.predictions[h])) {
      return false;
    }
    Tensors& tensors = call.targets[h].tensors;
    const bool is_given = target != nullptr && target != Py_None;
    if (is_given &&
        (!read_entries(target, call.targets[h]) || std::any_of(tensors.begin(), tensors.end(), requires_grad))) {
      return false;
    }
  }
  return found_targets == PyDict_Size(targets.ptr());
}

// Reads the options, a tuple in the order of Options::each(), into a call that already has its predictions.
class PythonReader {
 public:
  PythonReader(const Plan& plan, Call& call, py::handle options) : plan_(plan), call_(call), options_(options.ptr()) {
  }

  // Reads the step numbers, whose count depends on batch_first; returns true if the kernels accept all options.
  bool finish() {
    const int64_t steps = all_read_ && !step_numbers_.empty() ? call_.count_steps(plan_.table) : 0;
    return all_read_ && std::all_of(step_numbers_.begin(), step_numbers_.end(), [=](const auto& pending) {
             const auto& [given, numbers] = pending;
             return read_value(given ? given : (*unroll_scale)(steps), steps, *numbers);
           });
  }

  template <class Option>
  void operator()(const char*, Option& option) {
    all_read_ = all_read_ && read(PyTuple_GET_ITEM(options_, next_++), option);
  }

 private:
  // Reads one value for all heads, or a dict with a value for each head.
  template <class T>
  bool read(py::handle given, ByHead<T>& by_head) {
    if (given.is_none()) {
      return true;
    }
    if (!PyDict_Check(given.ptr())) {
      by_head.values.resize(1);
      return !std::is_same_v<T, HeadWeight> && read_one(given, by_head, 0);
    }
    by_head.values.resize(plan_.table.size());
    Py_ssize_t found = 0;
    for (size_t h = 0; h < by_head.values.size(); ++h) {
      PyObject* value = PyDict_GetItem(given.ptr(), plan_.names[h].ptr());
      if (value != nullptr && !read_one(value, by_head, h)) {
        return false;
      }
      found += value != nullptr ? 1 : 0;
    }
    return found == PyDict_Size(given.ptr());
  }

  template <class T>
  bool read_one(py::handle given, ByHead<T>& by_head, size_t index) {
    T& value = by_head.values[index];
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return &by_head == &call_.mask ? read_mask(given, value) : read(given, value);
    } else if constexpr (std::is_same_v<T, StepNumbers>) {
      const bool unrolls = &by_head == &call_.step_gradient_scale && is_unroll(given);
      step_numbers_.emplace_back(unrolls ? py::object() : py::reinterpret_borrow<py::object>(given), &value);
      return true;
    } else {
      return read_value(given, value);
    }
  }

  static bool read_value(py::handle given, HeadWeight& weight) {
    if (THPVariable_Check(given.ptr())) {
      return read_tensor(given, weight.tensor);
    }
    if (!is_real(given)) {
      return false;
    }
    weight.number = PyFloat_AsDouble(given.ptr());
    return !failed() && weight.number >= 0 && std::isfinite(weight.number);
  }

  // True if a call of Python's C API failed. Clears the error: the checks in Python raise one that names the argument.
  static bool failed() {
    const bool raised = PyErr_Occurred() != nullptr;
    PyErr_Clear();
    return raised;
  }

  // True for a number of Python or NumPy. False for an array, although it may be convertible to a number.
  static bool is_real(py::handle given) {
    return PyFloat_Check(given.ptr()) || PyLong_CheckExact(given.ptr()) ||
           (!PyBool_Check(given.ptr()) && py::isinstance(given, py::module_::import("numbers").attr("Real")));
  }

  // True if a tensor can be read as a number. Reading it from another device would synchronize.
  static bool is_readable(const at::Tensor& tensor) {
    return tensor.is_cpu() && !tensor.requires_grad();
  }

  static bool read_value(const py::object& given, int64_t steps, StepNumbers& numbers) {
    if (given.is_none()) {
      return true;
    }
    PyObject* items = given.ptr();
    if (!PyList_Check(items) && !PyTuple_Check(items) && !PyRange_Check(items)) {
      return read_constant(given, numbers.tensor);
    }
    // Read a copy: converting an item to a number may run Python code (`__float__`), which could change the list.
    const bool has_steps = PySequence_Size(items) == steps;
    const py::object copy = py::reinterpret_steal<py::object>(has_steps ? PySequence_Tuple(items) : nullptr);
    if (failed() || !copy) {
      return false;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(copy.ptr());
    for (Py_ssize_t k = 0; k < count; ++k) {
      PyObject* item = PyTuple_GET_ITEM(copy.ptr(), k);
      if (THPVariable_Check(item) && !is_readable(THPVariable_Unpack(item))) {
        return false;
      }
      numbers.numbers.push_back(PyFloat_AsDouble(item));
      if (failed()) {
        return false;
      }
    }
    return count > 0;
  }

  static bool is_unroll(py::handle given) {
    return PyUnicode_Check(given.ptr()) && PyUnicode_CompareWithASCIIString(given.ptr(), "unroll") == 0;
  }

  static bool read(py::handle given, at::Tensor& tensor) {
    return given.is_none() || read_constant(given, tensor);
  }

  static bool read_mask(py::handle given, at::Tensor& mask) {
    return read_tensor(given, mask) && mask.scalar_type() == at::kBool;
  }

  static bool read(py::handle given, bool& flag) {
    flag = given.ptr() == Py_True;
    return PyBool_Check(given.ptr());
  }

  template <class Choice>
  static bool read(py::handle given, Choice& choice) {
    constexpr auto names = names_of(Choice());
    for (size_t i = 0; PyUnicode_Check(given.ptr()) && i < names.size(); ++i) {
      if (PyUnicode_CompareWithASCIIString(given.ptr(), names[i]) == 0) {
        choice = static_cast<Choice>(i);
        return true;
      }
    }
    return false;
  }

  const Plan& plan_;
  Call& call_;
  PyObject* options_;
  Py_ssize_t next_ = 0;
  bool all_read_ = true;
  std::vector<std::pair<py::object, StepNumbers*>> step_numbers_; // null object: "unroll"
};

// Raises if an unmasked class is out of range, for which the kernel would return NaN. Classes on a device are not
// checked, because reading them would synchronize.
void check_classes(const Plan& plan, size_t h, const Call& call) {
  const Entries& targets = call.targets[h];
  const int64_t first_step = plan.table[h].first_step;
  if (targets.tensors.empty() || !targets.tensors[0].is_cpu()) {
    return;
  }
  const int64_t mask_batch_dim = call.batch_dim();
  for (int64_t t = 0; t < call.steps - first_step; ++t) {
    const at::Tensor& whole = targets.tensors[targets.stacked ? 0 : t];
    if (whole.scalar_type() != at::kLong) {
      continue;
    }
    const int64_t batch_dim = call.batch_dim(targets);
    const int64_t* classes = whole.const_data_ptr<int64_t>() + (targets.stacked ? t * whole.stride(1 - batch_dim) : 0);
    const int64_t number = call.predictions[h].tensors[0].size(-1);
    const at::Tensor& mask = call.mask[h];
    for (int64_t b = 0; b < call.batch; ++b) {
      const int64_t chosen = classes[b * whole.stride(batch_dim)];
      const bool unmasked =
          !mask.defined() ||
          mask.const_data_ptr<
              bool>()[b * mask.stride(mask_batch_dim) + (t + first_step) * mask.stride(1 - mask_batch_dim)];
      TORCH_CHECK_VALUE(
          !unmasked || (chosen >= 0 && chosen < number),
          "multi_step_loss: the target of head '",
          py::str(plan.names[h]).cast<std::string>(),
          "' at step ",
          t + first_step,
          " must be classes from 0 to ",
          number - 1,
          ", but sample ",
          b,
          " has ",
          chosen);
    }
  }
}

at::Tensor without_edge(const at::Tensor& tensor) {
  return with_edge(tensor, torch::autograd::Edge());
}

// Puts the options into a dict.
struct PythonWriter {
  py::dict options;

  template <class Option>
  void operator()(const char* name, const Option& option) {
    options[name] = written(option);
  }

  static py::object written(const at::Tensor& tensor) {
    return tensor.defined() ? py::cast(without_edge(tensor)) : py::object(py::none());
  }
  static py::object written(const StepNumbers& numbers) {
    return numbers.numbers.empty() ? written(numbers.tensor) : py::cast(numbers.numbers);
  }
  // Keeps the autograd edge of a head weight, which may get a gradient.
  static py::object written(const HeadWeight& weight) {
    return weight.tensor.defined() ? py::cast(weight.tensor) : py::object(py::float_(weight.number));
  }
  template <class T>
  static py::object written(const ByHead<T>& by_head) {
    py::list list;
    for (const T& value : by_head.values) {
      list.append(written(value));
    }
    return list;
  }
  static py::object written(bool flag) {
    return py::bool_(flag);
  }
  template <class Choice, std::enable_if_t<std::is_enum_v<Choice>, int> = 0>
  static py::object written(Choice choice) {
    return py::str(names_of(choice)[static_cast<size_t>(choice)]);
  }
};

// Reads and checks the arguments of a call; false if the kernels do not accept it.
bool read_call(const Plan& plan, py::handle predictions, py::handle targets, py::handle options, Call& call) {
  PythonReader reader(plan, call, options);
  if (!ordinary_or_inference_context() || !PyTuple_Check(options.ptr()) ||
      !read_all_entries(plan, predictions, targets, call)) {
    return false;
  }
  Options::each(call, reader);
  if (!reader.finish() || !call.settle(plan.table)) {
    return false;
  }
  const bool records = at::GradMode::is_enabled();
  for (size_t h = 0; h < plan.table.size(); ++h) {
    check_classes(plan, h, call);
    std::vector<bool>& wants = call.wants.emplace_back();
    for (const at::Tensor& prediction : call.predictions[h].tensors) {
      wants.push_back(records && prediction.requires_grad());
    }
  }
  call.want_shares([=](const at::Tensor& weight) { return records && weight.requires_grad(); });
  return true;
}

// `with_gradient`: by head, true if a prediction has a gradient.
py::dict outputs_to_python(const Plan& plan, const Outputs& outputs, const std::vector<bool>& with_gradient) {
  const at::AutoDispatchBelowADInplaceOrView guard; // no view tracking: users never see the bases
  const Tensors means = outputs.head_means.unbind();
  const Tensors losses = outputs.head_losses.unbind();
  const Tensors norms = outputs.head_gradient_norms.unbind();
  const Tensors largest = outputs.max_abs_logit.unbind();
  py::dict per_step, details[3]; // indexed by Detail
  py::dict head_means, head_losses, head_gradient_norms, max_abs_logit;
  for (size_t h = 0; h < means.size(); ++h) {
    const py::object& name = plan.names[h];
    per_step[name] = outputs.per_step[h];
    details[static_cast<size_t>(plan.table[h].detail)][name] = outputs.details[h];
    head_means[name] = means[h];
    head_losses[name] = losses[h];
    if (with_gradient[h]) {
      head_gradient_norms[name] = norms[h];
    }
    if (has_largest_logit(plan.table[h].kind)) {
      max_abs_logit[name] = largest[h];
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

} // namespace

Plan::Plan(py::dict heads, const std::vector<std::string>& head_names, const std::vector<double>& numbers)
    : heads(std::move(heads)), table(head_names, numbers) {
  for (const auto& item : this->heads) {
    names.push_back(py::reinterpret_borrow<py::object>(item.first));
  }
}

std::shared_ptr<Plan> make_plan(
    py::dict heads, const std::vector<std::string>& names, const std::vector<double>& numbers) {
  return {new Plan(std::move(heads), names, numbers), [](Plan* plan) {
            const py::gil_scoped_acquire gil;
            delete plan;
          }};
}

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
  const Outputs outputs = std::exchange(call.outputs, {});
  std::vector<bool> with_gradient;
  for (size_t h = 0; h < plan->table.size(); ++h) {
    with_gradient.push_back(call.wants_head(h));
  }
  if (call.wants_any()) {
    record_call(std::move(call), outputs, plan);
  }
  return outputs_to_python(*plan, outputs, with_gradient);
}

void set_unroll_scale(py::function function) {
  unroll_scale = new py::function(std::move(function));
}

py::dict options_to_python(const Options& options) {
  PythonWriter writer;
  Options::each(options, writer);
  return std::move(writer.options);
}

py::object to_python(const Entries& entries) {
  if (entries.tensors.empty()) {
    return py::none();
  }
  return entries.stacked ? py::cast(entries.tensors[0]) : py::cast(entries.tensors);
}

} // namespace gradscale
