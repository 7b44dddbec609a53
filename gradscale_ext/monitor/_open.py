"""Open monitors, and the events that no optimizer hook reports to them: clippings, and steps that a scaler skips."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Protocol

import torch

from .statistics import GradientStatistics, listeners


class Monitor(Protocol):
    """A `GradientMonitor`, as clippings and scalers see it."""

    _layout: Any
    _optimizer: Any
    _taken: int
    _scaler_of_step: Any

    def _after_clipping(self, clipping: tuple[list[torch.Tensor], GradientStatistics]) -> None: ...
    def _after_skipping(self, found_inf: torch.Tensor | None) -> None: ...


_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
_lock = threading.RLock()  # reentrant: garbage collection may close a monitor meanwhile


def add(monitor: Monitor) -> None:
    """Report clippings and skipped steps to a monitor from now on, without keeping it alive."""
    with _lock:
        _monitors.add(monitor)
        _listen_to_scalers()


def discard(monitor: Monitor) -> None:
    """Report nothing more to a monitor."""
    with _lock:
        _monitors.discard(monitor)
        _listen_to_scalers()


def _everyone() -> list[Monitor]:
    with _lock:
        return list(_monitors)


def innermost(optimizer: Any) -> Any:
    """The wrapped optimizer whose steps run hooks: Accelerate's and other wrappers run none."""
    while "_optimizer_step_pre_hooks" not in getattr(optimizer, "__dict__", ()) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


# ---- Clippings -------------------------------------------------------------------------------------------------------


def _tell_of_clipping(parameters: list[torch.Tensor], statistics: GradientStatistics) -> None:
    """Report a clipping to the monitors of its parameters."""
    for monitor in _everyone():
        if any(id(parameter) in monitor._layout.names for parameter in parameters):
            monitor._after_clipping((parameters, statistics))


listeners.append(_tell_of_clipping)

# ---- Steps that a scaler skips ---------------------------------------------------------------------------------------


def _listen_to_scalers() -> None:
    """Replace `GradScaler.step` while monitors are open, and restore it afterwards.

    A scaler that finds NaN or inf does not call the optimizer, so no hook runs. If somebody else has wrapped the
    function meanwhile, theirs stays, and ours below it does nothing without monitors.
    """
    scaler: Any = torch.amp.GradScaler
    if bool(_monitors) != _is_ours(scaler.step):
        scaler.step = _telling(scaler.step) if _monitors else scaler.step.__wrapped__


def _is_ours(step: Any) -> bool:
    """Whether a step function is ours. Somebody else's `functools.wraps` copies the mark, but not its identity."""
    return getattr(step, "of_monitors", None) is step


def _telling(step: Any) -> Any:
    """Wrap `GradScaler.step` so that the optimizer's monitors learn when it skipped the step."""

    @functools.wraps(step)
    def telling(scaler: torch.amp.GradScaler, /, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        steps_before = {m: m._taken for m in _everyone() if m._optimizer is innermost(optimizer)}
        for monitor in steps_before:
            monitor._scaler_of_step = scaler
        try:
            result = step(scaler, optimizer, *args, **kwargs)
        finally:
            for monitor in steps_before:
                monitor._scaler_of_step = None
        for monitor, steps in steps_before.items():
            if monitor._taken == steps:
                monitor._after_skipping(_found_inf(scaler, optimizer))
        if not steps_before:
            with _lock:
                _listen_to_scalers()  # the last monitor may have gone without being closed
        return result

    telling.__dict__["of_monitors"] = telling
    return telling


def _found_inf(scaler: Any, optimizer: Any) -> torch.Tensor | None:
    """Nonzero on the device where the scaler found NaN or inf; None where it is disabled and did not look."""
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    found = list(state.get("found_inf_per_device", {}).values())
    return torch.stack([part.to(found[0].device, non_blocking=True) for part in found]).sum() if found else None
