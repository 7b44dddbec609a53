#pragma once

#include <pybind11/pybind11.h>

namespace gradscale {

// Guards of a captured step: the same objects in the dicts and lists of its state, and the same memory, flags and
// gradients of its tensors. Each call compares them on the host, without waiting for a device.
void define_guards(pybind11::module_& m);

} // namespace gradscale
