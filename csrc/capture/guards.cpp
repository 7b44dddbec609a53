#include "guards.h"

#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gradscale {

namespace py = pybind11;

namespace {

// Fields are read directly, because PyTorch's accessors are calls into another library.
const torch::autograd::AutogradMeta* autograd_of(const at::Tensor& tensor) {
  return static_cast<torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
}

bool has_gradient(const at::Tensor& tensor, const at::Tensor& gradient) {
  const auto* const autograd = autograd_of(tensor);
  return autograd == nullptr ? !gradient.defined() : autograd->grad_.is_same(gradient);
}

// A hash of the address, sizes, strides, requires_grad and the number of hooks.
uint64_t signature_of(const at::Tensor& tensor) {
  uint64_t signature = 0, factor = 1;
  const auto add = [&](uint64_t value) { signature += value * (factor *= 0x9E3779B97F4A7C15); };
  if (tensor.has_storage()) {
    add(reinterpret_cast<uintptr_t>(tensor.storage().unsafeGetStorageImpl()->data()));
    add(tensor.storage_offset());
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    add(sizes.size());
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      add(sizes[dim]);
      add(strides[dim]);
    }
  }
  if (const auto* const autograd = autograd_of(tensor)) {
    add(autograd->hooks_.size() + (autograd->post_acc_grad_hooks_ != nullptr ? 1 : 0));
    add(autograd->requires_grad_ || autograd->grad_fn_ ? 1 : 0);
  }
  return signature;
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

size_t size_of(PyObject* container) {
  return static_cast<size_t>(PyDict_Check(container) ? PyDict_GET_SIZE(container) : PyList_GET_SIZE(container));
}

bool is_same(PyObject* now, PyObject* then) {
  return now == then || (Py_TYPE(now) == Py_TYPE(then) && (PyFloat_CheckExact(now) || PyLong_CheckExact(now)) &&
                         PyObject_RichCompareBool(now, then, Py_EQ) == 1);
}

struct Guards {
  struct Container {
    py::object object;
    bool is_whole;
    size_t end; // of its items
  };
  struct Item {
    PyObject* key;
    py::object value; // null: the value may change
  };
  struct Gradient {
    py::object tensor;
    at::Tensor gradient; // undefined: none
  };
  std::vector<Container> containers;
  std::vector<Item> items;
  std::vector<std::pair<py::object, uint64_t>> tensors;
  std::vector<Gradient> gradients, results;

  bool hold() const {
    size_t index = 0;
    for (const auto& [object, is_whole, end] : containers) {
      PyObject *key = nullptr, *value = nullptr; // the key stays null in a list
      Py_ssize_t position = 0;
      if (is_whole && size_of(object.ptr()) != end - index) {
        return false;
      }
      for (; index < end; ++index) {
        const auto& [then_key, then] = items[index];
        if (!next_item(object.ptr(), position, key, value) || key != then_key ||
            (then && !is_same(value, then.ptr()))) {
          return false;
        }
      }
    }
    for (const auto& [tensor, signature] : tensors) {
      if (signature_of(THPVariable_Unpack(tensor.ptr())) != signature) {
        return false;
      }
    }
    for (const auto& [tensor, gradient] : gradients) {
      if (!has_gradient(THPVariable_Unpack(tensor.ptr()), gradient)) {
        return false;
      }
    }
    return true;
  }
};

// Adds the first items of a dict or list, all of them or fewer. Values may change where `wanted` is false.
void add_items(Guards& guards, const py::object& container, const std::vector<bool>& wanted) {
  const bool is_whole = size_of(container.ptr()) == wanted.size();
  guards.containers.push_back({container, is_whole, guards.items.size() + wanted.size()});
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  for (const bool is_wanted : wanted) {
    next_item(container.ptr(), position, key, value);
    guards.items.push_back({key, is_wanted ? py::reinterpret_borrow<py::object>(value) : py::object()});
  }
}

// Gives each tensor the gradient that a replay computes.
void set_results(const Guards& guards) {
  for (const auto& [object, gradient] : guards.results) {
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (!has_gradient(tensor, gradient)) {
      tensor.mutable_grad() = gradient;
    }
  }
}

} // namespace

void define_guards(py::module_& m) {
  using OptionalTensor = std::optional<at::Tensor>;
  py::class_<Guards>(m, "Guards")
      .def(py::init<>())
      .def("add_items", &add_items)
      .def(
          "add_tensor",
          [](Guards& guards, const py::object& tensor) {
            guards.tensors.emplace_back(tensor, signature_of(THPVariable_Unpack(tensor.ptr())));
          })
      .def(
          "add_gradient",
          [](Guards& guards, const py::object& tensor, const OptionalTensor& gradient) {
            guards.gradients.push_back({tensor, gradient.value_or(at::Tensor())});
          })
      .def(
          "add_result",
          [](Guards& guards, const py::object& tensor, const OptionalTensor& gradient) {
            guards.results.push_back({tensor, gradient.value_or(at::Tensor())});
          })
      .def("hold", &Guards::hold)
      .def("set_results", &set_results);
}

} // namespace gradscale
