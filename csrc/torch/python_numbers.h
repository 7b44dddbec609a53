// Numbers of Python, of NumPy, and of any other type that Python's module `numbers` knows.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>

namespace gradscale {

// True if a call of Python's C API failed. Clears the error: the checks in Python raise one that names the argument.
inline bool failed() {
  if (PyErr_Occurred() == nullptr) {
    return false;
  }
  PyErr_Clear();
  return true;
}

// True for an instance of a class of the module `numbers`. False for a bool, and for an array, although it may be
// convertible to a number.
inline bool is_number(pybind11::handle given, const char* kind) {
  return !PyBool_Check(given.ptr()) && pybind11::isinstance(given, pybind11::module_::import("numbers").attr(kind));
}

inline bool is_real(pybind11::handle given) {
  return PyFloat_Check(given.ptr()) || PyLong_CheckExact(given.ptr()) || is_number(given, "Real");
}

inline std::optional<double> real_number(pybind11::handle given) {
  if (PyFloat_CheckExact(given.ptr())) {
    return PyFloat_AS_DOUBLE(given.ptr());
  }
  if (!is_real(given)) {
    return std::nullopt;
  }
  const double number = PyFloat_AsDouble(given.ptr());
  return failed() ? std::nullopt : std::optional<double>(number);
}

// Nothing if the number is beyond int64.
inline std::optional<int64_t> integer_number(pybind11::handle given) {
  if (!PyLong_CheckExact(given.ptr()) && !is_number(given, "Integral")) {
    return std::nullopt;
  }
  int overflow = 0;
  const auto index = pybind11::reinterpret_steal<pybind11::object>(PyNumber_Index(given.ptr()));
  const int64_t number = index ? PyLong_AsLongLongAndOverflow(index.ptr(), &overflow) : 0;
  return failed() || overflow != 0 ? std::nullopt : std::optional<int64_t>(number);
}

} // namespace gradscale
