// What a captured step relies on: the contents of dicts, lists and closures, and the memory and flags of tensors. A
// call that replays a graph compares all of it with what was captured, on the host, without waiting for a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace gradscale {

class Guards {
 public:
  // The gradient that a tensor must have before a replay: any, none, or a certain one.
  enum class Gradient : uint8_t { any, none, same };

  // Adds a dict, a list, or the cell of a closure. It must keep its values: the same objects, or equal numbers and
  // strings. Values whose `wanted` is false may change.
  void add_items(pybind11::object items, const std::vector<bool>& wanted, bool has_fixed_size);
  // Adds a tensor: its memory, requires_grad and hooks, as they are now, and the gradient that it must have.
  void add_tensor(pybind11::object tensor, Gradient kind, const std::optional<at::Tensor>& gradient);
  // Adds the gradient that a tensor gets after each replay; none if undefined.
  void add_result(pybind11::object tensor, const std::optional<at::Tensor>& gradient);

  // True if all guards hold.
  bool hold() const;
  // Sets the gradients that tensors get after a replay.
  void set_results() const;
  // The same, after a plain step: moves the values of its gradients there.
  void keep_results() const;

 private:
  struct Items {
    PyObject* container;
    Py_ssize_t size;   // -1: it may change
    size_t begin, end; // of its values in values_
  };
  struct Value {
    Py_ssize_t position; // in the container, as PyDict_Next counts
    PyObject* key;       // null for a list
    PyObject* value;
  };
  struct Memory {
    PyObject* tensor;
    const void* data;
    bool requires_grad;
    size_t hooks;
    Gradient kind;
    at::Tensor gradient;
    bool holds() const;
  };

  // Keeps an object alive as long as the guards.
  PyObject* keep(pybind11::handle object);
  bool holds(const Items& items) const;

  std::vector<pybind11::object> kept_;
  std::vector<Items> items_;
  std::vector<std::pair<PyObject*, Py_ssize_t>> sizes_; // of dicts whose values may change, most of them empty
  std::vector<Value> values_;                           // of all containers
  std::vector<Memory> tensors_;
  std::vector<std::pair<PyObject*, at::Tensor>> results_; // tensors and their gradients
};

void define_guards(pybind11::module_& m);

} // namespace gradscale
