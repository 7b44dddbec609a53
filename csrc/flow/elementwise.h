// Loops over the elements of a gradient and of arguments that broadcast to it.
#pragma once

#include "element_loop.h"

#include <ATen/core/Tensor.h>

namespace gradscale {

// Runs a loop over an ordinary CPU gradient; the result takes the gradient's memory where nobody else owns it. Complex
// numbers are walked as pairs, both of which meet the same arguments.
at::Tensor elementwise(const at::Tensor& gradient, std::vector<at::Tensor> arguments, ElementLoop loop);

} // namespace gradscale
