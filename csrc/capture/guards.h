// What a captured step relies on: which objects the dicts and lists of its state hold, and the memory, flags and
// gradients of its tensors. Each call compares them on the host, without waiting for a device.
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
  // Adds the first items of a dict or list, all of them or fewer. They must stay the same objects, or equal numbers,
  // except where `wanted` is false.
  void add_items(const pybind11::object& container, const std::vector<bool>& wanted);
  // Adds a tensor as it is now. If `has_gradient`, its gradient must be this one, or none.
  void add_tensor(const pybind11::object& tensor, bool has_gradient, const std::optional<at::Tensor>& gradient);
  // Adds the gradient that a tensor gets after each replay.
  void add_result(const pybind11::object& tensor, const std::optional<at::Tensor>& gradient);
  bool hold() const;
  void set_results() const;

 private:
  struct Items {
    pybind11::object container;
    bool is_whole;
    std::vector<std::pair<PyObject*, pybind11::object>> values; // keys and values; null: the value may change
    bool hold() const;
  };
  struct Memory {
    pybind11::object tensor;
    const void* data;
    std::vector<int64_t> sizes, strides;
    bool requires_grad;
    size_t hooks;
    bool has_gradient;
    at::Tensor gradient;
    bool hold() const;
  };
  std::vector<Items> items_;
  std::vector<Memory> tensors_;
  std::vector<std::pair<pybind11::object, at::Tensor>> results_;
};

void define_guards(pybind11::module_& m);

} // namespace gradscale
