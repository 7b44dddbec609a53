// Which tensors, and in which context, the kernels read directly.
#pragma once

#include "math/element.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace gradscale {

// Whether the kernels have an Element for a dtype.
inline bool has_element(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
    case at::kFloat:
    case at::kBFloat16:
    case at::kHalf:
      return true;
    default:
      return false;
  }
}

inline bool has_element(const at::Tensor& tensor) {
  return has_element(tensor.scalar_type());
}

inline Element element_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return Element::float64;
    case at::kBFloat16:
      return Element::bfloat16;
    case at::kHalf:
      return Element::float16;
    default:
      return Element::float32;
  }
}

// Of a complex tensor: that of its real and imaginary parts.
inline Element element_of(const at::Tensor& tensor) {
  return element_of(c10::toRealValueType(tensor.scalar_type()));
}

// Nothing but `known`, backends included.
inline bool only(c10::DispatchKeySet keys, c10::DispatchKeySet known) {
  return (keys.raw_repr() & ~known.raw_repr()) == 0;
}

// Autograd and autocast are all that the kernels know of: they run under no transform, tracer or dispatch mode, and not
// below autograd (inference mode, the body of an operator).
inline bool ordinary_context() {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  return only(local.included_, c10::default_included_set | c10::autocast_dispatch_keyset) &&
         !local.excluded_.has(c10::DispatchKey::AutogradFunctionality) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// A strided CPU tensor of PyTorch's own class, without a forward-mode tangent.
inline bool ordinary_tensor(const at::Tensor& tensor) {
  const c10::DispatchKeySet known(
      {c10::DispatchKey::CPU,
       c10::DispatchKey::ADInplaceOrView,
       c10::DispatchKey::AutogradCPU,
       c10::DispatchKey::AutocastCPU});
  return only(tensor.key_set(), known) && !tensor._fw_grad(/*level=*/0).defined();
}

} // namespace gradscale
