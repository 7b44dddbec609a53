// The contexts in which calls are made, and the tensors that the kernels read directly.
#pragma once

#include "../cuda/driver.h"
#include "../formulas/element.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace gradscale {

// True if all keys, backends included, are among `known`.
inline bool only(c10::DispatchKeySet keys, c10::DispatchKeySet known) {
  return (keys.raw_repr() & ~known.raw_repr()) == 0;
}

// True if no transform, tracer or dispatch mode is active. Those must see the operators, which a kernel hides.
inline bool unobserved_context() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return only(included, c10::default_included_set | c10::autocast_dispatch_keyset) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// True if nothing but autograd and autocast is active. False below autograd (inference mode, the body of an operator),
// where no node is made.
inline bool ordinary_context() {
  return unobserved_context() &&
         !c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::AutogradFunctionality);
}

// The same, or inference mode: for calls that make nodes only if gradients are recorded.
inline bool ordinary_or_inference_context() {
  return ordinary_context() || (c10::InferenceMode::is_enabled() && unobserved_context());
}

// True inside a torch.func transform, which others may enclose.
inline bool inside_transform() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// True if the kernels have an Element for the dtype.
inline bool has_element(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

inline bool has_element(const at::Tensor& tensor) {
  return has_element(tensor.scalar_type());
}

// The Element of a dtype that has one, or int64 for targets that are class indices.
inline Element element_of(at::ScalarType dtype) {
  return dtype == at::kDouble     ? Element::float64
         : dtype == at::kBFloat16 ? Element::bfloat16
         : dtype == at::kHalf     ? Element::float16
         : dtype == at::kLong     ? Element::int64
                                  : Element::float32;
}

// A complex tensor has the Element of its real and imaginary parts.
inline Element element_of(const at::Tensor& tensor) {
  return element_of(c10::toRealValueType(tensor.scalar_type()));
}

// Converts a tensor of real numbers whose dtype has no Element, such as the 8-bit types, to float32.
inline at::Tensor with_element(const at::Tensor& real) {
  return has_element(real) ? real : real.to(at::kFloat);
}

// True if a tensor has the dispatch keys of a plain tensor on a device with kernels, and no keys beyond those and
// `others`.
inline bool has_only_keys(const at::Tensor& tensor, c10::DispatchKeySet others) {
  const c10::DispatchKeySet cpu_keys(
      {c10::DispatchKey::ADInplaceOrView,
       c10::DispatchKey::CPU,
       c10::DispatchKey::AutogradCPU,
       c10::DispatchKey::AutocastCPU});
  const c10::DispatchKeySet cuda_keys(
      {c10::DispatchKey::ADInplaceOrView,
       c10::DispatchKey::CUDA,
       c10::DispatchKey::AutogradCUDA,
       c10::DispatchKey::AutocastCUDA});
  return only(tensor.key_set(), cpu_keys | others) ||
         (only(tensor.key_set(), cuda_keys | others) && runs_kernels(tensor.device()));
}

// True if the tensor has a forward-mode tangent.
inline bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// True for a strided tensor of PyTorch's own class, without a forward-mode tangent, on a device with kernels.
inline bool ordinary_tensor(const at::Tensor& tensor) {
  return has_only_keys(tensor, {}) && !has_tangent(tensor);
}

// Reads a tensor that is ordinary except that its negation may be lazy: the negation is then computed, by an operation
// that autograd records. Returns false for other tensors. Call it in ordinary contexts.
inline bool read_ordinary(const at::Tensor& given, at::Tensor& tensor) {
  const bool is_lazy = given.is_neg() && has_only_keys(given, c10::DispatchKeySet(c10::DispatchKey::Negative));
  tensor = is_lazy ? given.resolve_neg() : given;
  return ordinary_tensor(tensor);
}

// True for a floating or complex tensor of PyTorch's own class that belongs to no graph. It may be sparse, conjugated
// or negated.
inline bool ordinary_gradient(const at::Tensor& tensor) {
  const c10::DispatchKeySet others(
      {c10::DispatchKey::SparseCPU,
       c10::DispatchKey::SparseCUDA,
       c10::DispatchKey::SparseCsrCPU,
       c10::DispatchKey::SparseCsrCUDA,
       c10::DispatchKey::Conjugate,
       c10::DispatchKey::Negative});
  return has_only_keys(tensor, others) && (tensor.is_floating_point() || tensor.is_complex());
}

} // namespace gradscale
