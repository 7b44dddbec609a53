#include "elementwise.h"

#include "../cuda/driver.h"
#include "../torch/tensor_element.h"
#include "calls.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>

namespace gradscale {

namespace {

ElementLoop loop_of(ElementFunction function) {
  switch (function) {
    case ElementFunction::multiply:
      return multiply_kernel;
    case ElementFunction::multiply_negated:
      return multiply_negated_kernel;
    case ElementFunction::clamp:
      break;
  }
  return clamp_kernel;
}

// Launches the kernel on PyTorch's iterator over these operands, which merges dimensions where possible. Returns false
// if more dimensions remain than the kernel supports.
bool run_on_device(
    ElementFunction function,
    const at::TensorIterator& iterator,
    const std::vector<int>& places, // the index of each operand of the iterator in the call
    const std::vector<Value>& arguments,
    const at::Tensor& gradient) {
  ElementwiseCall call{};
  if (iterator.ndim() > ElementwiseCall::kMaxDims) {
    return false;
  }
  call.function = function;
  call.element = element_of(gradient);
  call.dims = iterator.ndim();
  call.count = iterator.numel();
  for (int d = 0; d < iterator.ndim(); ++d) {
    call.sizes[d] = iterator.shape()[d];
  }
  for (size_t operand = 0; operand < places.size(); ++operand) {
    call.is_double[places[operand]] = iterator.tensor(static_cast<int64_t>(operand)).scalar_type() == at::kDouble;
    call.data[places[operand]] = iterator.data_ptr(static_cast<int64_t>(operand));
    for (int d = 0; d < iterator.ndim(); ++d) {
      call.strides[places[operand]][d] = iterator.strides(static_cast<int64_t>(operand))[d];
    }
  }
  for (size_t k = 0; k < arguments.size(); ++k) {
    const double* number = std::get_if<double>(&arguments[k]);
    call.constants[2 + k] = number == nullptr ? 0 : *number;
  }
  launch_elementwise(call, OnDevice(gradient.device()));
  return true;
}

} // namespace

std::optional<at::Tensor> elementwise(
    ElementFunction function, const at::Tensor& gradient, const std::vector<Value>& arguments) {
  if (!fused(gradient, {})) {
    return std::nullopt;
  }
  const bool on_device = runs_kernels(gradient.device());
  std::vector<at::Tensor> tensors;
  std::vector<int> places{0, 1};
  for (size_t k = 0; k < arguments.size(); ++k) {
    if (on_device && std::holds_alternative<double>(arguments[k])) {
      continue; // passed as a constant of the call
    }
    const at::Tensor* tensor = std::get_if<at::Tensor>(&arguments[k]);
    const bool is_read_there = on_device && tensor != nullptr && tensor->dim() == 0 &&
                               tensor->scalar_type() == at::kDouble && tensor->device() == gradient.device();
    tensors.push_back(is_read_there ? *tensor : value_like(gradient, arguments[k]));
    places.push_back(static_cast<int>(2 + k));
    if (!fused(gradient, {tensors.back()})) {
      return std::nullopt;
    }
  }
  if (gradient.numel() == 0) {
    return gradient;
  }
  at::Tensor out = owned_by_nobody_else(gradient) ? gradient : at::empty_like(gradient);
  const bool is_complex = gradient.is_complex();
  const at::Tensor numbers = is_complex ? at::view_as_real(gradient) : gradient;
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false)
      .add_owned_output(is_complex ? at::view_as_real(out) : out)
      .add_owned_const_input(numbers);
  for (at::Tensor& argument : tensors) {
    config.add_owned_const_input(is_complex ? argument.unsqueeze(-1) : argument);
  }
  at::TensorIterator iterator = config.build();
  if (on_device) {
    return run_on_device(function, iterator, places, arguments, numbers) ? std::optional(out) : std::nullopt;
  }
  const Element element = element_of(numbers);
  const ElementLoop loop = loop_of(function);
  iterator.for_each([=](char** data, const int64_t* strides, int64_t size) { loop(element, data, strides, size); });
  return out;
}

} // namespace gradscale
