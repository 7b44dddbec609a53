// Values as arguments of the gradient-flow operators: how they are checked and read.
#pragma once

#include "../torch/arguments.h"
#include "../torch/tensor_element.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/ScalarType.h>

#include <string>

namespace gradscale {

// The dtype as Python writes it.
inline std::string dtype_name(const at::Tensor& tensor) {
  return std::string("torch.") + std::string(c10::getDtypeNames(tensor.scalar_type()).first);
}

// The type that gradients of the given dtype are computed in.
inline at::ScalarType precise_type(at::ScalarType dtype) {
  return c10::toRealValueType(dtype) == at::kDouble ? at::kDouble : at::kFloat;
}

// Reads a scalar tensor on the CPU at once, unless a transform or a tracer has to see the tensor.
inline Value read_if_free(Value value) {
  if (const at::Tensor* tensor = std::get_if<at::Tensor>(&value)) {
    if (tensor->dim() == 0 && tensor->is_cpu() && ordinary_context() && ordinary_tensor(*tensor)) {
      return tensor->item<double>();
    }
  }
  return value;
}

// True if the value can be read without a synchronization, whatever device the gradient is on.
inline bool is_cpu_scalar(const at::Tensor& tensor) {
  return tensor.dim() == 0 && tensor.is_cpu();
}

// The value as a tensor on the gradient's device, in the type that the gradient is computed in.
inline at::Tensor value_like(const at::Tensor& gradient, const Value& value) {
  const at::TensorOptions options = gradient.options().dtype(precise_type(gradient.scalar_type()));
  if (const double* number = std::get_if<double>(&value)) {
    // PyTorch refuses a number beyond the range of float; the cast makes it infinite.
    const bool is_float = options.dtype() == at::kFloat;
    return at::scalar_tensor(is_float ? static_cast<float>(*number) : *number, options);
  }
  return std::get<at::Tensor>(value).to(options.device(), precise_type(gradient.scalar_type()), /*non_blocking=*/true);
}

inline void check_is_real(const char* name, const char* argument, const at::Tensor& value) {
  TORCH_CHECK_TYPE(
      !value.is_complex(), name, ": ", argument, " must be real, but it is a tensor of dtype ", dtype_name(value));
}

// Raises unless a tensor argument is real, without a gradient, broadcastable to `shape` (called `what`), and on x's
// device.
inline void check_value(
    const char* name,
    const char* argument,
    const Value& value,
    const at::Tensor& x,
    c10::SymIntArrayRef shape,
    const char* what) {
  if (!std::holds_alternative<at::Tensor>(value)) {
    return;
  }
  const at::Tensor& tensor = std::get<at::Tensor>(value);
  check_is_real(name, argument, tensor);
  TORCH_CHECK_VALUE(
      !tensor.requires_grad() && !tensor._fw_grad(/*level=*/0).defined(),
      name,
      ": ",
      argument,
      " requires grad, but it gets no gradient; detach() it");
  const int64_t dims = static_cast<int64_t>(shape.size());
  bool broadcasts = tensor.dim() <= dims;
  for (int64_t i = 1; broadcasts && i <= tensor.dim(); ++i) {
    broadcasts = tensor.sym_size(-i) == 1 || tensor.sym_size(-i) == shape[dims - i];
  }
  TORCH_CHECK_VALUE(
      broadcasts,
      name,
      ": ",
      argument,
      " must broadcast to ",
      what,
      ", ",
      shape,
      ", but its shape is ",
      tensor.sym_sizes());
  TORCH_CHECK_VALUE(
      tensor.device() == x.device() || (tensor.dim() == 0 && tensor.device().is_cpu()),
      name,
      ": ",
      argument,
      " must be on the device of x, ",
      x.device(),
      ", but it is on ",
      tensor.device());
}

} // namespace gradscale
