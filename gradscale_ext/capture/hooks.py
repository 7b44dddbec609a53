"""What the replay of a graph does not run: Python hooks, and other captured steps."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ..monitor import _open
from ..monitor._kept import Rehearsal
from ..monitor.monitor import GradientMonitor
from .state import State, hooks_of_tensor


class _Running(threading.local):
    """For each thread, the outermost captured or diagnosed step that runs. Captured steps in it are a part of it."""

    owner: Any = None


running = _Running()


def hooks_of(state: State) -> Iterator[tuple[str, Any]]:
    """Hooks on modules, parameters and optimizers, or on all of them, each with the name of what it is on.

    PyTorch's own hooks, such as those of weight_norm and DistributedDataParallel, consist of operators or expect a
    graph, and are left out.
    """
    for name, value, role, *_ in state.walk():
        hooks = hooks_of_tensor(value) if role == "kept" and isinstance(value, torch.Tensor) else []
        if role == "hooks" and isinstance(value, dict):
            name, hooks = re.sub(r"\._\w+$", "", name), list(value.values())
        yield from ((name, hook) for hook in hooks if not _is_torchs(hook))


def _is_torchs(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module == "torch" or module.startswith("torch.")


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
