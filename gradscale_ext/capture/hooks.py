"""Python hooks of a state, which the replay of a graph does not run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..monitor import _open
from ..monitor._kept import Rehearsal
from ..monitor.monitor import GradientMonitor
from .state import State

OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def hooks_of(state: State) -> Iterator[tuple[str, Any]]:
    """Hooks on modules, parameters and optimizers, each with the name of what it is on.

    PyTorch's own hooks, such as those of weight_norm and DistributedDataParallel, consist of operators or expect a
    graph, and are left out.
    """
    for name, module in state.modules():
        for attribute in OF_MODULES:
            yield from ((name, hook) for hook in vars(module).get(attribute, {}).values() if not _is_torchs(hook))
        for path, parameter in module.named_parameters(recurse=False):
            hooks = [*(parameter._backward_hooks or {}).values(), *_after_accumulation(parameter)]
            yield from ((f"{name}.{path}", hook) for hook in hooks if not _is_torchs(hook))
    for name, optimizer in state.optimizers().items():
        for attribute in OF_OPTIMIZERS:
            yield from ((name, hook) for hook in vars(optimizer).get(attribute, {}).values() if not _is_torchs(hook))


def _after_accumulation(parameter: torch.Tensor) -> list[Any]:
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def _is_torchs(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module == "torch" or module.startswith("torch.")


def hook_name(hook: Any) -> str:
    """A hook as messages name it."""
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


def is_of_monitor(hook: Any) -> bool:
    """Return True for a hook of a `GradientMonitor`."""
    methods = hook, getattr(hook, "__wrapped__", None), getattr(hook, "_report", None)
    return any(isinstance(getattr(method, "__self__", None), GradientMonitor) for method in methods)


@contextlib.contextmanager
def rehearsing(state: State) -> Iterator[list[tuple[GradientMonitor, Rehearsal]]]:
    """In this context, the optimizers' monitors neither record nor count steps. Yields what they would have added."""
    with contextlib.ExitStack() as work:
        yield [
            (monitor, work.enter_context(monitor._rehearsing()))
            for optimizer in state.optimizers().values()
            for monitor in _open.monitors_of(optimizer)
            if isinstance(monitor, GradientMonitor)
        ]


def watching_mode() -> str:
    """The name of an active mode that sees PyTorch's calls, such as `GradientTracer`; empty if there is none."""
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        if not isinstance(mode, torch.utils._device.DeviceContext):  # torch.set_default_device
            return type(mode).__name__
    if torch._C._len_torch_dispatch_stack():
        return type(torch._C._get_dispatch_stack_at(0)).__name__
    return ""
