"""What the replay of a graph does not run: Python hooks, and modes that see the calls of PyTorch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ..diagnosis.lines import Location
from ..monitor import _open
from ..monitor._kept import Rehearsal
from ..monitor.monitor import GradientMonitor
from .state import HOOKS_OF_MODULES, HOOKS_OF_OPTIMIZERS, State, hooks_of_all

_thread = threading.local()


def hooks_of(state: State) -> Iterator[tuple[str, Any]]:
    """Hooks on modules, parameters and optimizers, or on all of them, each with the name of what it is on.

    PyTorch's own hooks, such as those of weight_norm and DistributedDataParallel, consist of operators or expect a
    graph, and are left out.
    """
    for name, found in hooks_of_all():
        yield from ((name, hook) for hook in found.values() if not _is_torchs(hook))
    for name, module in state.modules():
        for attribute in HOOKS_OF_MODULES:
            yield from ((name, hook) for hook in vars(module).get(attribute, {}).values() if not _is_torchs(hook))
        for path, parameter in module.named_parameters(recurse=False):
            hooks = [*(parameter._backward_hooks or {}).values(), *_after_accumulation(parameter)]
            yield from ((f"{name}.{path}", hook) for hook in hooks if not _is_torchs(hook))
    for name, optimizer in state.optimizers().items():
        for attribute in HOOKS_OF_OPTIMIZERS:
            yield from ((name, hook) for hook in vars(optimizer).get(attribute, {}).values() if not _is_torchs(hook))


def _after_accumulation(parameter: torch.Tensor) -> list[Any]:
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def _is_torchs(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module == "torch" or module.startswith("torch.")


def hook_name(hook: Any) -> str:
    """A hook as messages name it."""
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


def hook_location(hook: Any) -> Location | None:
    """The line on which a hook is defined; None for hooks that are no functions or methods."""
    code = getattr(hook, "__code__", None)
    return None if code is None else Location(code.co_filename, code.co_firstlineno)


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


def _modes() -> list[Any]:
    """The active function modes."""
    return [torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack())]


def default_devices() -> tuple[torch.device, ...]:
    """The devices of torch.set_default_device, and of devices as context managers."""
    return tuple([mode.device for mode in _modes() if isinstance(mode, torch.utils._device.DeviceContext)])


def watching_mode() -> str:
    """The name of an active mode that sees PyTorch's calls, such as `GradientTracer`; empty if there is none."""
    for mode in _modes():
        if not isinstance(mode, torch.utils._device.DeviceContext):
            return type(mode).__name__
    if torch._C._len_torch_dispatch_stack():
        return type(torch._C._get_dispatch_stack_at(0)).__name__
    if torch._C._autograd._top_saved_tensors_default_hooks(True):
        return "torch.autograd.graph.saved_tensors_hooks"
    return "torch.autograd.detect_anomaly" if torch.is_anomaly_enabled() else ""


class Inside:
    """In this context, captured steps that this thread calls are part of another one, or of a diagnosed step."""

    def __init__(self, owner: Any) -> None:
        """Keep the captured step, or the diagnosis."""
        self._owner = owner

    def __enter__(self) -> None:
        """Enter the context, unless the thread is in one already."""
        self._before = getattr(_thread, "owner", None)
        _thread.owner = self._before or self._owner

    def __exit__(self, *_: object) -> None:
        """Leave it."""
        _thread.owner = self._before


def is_inside_another(own: Any) -> bool:
    """True in this context, unless the owner itself asks."""
    owner = getattr(_thread, "owner", None)
    return owner is not None and owner is not own
