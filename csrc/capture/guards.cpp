#include "guards.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

namespace gradscale {

namespace py = pybind11;

namespace {

// Fields are read directly, because PyTorch's accessors are calls into another library.
const torch::autograd::AutogradMeta* autograd_of(const at::Tensor& tensor) {
  return static_cast<torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
}

const at::Tensor& gradient_of(const at::Tensor& tensor) {
  static const at::Tensor none;
  const auto* const autograd = autograd_of(tensor);
  return autograd == nullptr ? none : autograd->grad_;
}

size_t count_hooks(const at::Tensor& tensor) {
  const auto* const autograd = autograd_of(tensor);
  return autograd == nullptr ? 0 : autograd->hooks_.size() + (autograd->post_acc_grad_hooks_ != nullptr ? 1 : 0);
}

// The address of the first element; null for tensors without their own memory.
const void* data_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return nullptr;
  }
  const auto* const begin = static_cast<const char*>(tensor.storage().unsafeGetStorageImpl()->data());
  return begin + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
}

bool is_same(PyObject* now, PyObject* then) {
  return now == then || (Py_TYPE(now) == Py_TYPE(then) && (PyFloat_CheckExact(now) || PyLong_CheckExact(now)) &&
                         PyObject_RichCompareBool(now, then, Py_EQ) == 1);
}

// Moves to the next item of a dict or list; false at the end.
bool next_item(PyObject* container, Py_ssize_t& position, PyObject*& key, PyObject*& value) {
  if (PyDict_Check(container)) {
    return PyDict_Next(container, &position, &key, &value) != 0;
  }
  const bool has_next = position < PyList_GET_SIZE(container);
  value = has_next ? PyList_GET_ITEM(container, position++) : nullptr;
  return has_next;
}

} // namespace

void Guards::add_items(const py::object& container, const std::vector<bool>& wanted) {
  Items added{container, static_cast<size_t>(py::len(container)) == wanted.size(), {}};
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  for (const bool is_wanted : wanted) {
    next_item(container.ptr(), position, key, value);
    added.values.emplace_back(key, is_wanted ? py::reinterpret_borrow<py::object>(value) : py::object());
  }
  items_.push_back(std::move(added));
}

void Guards::add_tensor(const py::object& tensor, bool has_gradient, const std::optional<at::Tensor>& gradient) {
  const at::Tensor& own = THPVariable_Unpack(tensor.ptr());
  tensors_.push_back(
      {tensor,
       data_of(own),
       own.sizes().vec(),
       own.strides().vec(),
       own.requires_grad(),
       count_hooks(own),
       has_gradient,
       gradient.value_or(at::Tensor())});
}

void Guards::add_result(const py::object& tensor, const std::optional<at::Tensor>& gradient) {
  results_.emplace_back(tensor, gradient.value_or(at::Tensor()));
}

bool Guards::Items::hold() const {
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  for (const auto& [then_key, then] : values) {
    if (!next_item(container.ptr(), position, key, value) || key != then_key || (then && !is_same(value, then.ptr()))) {
      return false;
    }
  }
  return !is_whole || !next_item(container.ptr(), position, key, value);
}

bool Guards::Memory::hold() const {
  const at::Tensor& own = THPVariable_Unpack(tensor.ptr());
  return data_of(own) == data && own.sizes() == sizes && own.strides() == strides &&
         own.requires_grad() == requires_grad && count_hooks(own) == hooks &&
         (!has_gradient || gradient_of(own).is_same(gradient));
}

bool Guards::hold() const {
  const auto holds = [](const auto& one) { return one.hold(); };
  return std::all_of(items_.begin(), items_.end(), holds) && std::all_of(tensors_.begin(), tensors_.end(), holds);
}

void Guards::set_results() const {
  for (const auto& [tensor, gradient] : results_) {
    const at::Tensor& own = THPVariable_Unpack(tensor.ptr());
    if (!gradient_of(own).is_same(gradient)) {
      own.mutable_grad() = gradient;
    }
  }
}

void define_guards(py::module_& m) {
  py::class_<Guards>(m, "Guards")
      .def(py::init<>())
      .def("add_items", &Guards::add_items)
      .def("add_tensor", &Guards::add_tensor)
      .def("add_result", &Guards::add_result)
      .def("hold", &Guards::hold)
      .def("set_results", &Guards::set_results);
}

} // namespace gradscale
