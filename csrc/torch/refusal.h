// Why the kernels do not accept a call.
#pragma once

#include <c10/util/StringUtil.h>

#include <ATen/core/Tensor.h>

#include <string>

namespace gradscale {

// Thrown while the arguments of a call are read and checked, before anything is computed. Python gets it in place of a
// result (run_or_refuse.h): it raises an error if the argument is wrong, and otherwise computes the call in another
// way, and says once what makes it slow. A registered operator raises an error.
struct Refusal {
  std::string argument; // as messages name it; empty: not an argument, but a transform, a mode, or the device
  std::string problem;  // "is ...", "has ..."
};

// Describes a tensor. Not inlined, so that the code of the checks stays short.
C10_NOINLINE inline std::string described(const at::Tensor& tensor) {
  if (tensor.is_nested()) { // it has no sizes
    return "is a nested tensor";
  }
  return c10::str("is ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device());
}

} // namespace gradscale
