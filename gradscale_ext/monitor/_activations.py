"""Gradients of the outputs of modules, call by call."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import _context
from ..statistics.gradients import gradient_statistics


class CallHook:
    """Forward hook that reports calls to the monitor, without keeping it alive. In a copied or saved module it has no
    monitor."""

    def __init__(self, report: Callable[[str, Any], None] | None = None, name: str = "") -> None:
        """`report` is a method of the monitor."""
        self._report, self._name = report and weakref.WeakMethod(report), name

    @_context.in_eager_mode("a GradientMonitor charts the gradients of the outputs of a module")
    def __call__(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if self._report is not None and (report := self._report()) is not None:
            report(self._name, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return CallHook, ()


class Calls:
    """Gradients of the outputs of modules' calls, in the last backward pass.

    The first forward pass after a backward pass numbers the calls of each module from 0 again. Its gradients replace
    the earlier ones only when they arrive, because a forward pass may have no backward pass.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        """Prepare for the calls of the named modules."""
        self._modules = modules
        self._pass = self._norms_pass = 0
        self._has_gradients = self._has_calls = False
        self._counts: Counter[str] = Counter()
        self._norms: dict[tuple[str, int], torch.Tensor] = {}

    def watch(self, module: str, output: Any) -> None:
        """Record the gradient of each tensor of an output when it arrives."""
        self._has_calls = True
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not tensors:
            return
        if self._has_gradients:
            self.number_anew()
        call = f"{module}/{self._counts[module]}"
        self._counts[module] += 1
        for index, tensor in enumerate(tensors):
            hook = functools.partial(self._take, self._pass, (call, index))
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _take(self, backward_pass: int, key: tuple[str, int], gradient: torch.Tensor) -> None:
        if backward_pass != self._norms_pass:
            self._norms, self._norms_pass = {}, backward_pass
        self._has_gradients = True
        self._norms[key] = gradient_statistics(gradient.detach()).norm[0]

    def norms(self, scale: Any) -> tuple[list[str], torch.Tensor] | None:
        """`<module>/<call>` and `[N]` the norm of the gradient of each call's output, divided by `scale`."""
        if self._modules and not self._has_calls:
            _context.say_once(
                f"GradientMonitor: no call of {', '.join(map(repr, self._modules))} has been seen, so that activations "
                "have no charts. PyTorch ignores hooks in a model that was compiled before they were added: open the "
                "monitor before the model's first call"
            )
        if not self._norms:
            return None
        norms_by_call: dict[str, list[torch.Tensor]] = {}
        for (call, _), norm in sorted(self._norms.items(), key=lambda item: item[0][1]):
            norms_by_call.setdefault(call, []).append(norm)
        device = next(iter(self._norms.values())).device
        norms = [
            torch.linalg.vector_norm(torch.stack(parts)).to(device, non_blocking=True)
            for parts in norms_by_call.values()
        ]
        divisor = torch.as_tensor(1.0 if scale is None else scale).to(device, non_blocking=True)
        return list(norms_by_call), torch.stack(norms) / divisor

    def number_anew(self) -> None:
        """Start again: the next call of each module is its first."""
        self._pass += 1
        self._has_gradients = False
        self._counts.clear()

    def forget(self) -> None:
        """Drop the norms at the end of a step."""
        self.number_anew()
        self._norms = {}
