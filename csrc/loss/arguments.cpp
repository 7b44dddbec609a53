#include "arguments.h"

#include "../host/tensor_element.h"

#include <ATen/core/grad_mode.h>
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

// An entry has `dims` dimensions behind the batch, `width` (-1: any, but the same for all) in the last.
bool check_entry(
    const at::Tensor& tensor, bool stacked, bool batch_first, int64_t batch, int64_t dims, int64_t& width) {
  if (tensor.dim() != (stacked ? 2 : 1) + dims) {
    return false;
  }
  if (dims == 1) {
    width = width < 0 ? tensor.size(-1) : width;
  }
  return tensor.size(stacked && !batch_first ? 1 : 0) == batch && (dims == 0 || tensor.size(-1) == width);
}

bool check_entries(const Entries& entries, bool batch_first, int64_t batch, int64_t dims, int64_t& width) {
  return std::all_of(entries.tensors.begin(), entries.tensors.end(), [&](const at::Tensor& tensor) {
    return check_entry(tensor, entries.stacked, batch_first, batch, dims, width);
  });
}

// A target has the dtype and the dimensions of one of the head's layouts.
bool check_target(const at::Tensor& target, int64_t dims, int64_t prediction_dims, const std::vector<Layout>& layouts) {
  const bool classes = target.scalar_type() == at::kLong;
  if (target.requires_grad() || (!classes && !has_element(target))) {
    return false;
  }
  return std::any_of(layouts.begin(), layouts.end(), [&](const Layout& layout) {
    return layout.classes == classes && layout.prediction_dims == prediction_dims && layout.target_dims == dims;
  });
}

bool check_head(const Plan& plan, size_t h, const Arguments& arguments) {
  const Head& head = plan.table[h];
  const std::vector<Layout>& layouts = plan.layouts[h];
  const Entries& predictions = arguments.predictions[h];
  const Entries& targets = arguments.targets[h];
  const bool batch_first = arguments.batch_first;
  const int64_t steps = arguments.steps - head.first_step;
  const bool has_target = layouts[0].target_dims >= 0;
  if (steps < 1 || count_steps(predictions, batch_first) != steps ||
      (has_target && count_steps(targets, batch_first) != steps) ||
      !std::all_of(
          predictions.tensors.begin(),
          predictions.tensors.end(),
          [](const at::Tensor& tensor) { return has_element(tensor); })) {
    return false;
  }
  const int64_t dims = predictions.tensors[0].dim() - (predictions.stacked ? 2 : 1);
  int64_t width = is_categorical(head.kind) ? head.support.num_bins : -1;
  if (std::none_of(layouts.begin(), layouts.end(), [&](const Layout& l) { return l.prediction_dims == dims; }) ||
      !check_entries(predictions, batch_first, arguments.batch, dims, width) || (dims == 1 && width < 1)) {
    return false;
  }
  return std::all_of(targets.tensors.begin(), targets.tensors.end(), [&](const at::Tensor& target) {
    const int64_t target_dims = target.dim() - (targets.stacked ? 2 : 1);
    return check_target(target, target_dims, dims, layouts) &&
           check_entry(target, targets.stacked, batch_first, arguments.batch, target_dims, width);
  });
}

// A class that is none would be NaN in the kernel; where no device has to be waited for it can be said.
void check_classes(const Plan& plan, size_t h, const Arguments& arguments) {
  const Entries& targets = arguments.targets[h];
  const int64_t first_step = plan.table[h].first_step;
  if (targets.tensors.empty() || !targets.tensors[0].is_cpu()) {
    return;
  }
  for (int64_t t = 0; t < arguments.steps - first_step; ++t) {
    const at::Tensor& whole = targets.tensors[targets.stacked ? 0 : t];
    if (whole.scalar_type() != at::kLong) {
      continue;
    }
    const int64_t batch_dim = targets.stacked ? arguments.batch_dim() : 0;
    const int64_t* classes = whole.const_data_ptr<int64_t>() + (targets.stacked ? t * whole.stride(1 - batch_dim) : 0);
    const int64_t number = arguments.predictions[h].tensors[0].size(-1);
    const at::Tensor& mask = arguments.masks[h];
    for (int64_t b = 0; b < arguments.batch; ++b) {
      const int64_t chosen = classes[b * whole.stride(batch_dim)];
      const bool kept =
          !mask.defined() ||
          mask.const_data_ptr<bool>()
              [b * mask.stride(arguments.batch_dim()) + (t + first_step) * mask.stride(1 - arguments.batch_dim())];
      TORCH_CHECK_VALUE(
          !kept || (chosen >= 0 && chosen < number),
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

bool is_of_samples_and_steps(const at::Tensor& tensor, const Arguments& arguments) {
  return tensor.dim() == 2 && tensor.size(arguments.batch_dim()) == arguments.batch &&
         tensor.size(1 - arguments.batch_dim()) == arguments.steps;
}

bool read_step_numbers(py::handle object, const Arguments& arguments, StepNumbers& out) {
  if (object.is_none()) {
    return true;
  }
  PyObject* items = object.ptr();
  if (PyList_Check(items) || PyTuple_Check(items) || PyRange_Check(items)) {
    // A tuple of its own: what is no number of Python's runs code to become one, which may change the list.
    const py::object sequence = py::reinterpret_steal<py::object>(PySequence_Tuple(items));
    const Py_ssize_t count = PyTuple_GET_SIZE(sequence.ptr());
    for (Py_ssize_t k = 0; k < count; ++k) {
      // Of Python, of NumPy, or a tensor of one number, for which no device is waited for.
      PyObject* item = PyTuple_GET_ITEM(sequence.ptr(), k);
      if (THPVariable_Check(item) && !THPVariable_Unpack(item).is_cpu()) {
        return false;
      }
      out.numbers.push_back(PyFloat_AsDouble(item));
      if (PyErr_Occurred() != nullptr) { // no number, or an integer too large: Python has the words
        PyErr_Clear();
        return false;
      }
    }
    return count == arguments.steps;
  }
  if (!read_tensor(object, out.tensor) || out.tensor.requires_grad() || !has_element(out.tensor)) {
    return false;
  }
  return out.tensor.sizes() == at::IntArrayRef({arguments.steps}) || is_of_samples_and_steps(out.tensor, arguments);
}

bool on_device(const at::Tensor& tensor, c10::Device device) {
  return !tensor.defined() || tensor.device() == device;
}

bool on_device(const std::vector<at::Tensor>& tensors, c10::Device device) {
  return std::all_of(
      tensors.begin(), tensors.end(), [=](const at::Tensor& tensor) { return on_device(tensor, device); });
}

} // namespace

bool on_one_device(const Arguments& arguments) {
  const c10::Device device = arguments.predictions[0].tensors[0].device();
  const auto entries_are = [=](const std::vector<Entries>& of_heads) {
    return std::all_of(
        of_heads.begin(), of_heads.end(), [=](const Entries& entries) { return on_device(entries.tensors, device); });
  };
  return entries_are(arguments.predictions) && entries_are(arguments.targets) && on_device(arguments.masks, device) &&
         on_device(arguments.step_weights.tensor, device) && on_device(arguments.step_gradient_scale.tensor, device) &&
         on_device(arguments.importance_weights, device);
}

namespace {

bool read_mask(py::handle object, const Arguments& arguments, at::Tensor& mask) {
  return read_tensor(object, mask) && mask.scalar_type() == at::kBool && is_of_samples_and_steps(mask, arguments);
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

} // namespace

int64_t count_steps(const Entries& entries, bool batch_first) {
  if (!entries.stacked) {
    return static_cast<int64_t>(entries.tensors.size());
  }
  const at::Tensor& tensor = entries.tensors[0];
  return tensor.dim() < 2 ? 0 : tensor.size(batch_first ? 1 : 0);
}

bool Arguments::wants_any() const {
  return std::any_of(wants.begin(), wants.end(), [](const std::vector<bool>& of_head) {
    return std::find(of_head.begin(), of_head.end(), true) != of_head.end();
  });
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
      PyDict_Size(predictions.ptr()) != static_cast<Py_ssize_t>(heads)) {
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
  Py_ssize_t found_targets = 0;
  for (size_t h = 0; h < heads; ++h) {
    PyObject* prediction = PyDict_GetItem(predictions.ptr(), plan.names[h].ptr());
    PyObject* target = PyDict_GetItem(targets.ptr(), plan.names[h].ptr());
    found_targets += target != nullptr ? 1 : 0;
    const bool has_target = plan.layouts[h][0].target_dims >= 0;
    if (prediction == nullptr || !read_entries(prediction, arguments.predictions[h]) ||
        has_target != (target != nullptr && target != Py_None) ||
        (has_target && !read_entries(target, arguments.targets[h]))) {
      return std::nullopt;
    }
    const int64_t steps = plan.table[h].first_step + count_steps(arguments.predictions[h], batch_first);
    arguments.steps = std::max(arguments.steps, steps);
  }
  if (found_targets != PyDict_Size(targets.ptr())) {
    return std::nullopt;
  }
  const Entries& first = arguments.predictions[0];
  const int64_t batch_dim = first.stacked && !batch_first ? 1 : 0;
  if (first.tensors[0].dim() <= batch_dim) {
    return std::nullopt;
  }
  arguments.batch = first.tensors[0].size(batch_dim);
  for (size_t h = 0; h < heads; ++h) {
    if (!check_head(plan, h, arguments)) {
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
  if (!on_one_device(arguments)) {
    return std::nullopt;
  }
  const bool records = at::GradMode::is_enabled();
  for (size_t h = 0; h < heads; ++h) {
    check_classes(plan, h, arguments);
    std::vector<bool>& wants = arguments.wants.emplace_back();
    for (const at::Tensor& prediction : arguments.predictions[h].tensors) {
      wants.push_back(records && prediction.requires_grad());
    }
  }
  return arguments;
}

} // namespace gradscale
