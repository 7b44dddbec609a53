// The one place in C++ that asks in which context of PyTorch a call is made; tests/test_context.py asks it everywhere.
#pragma once

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

// The same, or inference mode, for what makes nodes only where gradients are recorded.
inline bool ordinary_or_inference_context() {
  return ordinary_context() || (c10::InferenceMode::is_enabled() && unobserved_context());
}

// True inside a torch.func transform, which others may enclose.
inline bool inside_transform() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

} // namespace gradscale
