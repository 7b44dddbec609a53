#include "python_arguments.h"

#include "../host/autograd.h"
#include "../host/tensor_element.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

namespace gradscale {

namespace {

bool read_tensor(py::handle object, at::Tensor& tensor) {
  if (!THPVariable_Check(object.ptr())) {
    return false;
  }
  tensor = THPVariable_Unpack(object.ptr());
  return ordinary_tensor(tensor);
}

// Targets and weights get no gradient.
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
bool read_all_entries(const Plan& plan, py::handle predictions, py::handle targets, Arguments& arguments) {
  const size_t heads = plan.table.size();
  if (!PyDict_Check(predictions.ptr()) || !PyDict_Check(targets.ptr()) ||
      PyDict_Size(predictions.ptr()) != static_cast<Py_ssize_t>(heads)) {
    return false;
  }
  arguments.predictions.resize(heads);
  arguments.targets.resize(heads);
  Py_ssize_t found_targets = 0;
  for (size_t h = 0; h < heads; ++h) {
    PyObject* prediction = PyDict_GetItem(predictions.ptr(), plan.names[h].ptr());
    PyObject* target = PyDict_GetItem(targets.ptr(), plan.names[h].ptr());
    found_targets += target != nullptr ? 1 : 0;
    if (prediction == nullptr || !read_entries(prediction, arguments.predictions[h])) {
      return false;
    }
    std::vector<at::Tensor>& tensors = arguments.targets[h].tensors;
    const bool is_given = target != nullptr && target != Py_None;
    if (is_given &&
        (!read_entries(target, arguments.targets[h]) || std::any_of(tensors.begin(), tensors.end(), requires_grad))) {
      return false;
    }
  }
  return found_targets == PyDict_Size(targets.ptr());
}

// Reads the options, a tuple in the order of Options::each(), and keeps whether all of them were such as the kernels
// take.
class PythonReader {
 public:
  PythonReader(const Plan& plan, py::handle options) : plan_(plan), options_(options.ptr()) {
  }

  bool all_read() const {
    return all_read_;
  }

  template <class Option>
  void operator()(const char*, Option& option) {
    all_read_ = all_read_ && read(PyTuple_GET_ITEM(options_, next_++), option);
  }

 private:
  static bool read(py::handle given, StepNumbers& numbers) {
    if (given.is_none()) {
      return true;
    }
    PyObject* items = given.ptr();
    if (!PyList_Check(items) && !PyTuple_Check(items) && !PyRange_Check(items)) {
      return read_constant(given, numbers.tensor);
    }
    // The reader holds a tuple: an object that is no number of Python's runs code to become one, and may change a list.
    const py::object sequence = py::reinterpret_steal<py::object>(PySequence_Tuple(items));
    const Py_ssize_t count = PyTuple_GET_SIZE(sequence.ptr());
    for (Py_ssize_t k = 0; k < count; ++k) {
      PyObject* item = PyTuple_GET_ITEM(sequence.ptr(), k);
      if (THPVariable_Check(item) && !THPVariable_Unpack(item).is_cpu()) { // its device would be waited for
        return false;
      }
      numbers.numbers.push_back(PyFloat_AsDouble(item));
      if (PyErr_Occurred() != nullptr) { // no number, or an integer too large: Python has the words
        PyErr_Clear();
        return false;
      }
    }
    return count > 0;
  }

  static bool read(py::handle given, GradientScale& scale) {
    if (!PyUnicode_Check(given.ptr())) {
      return read(given, static_cast<StepNumbers&>(scale));
    }
    scale.unroll = PyUnicode_CompareWithASCIIString(given.ptr(), "unroll") == 0;
    return scale.unroll;
  }

  static bool read(py::handle given, at::Tensor& tensor) {
    return given.is_none() || read_constant(given, tensor);
  }

  static bool read_mask(py::handle given, at::Tensor& mask) {
    return read_tensor(given, mask) && mask.scalar_type() == at::kBool;
  }

  // The masks by head, or one for all.
  bool read(py::handle given, std::vector<at::Tensor>& masks) const {
    masks.resize(plan_.table.size());
    if (given.is_none()) {
      return true;
    }
    if (!PyDict_Check(given.ptr())) {
      at::Tensor mask;
      const bool valid = read_mask(given, mask);
      std::fill(masks.begin(), masks.end(), mask);
      return valid;
    }
    Py_ssize_t found = 0;
    for (size_t h = 0; h < masks.size(); ++h) {
      PyObject* mask = PyDict_GetItem(given.ptr(), plan_.names[h].ptr());
      if (mask != nullptr && !read_mask(mask, masks[h])) {
        return false;
      }
      found += mask != nullptr ? 1 : 0;
    }
    return found == PyDict_Size(given.ptr());
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
  PyObject* options_;
  Py_ssize_t next_ = 0;
  bool all_read_ = true;
};

// Raises for a class that the head does not have, which the kernel would make NaN. Classes on a device are not read.
void check_classes(const Plan& plan, size_t h, const Arguments& arguments) {
  const Entries& targets = arguments.targets[h];
  const int64_t first_step = plan.table[h].first_step;
  if (targets.tensors.empty() || !targets.tensors[0].is_cpu()) {
    return;
  }
  const int64_t mask_batch_dim = arguments.batch_dim();
  for (int64_t t = 0; t < arguments.steps - first_step; ++t) {
    const at::Tensor& whole = targets.tensors[targets.stacked ? 0 : t];
    if (whole.scalar_type() != at::kLong) {
      continue;
    }
    const int64_t batch_dim = arguments.batch_dim(targets);
    const int64_t* classes = whole.const_data_ptr<int64_t>() + (targets.stacked ? t * whole.stride(1 - batch_dim) : 0);
    const int64_t number = arguments.predictions[h].tensors[0].size(-1);
    const at::Tensor& mask = arguments.mask[h];
    for (int64_t b = 0; b < arguments.batch; ++b) {
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
          ", but that of sample ",
          b,
          " is ",
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
  static py::object written(const std::vector<at::Tensor>& tensors) {
    py::list list;
    for (const at::Tensor& tensor : tensors) {
      list.append(written(tensor));
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

} // namespace

Plan::Plan(py::dict heads, c10::ArrayRef<std::string> head_names, c10::ArrayRef<double> numbers, bool keeps_memory)
    : heads(std::move(heads)), table(head_names, numbers), gradient_memory(keeps_memory) {
  for (const auto& item : this->heads) {
    names.push_back(py::reinterpret_borrow<py::object>(item.first));
  }
}

std::shared_ptr<Plan> make_plan(
    py::dict heads, const std::vector<std::string>& names, const std::vector<double>& numbers, bool keeps_memory) {
  return {new Plan(std::move(heads), names, numbers, keeps_memory), [](Plan* last) {
            const py::gil_scoped_acquire gil;
            delete last;
          }};
}

std::optional<Arguments> read_arguments(
    const Plan& plan, py::handle predictions, py::handle targets, py::handle options) {
  Arguments arguments;
  PythonReader reader(plan, options);
  if (!ordinary_or_inference_context() || !PyTuple_Check(options.ptr()) ||
      !read_all_entries(plan, predictions, targets, arguments)) {
    return std::nullopt;
  }
  Options::each(arguments, reader);
  if (!reader.all_read() || !arguments.settle(plan.table)) {
    return std::nullopt;
  }
  const bool records = at::GradMode::is_enabled();
  for (size_t h = 0; h < plan.table.size(); ++h) {
    check_classes(plan, h, arguments);
    std::vector<bool>& wants = arguments.wants.emplace_back();
    for (const at::Tensor& prediction : arguments.predictions[h].tensors) {
      wants.push_back(records && prediction.requires_grad());
    }
  }
  return arguments;
}

py::dict options_to_python(const Arguments& arguments) {
  PythonWriter writer;
  Options::each(arguments, writer);
  return std::move(writer.options);
}

py::object to_python(const Entries& entries) {
  if (entries.tensors.empty()) {
    return py::none();
  }
  return entries.stacked ? py::cast(entries.tensors[0]) : py::cast(entries.tensors);
}

} // namespace gradscale
