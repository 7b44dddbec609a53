#include "guards.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>

namespace gradscale {

namespace py = pybind11;

namespace {

// True for the same object, or an equal number or string of the same type.
bool is_same(PyObject* now, PyObject* then) {
  if (now == then) {
    return true;
  }
  const bool has_value = PyFloat_CheckExact(now) || PyLong_CheckExact(now) || PyUnicode_CheckExact(now);
  if (!has_value || Py_TYPE(now) != Py_TYPE(then)) {
    return false;
  }
  const bool are_nan =
      PyFloat_CheckExact(now) && std::isnan(PyFloat_AS_DOUBLE(now)) && std::isnan(PyFloat_AS_DOUBLE(then));
  return are_nan || PyObject_RichCompareBool(now, then, Py_EQ) == 1;
}

Py_ssize_t size_of(PyObject* container) {
  return PyDict_Check(container)   ? PyDict_GET_SIZE(container)
         : PyList_Check(container) ? PyList_GET_SIZE(container)
                                   : 1;
}

// The value at a position of a dict, as PyDict_Next counts, of a list, or in a cell; null if there is none. Moves the
// position to the next value.
PyObject* value_at(PyObject* container, Py_ssize_t& position, PyObject*& key) {
  PyObject* value = nullptr;
  if (PyDict_Check(container)) {
    return PyDict_Next(container, &position, &key, &value) != 0 ? value : nullptr;
  }
  if (PyList_Check(container)) {
    return position < PyList_GET_SIZE(container) ? PyList_GET_ITEM(container, position++) : nullptr;
  }
  return PyCell_GET(container);
}

// The address of a tensor's memory; null for tensors without their own memory.
const void* memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()->data() : nullptr;
}

// The autograd metadata of a tensor; null if it has none yet. Fields are read directly, because PyTorch's accessors are
// calls into another library.
const torch::autograd::AutogradMeta* autograd_of(const at::Tensor& tensor) {
  return static_cast<torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
}

size_t count_hooks(const torch::autograd::AutogradMeta* autograd) {
  return autograd == nullptr ? 0 : autograd->hooks_.size() + (autograd->post_acc_grad_hooks_ != nullptr ? 1 : 0);
}

// The gradient of a leaf.
const at::Tensor& gradient_of(const torch::autograd::AutogradMeta* autograd) {
  static const at::Tensor none;
  return autograd == nullptr ? none : autograd->grad_;
}

} // namespace

PyObject* Guards::keep(py::handle object) {
  kept_.push_back(py::reinterpret_borrow<py::object>(object));
  return object.ptr();
}

void Guards::add_items(py::object items, const std::vector<bool>& wanted, bool has_fixed_size) {
  PyObject* const container = keep(items);
  const size_t begin = values_.size();
  Py_ssize_t position = 0;
  for (const bool is_wanted : wanted) {
    Value own{position, nullptr, nullptr};
    own.value = value_at(container, position, own.key);
    if (is_wanted && own.value != nullptr) {
      keep(own.value);
      if (own.key != nullptr) {
        keep(own.key);
      }
      values_.push_back(own);
    }
  }
  const Py_ssize_t size = has_fixed_size ? size_of(container) : -1;
  if (PyDict_Check(container) && values_.size() == begin) {
    if (size >= 0) {
      sizes_.emplace_back(container, size);
    }
    return;
  }
  items_.push_back({container, size, begin, values_.size()});
}

void Guards::add_tensor(py::object tensor, Gradient kind, const std::optional<at::Tensor>& gradient) {
  const at::Tensor& own = THPVariable_Unpack(tensor.ptr());
  tensors_.push_back(
      {keep(tensor),
       memory_of(own),
       own.requires_grad(),
       count_hooks(autograd_of(own)),
       kind,
       gradient.value_or(at::Tensor())});
}

void Guards::add_result(py::object tensor, const std::optional<at::Tensor>& gradient) {
  results_.emplace_back(keep(tensor), gradient.value_or(at::Tensor()));
}

bool Guards::holds(const Items& items) const {
  PyObject* const container = items.container;
  if (items.size >= 0 && size_of(container) != items.size) {
    return false;
  }
  const bool is_dict = PyDict_Check(container);
  for (size_t i = items.begin; i != items.end; ++i) {
    const Value& then = values_[i];
    Py_ssize_t position = then.position;
    PyObject *key = nullptr, *value = nullptr;
    if (is_dict) { // nearly all of them
      PyDict_Next(container, &position, &key, &value);
    } else {
      value = value_at(container, position, key);
    }
    if (value == nullptr || key != then.key || !is_same(value, then.value)) {
      return false;
    }
  }
  return true;
}

bool Guards::Memory::holds() const {
  const at::Tensor& own = THPVariable_Unpack(tensor);
  const auto* const autograd = autograd_of(own);
  if (memory_of(own) != data || own.requires_grad() != requires_grad || count_hooks(autograd) != hooks) {
    return false;
  }
  switch (kind) {
    case Gradient::any:
      return true;
    case Gradient::none:
      return !gradient_of(autograd).defined();
    case Gradient::same:
      return gradient_of(autograd).is_same(gradient);
  }
  return false;
}

bool Guards::hold() const {
  for (const auto& [dict, size] : sizes_) {
    if (PyDict_GET_SIZE(dict) != size) {
      return false;
    }
  }
  return std::all_of(items_.begin(), items_.end(), [this](const Items& items) { return holds(items); }) &&
         std::all_of(tensors_.begin(), tensors_.end(), [](const Memory& tensor) { return tensor.holds(); });
}

void Guards::set_results() const {
  for (const auto& [tensor, gradient] : results_) {
    const at::Tensor& own = THPVariable_Unpack(tensor);
    if (!gradient_of(autograd_of(own)).is_same(gradient)) {
      own.mutable_grad() = gradient;
    }
  }
}

void Guards::keep_results() const {
  const at::NoGradGuard no_grad;
  for (const auto& [tensor, gradient] : results_) {
    const at::Tensor& own = THPVariable_Unpack(tensor);
    const at::Tensor& now = own.grad();
    if (now.defined() && gradient.defined() && !now.is_same(gradient) && now.sizes() == gradient.sizes() &&
        now.layout() == gradient.layout() && now.scalar_type() == gradient.scalar_type()) {
      gradient.copy_(now);
      own.mutable_grad() = gradient;
    }
  }
}

void define_guards(py::module_& m) {
  py::enum_<Guards::Gradient>(m, "Gradient")
      .value("any", Guards::Gradient::any)
      .value("none", Guards::Gradient::none)
      .value("same", Guards::Gradient::same);
  py::class_<Guards>(m, "Guards")
      .def(py::init<>())
      .def("add_items", &Guards::add_items)
      .def("add_tensor", &Guards::add_tensor)
      .def("add_result", &Guards::add_result)
      .def("hold", &Guards::hold)
      .def("set_results", &Guards::set_results)
      .def("keep_results", &Guards::keep_results);
}

} // namespace gradscale
