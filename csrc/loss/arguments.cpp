#include "arguments.h"

#include "../tensor_element.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace gradscale {

namespace {

bool read_tensor(py::handle object, at::Tensor& tensor) {
  if (!THPVariable_Check(object.ptr())) {
    return false;
  }
  tensor = THPVariable_Unpack(object.ptr());
  return ordinary_tensor(tensor);
}

bool read_entries(py::handle object, Entries& entries) {
  PyObject* items = object.ptr();
  if (!PyList_Check(items) && !PyTuple_Check(items)) {
    entries.stacked = true;
    entries.tensors.resize(1);
    return read_tensor(object, entries.tensors[0]);
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

int64_t count_steps(const Entries& entries, bool batch_first) {
  if (!entries.stacked) {
    return static_cast<int64_t>(entries.tensors.size());
  }
  const at::Tensor& tensor = entries.tensors[0];
  return tensor.dim() < 2 ? 0 : tensor.size(batch_first ? 1 : 0);
}

// Every entry has `dims` dimensions behind the batch, `width` (-1: any, but the same) in the last.
bool check_entries(const Entries& entries, bool batch_first, int64_t batch, int64_t dims, int64_t& width) {
  const int64_t leading = entries.stacked ? 2 : 1;
  return std::all_of(entries.tensors.begin(), entries.tensors.end(), [&](const at::Tensor& tensor) {
    if (tensor.dim() != leading + dims) {
      return false;
    }
    const int64_t batch_dim = entries.stacked && !batch_first ? 1 : 0;
    if (dims == 1) {
      width = width < 0 ? tensor.size(-1) : width;
    }
    return tensor.size(batch_dim) == batch && (dims == 0 || tensor.size(-1) == width);
  });
}

bool check_head(const Head& head, const Arguments& arguments, const Entries& predictions, const Entries& targets) {
  const bool batch_first = arguments.batch_first;
  const int64_t steps = arguments.steps - head.first_step;
  if (count_steps(predictions, batch_first) != steps || count_steps(targets, batch_first) != steps) {
    return false;
  }
  for (const Entries* entries : {&predictions, &targets}) {
    if (!std::all_of(entries->tensors.begin(), entries->tensors.end(), [](const at::Tensor& tensor) {
          return has_element(tensor);
        })) {
      return false;
    }
  }
  for (const at::Tensor& target : targets.tensors) {
    if (target.requires_grad()) {
      return false;
    }
  }
  int64_t width = -1;
  int64_t dims = 1;
  int64_t target_dims = 1;
  switch (head.kind) {
    case Kind::two_hot:
      width = head.support.num_bins;
      target_dims = 0;
      break;
    case Kind::soft_cross_entropy:
      break;
    case Kind::mean_squared_error:
      dims = target_dims = predictions.tensors[0].dim() - (predictions.stacked ? 2 : 1);
      break;
  }
  return dims >= 0 && dims <= 1 && check_entries(predictions, batch_first, arguments.batch, dims, width) &&
         (dims == 0 || width > 0) && check_entries(targets, batch_first, arguments.batch, target_dims, width);
}

bool read_step_numbers(py::handle object, const Arguments& arguments, StepNumbers& out) {
  if (object.is_none()) {
    return true;
  }
  PyObject* items = object.ptr();
  if (PyList_Check(items) || PyTuple_Check(items)) {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    for (Py_ssize_t k = 0; k < count; ++k) {
      PyObject* item = PySequence_Fast_GET_ITEM(items, k);
      if (!PyFloat_Check(item) && !PyLong_Check(item)) {
        return false;
      }
      out.numbers.push_back(PyFloat_AsDouble(item));
      if (PyErr_Occurred() != nullptr) { // an integer too large: Python has the words
        PyErr_Clear();
        return false;
      }
    }
    return count == arguments.steps;
  }
  if (!read_tensor(object, out.tensor) || out.tensor.requires_grad() || !has_element(out.tensor)) {
    return false;
  }
  const auto sizes = out.tensor.sizes();
  return sizes == at::IntArrayRef({arguments.steps}) || sizes == at::IntArrayRef({arguments.batch, arguments.steps});
}

bool read_mask(py::handle object, const Arguments& arguments, at::Tensor& mask) {
  return read_tensor(object, mask) && mask.scalar_type() == at::kBool &&
         mask.sizes() == at::IntArrayRef({arguments.batch, arguments.steps});
}

bool read_masks(const Plan& plan, py::handle object, Arguments& arguments) {
  arguments.masks.resize(plan.table.size());
  if (object.is_none()) {
    return true;
  }
  if (!PyDict_Check(object.ptr())) {
    at::Tensor mask;
    const bool valid = read_mask(object, arguments, mask);
    std::fill(arguments.masks.begin(), arguments.masks.end(), mask);
    return valid;
  }
  Py_ssize_t found = 0;
  for (size_t h = 0; h < plan.names.size(); ++h) {
    PyObject* mask = PyDict_GetItem(object.ptr(), plan.names[h].ptr());
    if (mask != nullptr) {
      ++found;
      if (!read_mask(mask, arguments, arguments.masks[h])) {
        return false;
      }
    }
  }
  return found == PyDict_Size(object.ptr());
}

// "unroll": 1 for the root and 1/K after.
bool read_gradient_scale(py::handle object, const Arguments& arguments, StepNumbers& out) {
  if (!PyUnicode_Check(object.ptr())) {
    return read_step_numbers(object, arguments, out);
  }
  if (PyUnicode_CompareWithASCIIString(object.ptr(), "unroll") != 0) {
    return false;
  }
  out.numbers.assign(arguments.steps, 1.0 / static_cast<double>(std::max<int64_t>(arguments.steps - 1, 1)));
  out.numbers[0] = 1.0;
  return true;
}

std::optional<Reduction> read_reduction(const std::string& reduction) {
  if (reduction == "mean") {
    return Reduction::mean;
  }
  if (reduction == "sum") {
    return Reduction::sum;
  }
  if (reduction == "none") {
    return Reduction::none;
  }
  if (reduction == "valid_mean") {
    return Reduction::valid_mean;
  }
  return std::nullopt;
}

} // namespace

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
    bool batch_first) {
  const size_t heads = plan.table.size();
  if (!ordinary_context() || !PyDict_Check(predictions.ptr()) || !PyDict_Check(targets.ptr()) ||
      PyDict_Size(predictions.ptr()) != static_cast<Py_ssize_t>(heads) ||
      PyDict_Size(targets.ptr()) != static_cast<Py_ssize_t>(heads)) {
    return std::nullopt;
  }
  Arguments arguments;
  arguments.batch_first = batch_first;
  arguments.skip_nonfinite = nonfinite == "skip";
  const auto kind_of_reduction = read_reduction(reduction);
  if (!kind_of_reduction || (nonfinite != "skip" && nonfinite != "propagate")) {
    return std::nullopt;
  }
  arguments.reduction = *kind_of_reduction;
  arguments.predictions.resize(heads);
  arguments.targets.resize(heads);
  for (size_t h = 0; h < heads; ++h) {
    PyObject* prediction = PyDict_GetItem(predictions.ptr(), plan.names[h].ptr());
    PyObject* target = PyDict_GetItem(targets.ptr(), plan.names[h].ptr());
    if (prediction == nullptr || target == nullptr || !read_entries(prediction, arguments.predictions[h]) ||
        !read_entries(target, arguments.targets[h])) {
      return std::nullopt;
    }
    const int64_t steps = plan.table[h].first_step + count_steps(arguments.predictions[h], batch_first);
    arguments.steps = std::max(arguments.steps, steps);
  }
  const Entries& first = arguments.predictions[0];
  const int64_t batch_dim = first.stacked && !batch_first ? 1 : 0;
  if (first.tensors[0].dim() <= batch_dim) {
    return std::nullopt;
  }
  arguments.batch = first.tensors[0].size(batch_dim);
  for (size_t h = 0; h < heads; ++h) {
    if (!check_head(plan.table[h], arguments, arguments.predictions[h], arguments.targets[h])) {
      return std::nullopt;
    }
  }
  if (!read_step_numbers(step_weights, arguments, arguments.step_weights) ||
      !read_gradient_scale(step_gradient_scale, arguments, arguments.step_gradient_scale) ||
      !read_masks(plan, mask, arguments)) {
    return std::nullopt;
  }
  if (!importance_weights.is_none()) {
    at::Tensor& weights = arguments.importance_weights;
    if (!read_tensor(importance_weights, weights) || weights.requires_grad() || !has_element(weights) ||
        weights.sizes() != at::IntArrayRef({arguments.batch})) {
      return std::nullopt;
    }
  }
  return arguments;
}

} // namespace gradscale
