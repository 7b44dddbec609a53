#include "guards.h"

#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace gradscale {

namespace py = pybind11;

namespace {

// Fields are read directly, because PyTorch's accessors are calls into another library.
const torch::autograd::AutogradMeta* autograd_of(const at::Tensor& tensor) {
  return static_cast<torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
}

bool has_gradient(const at::Tensor& tensor, const std::optional<at::Tensor>& gradient) {
  const auto* const autograd = autograd_of(tensor);
  const bool has_one = autograd != nullptr && autograd->grad_.defined();
  return gradient ? has_one && autograd->grad_.is_same(*gradient) : !has_one;
}

// Visits the address, offset, sizes, strides, number of hooks and requires_grad. Ends if a visit returns false.
template <typename Visit>
bool visit_layout(const at::Tensor& tensor, Visit visit) {
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (storage) {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    if (!visit(reinterpret_cast<intptr_t>(storage.unsafeGetStorageImpl()->data())) || !visit(tensor.storage_offset()) ||
        !visit(static_cast<int64_t>(sizes.size()))) {
      return false;
    }
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      if (!visit(sizes[dim]) || !visit(strides[dim])) {
        return false;
      }
    }
  }
  const auto* const autograd = autograd_of(tensor);
  return autograd == nullptr ? visit(-1)
                             : visit(autograd->hooks_.size() + (autograd->post_acc_grad_hooks_ != nullptr ? 1 : 0)) &&
                                   visit(autograd->requires_grad_ || autograd->grad_fn_ ? 1 : 0);
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

// A number that changes with each change of a dict; 0 if it is not known.
uint64_t version_of(PyObject* container) {
#if PY_VERSION_HEX < 0x030C0000
  return PyDict_Check(container) ? reinterpret_cast<PyDictObject*>(container)->ma_version_tag : 0;
#else
  return 0; // Python 3.12 deprecates it
#endif
}

bool is_same(PyObject* now, PyObject* then) {
  return now == then || (Py_TYPE(now) == Py_TYPE(then) && (PyFloat_CheckExact(now) || PyLong_CheckExact(now)) &&
                         PyObject_RichCompareBool(now, then, Py_EQ) == 1);
}

using Containers = std::vector<std::pair<py::object, std::vector<bool>>>; // dicts and lists
// Tensors, with the gradient that each has, or that a replay computes.
using Gradients = std::vector<std::pair<py::object, std::optional<at::Tensor>>>;

class Guards {
 public:
  // Of containers, the first items are compared, all of them or fewer. Values may change where the flag is false.
  Guards(const Containers& containers, std::vector<py::object> tensors, Gradients gradients, Gradients results)
      : tensors_(std::move(tensors)), gradients_(std::move(gradients)), results_(std::move(results)) {
    for (const auto& [container, wanted] : containers) {
      const bool is_whole = size_of(container.ptr()) == wanted.size();
      containers_.push_back({container, is_whole, items_.size() + wanted.size(), version_of(container.ptr())});
      Py_ssize_t position = 0;
      PyObject *key = nullptr, *value = nullptr; // the key stays null in a list
      for (const bool is_wanted : wanted) {
        next_item(container.ptr(), position, key, value);
        items_.emplace_back(key, is_wanted ? py::reinterpret_borrow<py::object>(value) : py::object());
      }
    }
    for (const auto& tensor : tensors_) {
      visit_layout(THPVariable_Unpack(tensor.ptr()), [this](int64_t number) {
        layouts_.push_back(number);
        return true;
      });
    }
  }

  bool hold() {
    size_t index = 0;
    for (auto& [object, is_whole, end, version] : containers_) {
      const uint64_t now = version_of(object.ptr());
      if (now != 0 && now == version) {
        index = end;
        continue;
      }
      PyObject *key = nullptr, *value = nullptr;
      Py_ssize_t position = 0;
      if (is_whole && size_of(object.ptr()) != end - index) {
        return false;
      }
      for (; index < end; ++index) {
        const auto& [then_key, then] = items_[index];
        if (!next_item(object.ptr(), position, key, value) || key != then_key ||
            (then && !is_same(value, then.ptr()))) {
          return false;
        }
      }
      version = now;
    }
    const int64_t* then = layouts_.data();
    const auto is_as_then = [&then](int64_t number) { return number == *then++; };
    for (const auto& tensor : tensors_) {
      if (!visit_layout(THPVariable_Unpack(tensor.ptr()), is_as_then)) {
        return false;
      }
    }
    for (const auto& [tensor, gradient] : gradients_) {
      if (!has_gradient(THPVariable_Unpack(tensor.ptr()), gradient)) {
        return false;
      }
    }
    return true;
  }

  // Gives each tensor the gradient that a replay computes.
  void set_results() const {
    for (const auto& [object, gradient] : results_) {
      const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
      if (!has_gradient(tensor, gradient)) {
        tensor.mutable_grad() = gradient.value_or(at::Tensor());
      }
    }
  }

 private:
  struct Container {
    py::object object;
    bool is_whole;
    size_t end; // of its items
    uint64_t version;
  };
  std::vector<Container> containers_;
  std::vector<std::pair<PyObject*, py::object>> items_; // keys and values; null: the value may change
  std::vector<py::object> tensors_;
  std::vector<int64_t> layouts_; // of the tensors
  Gradients gradients_, results_;
};

} // namespace

void define_guards(py::module_& m) {
  py::class_<Guards>(m, "Guards")
      .def(py::init<Containers, std::vector<py::object>, Gradients, Gradients>())
      .def("hold", &Guards::hold)
      .def("set_results", &Guards::set_results);
}

} // namespace gradscale
