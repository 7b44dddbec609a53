#include "guards.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
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

const torch::autograd::AutogradMeta* autograd_of(const at::TensorImpl& tensor) {
  return static_cast<const torch::autograd::AutogradMeta*>(tensor.autograd_meta());
}

bool has_gradient(const at::Tensor& tensor, const std::optional<at::Tensor>& gradient) {
  const auto* const autograd = autograd_of(*tensor.unsafeGetTensorImpl());
  const bool has_one = autograd != nullptr && autograd->grad_.defined();
  return gradient ? has_one && autograd->grad_.is_same(*gradient) : !has_one;
}

// A tensor's memory, sizes, strides, number of hooks and requires_grad, as they were. The parts that PyTorch makes a
// tensor of are kept by their addresses, so that a processor reads all of them at once, and not one after another. A
// part is read only while the tensor still refers to it.
class SavedTensor {
 public:
  explicit SavedTensor(py::object tensor) : object_(std::move(tensor)), tensor_(now()) {
    storage_ = tensor_->unsafe_storage().unsafeGetStorageImpl();
    autograd_ = autograd_of(*tensor_);
    if (storage_ != nullptr) {
      data_ = storage_->data();
      offset_ = tensor_->storage_offset();
      for (const at::IntArrayRef numbers : {tensor_->sizes(), tensor_->strides()}) {
        layout_.insert(layout_.end(), numbers.begin(), numbers.end());
      }
    }
    if (autograd_ != nullptr) {
      requires_grad_ = requires_grad();
      num_hooks_ = num_hooks();
    }
  }

  bool is_as_then() const {
    return now() == tensor_ && tensor_->unsafe_storage().unsafeGetStorageImpl() == storage_ &&
           (storage_ == nullptr || has_layout()) && autograd_of(*tensor_) == autograd_ &&
           (autograd_ == nullptr || (requires_grad() == requires_grad_ && num_hooks() == num_hooks_));
  }

 private:
  const at::TensorImpl* now() const {
    return THPVariable_Unpack(object_.ptr()).unsafeGetTensorImpl();
  }
  bool has_layout() const {
    const at::IntArrayRef sizes = tensor_->sizes(), strides = tensor_->strides();
    bool is_same =
        storage_->data() == data_ && tensor_->storage_offset() == offset_ && 2 * sizes.size() == layout_.size();
    for (size_t dim = 0; is_same && dim < sizes.size(); ++dim) {
      is_same = sizes[dim] == layout_[dim] && strides[dim] == layout_[sizes.size() + dim];
    }
    return is_same;
  }
  bool requires_grad() const {
    return autograd_->requires_grad_ || autograd_->grad_fn_;
  }
  size_t num_hooks() const {
    return autograd_->hooks_.size() + (autograd_->post_acc_grad_hooks_ != nullptr ? 1 : 0);
  }

  py::object object_;
  const at::TensorImpl* tensor_;
  const c10::StorageImpl* storage_; // null: the tensor has no memory of its own
  const void* data_ = nullptr;
  int64_t offset_ = 0;
  c10::SmallVector<int64_t, 8> layout_;           // sizes, then strides
  const torch::autograd::AutogradMeta* autograd_; // null, if nothing about gradients was ever set
  size_t num_hooks_ = 0;
  bool requires_grad_ = false;
};

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
  Guards(const Containers& containers, const std::vector<py::object>& tensors, Gradients gradients, Gradients results)
      : tensors_(tensors.begin(), tensors.end()), gradients_(std::move(gradients)), results_(std::move(results)) {
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
    for (const SavedTensor& tensor : tensors_) {
      if (!tensor.is_as_then()) {
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
  std::vector<SavedTensor> tensors_;
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
