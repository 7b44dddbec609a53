// Functions of the elements of a gradient and of arguments that broadcast to it.
#pragma once

#include "../formulas/gradients.h"
#include "value.h"

#include <optional>
#include <vector>

namespace gradscale {

// Returns the result, in the gradient's memory where nobody else owns it; empty where the kernels do not take these
// tensors. Complex numbers are walked as pairs, both of which meet the same arguments.
std::optional<at::Tensor> elementwise(
    ElementFunction function, const at::Tensor& gradient, const std::vector<Value>& arguments);

} // namespace gradscale
