// The one place in C++ that asks in which context of PyTorch a call is made; tests/test_context.py asks it everywhere.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace gradscale {

// Whether there are no keys but `known`, backends included.
inline bool only(c10::DispatchKeySet keys, c10::DispatchKeySet known) {
  return (keys.raw_repr() & ~known.raw_repr()) == 0;
}

// Tells whether only autograd and autocast are active: the kernels do not run under transforms, tracers or dispatch
// modes, nor below autograd (inference mode, the body of an operator).
inline bool ordinary_context() {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  return only(local.included_, c10::default_included_set | c10::autocast_dispatch_keyset) &&
         !local.excluded_.has(c10::DispatchKey::AutogradFunctionality) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// Whether a torch.func transform is at work, and others may stand outside it.
inline bool inside_transform() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

} // namespace gradscale
