#include "elementwise.h"

#include "../tensor_element.h"
#include "gradient_buffer.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>

namespace gradscale {

at::Tensor elementwise(const at::Tensor& gradient, std::vector<at::Tensor> arguments, ElementLoop loop) {
  const at::Tensor out = owned_by_nobody_else(gradient) ? gradient : at::empty_like(gradient);
  const bool is_complex = gradient.is_complex();
  const at::Tensor numbers = is_complex ? at::view_as_real(gradient) : gradient;
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false)
      .add_owned_output(is_complex ? at::view_as_real(out) : out)
      .add_owned_const_input(numbers);
  for (at::Tensor& argument : arguments) {
    config.add_owned_const_input(is_complex ? argument.unsqueeze(-1) : argument);
  }
  at::TensorIterator iterator = config.build();
  const Element element = element_of(numbers);
  iterator.for_each([=](char** data, const int64_t* strides, int64_t size) { loop(element, data, strides, size); });
  return out;
}

} // namespace gradscale
