"""The monitors that are open, and what no hook of an optimizer tells them: clippings, and steps that a scaler skips."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from .statistics import GradientStatistics, listeners

if TYPE_CHECKING:
    from .monitor import GradientMonitor

_monitors: weakref.WeakSet[GradientMonitor] = weakref.WeakSet()
_lock = threading.RLock()  # a monitor may be closed by what is collected while it is held


def add(monitor: GradientMonitor) -> None:
    """Tell it of clippings and skipped steps from now on. It is not kept alive."""
    with _lock:
        _monitors.add(monitor)
        _listen_to_scalers()


def discard(monitor: GradientMonitor) -> None:
    """Tell it nothing more."""
    with _lock:
        _monitors.discard(monitor)
        _listen_to_scalers()


def _everyone() -> list[GradientMonitor]:
    with _lock:
        return list(_monitors)


def innermost(optimizer: Any) -> Any:
    """The optimizer whose steps run hooks: wrappers such as Accelerate's are optimizers by name, and run none."""
    while "_optimizer_step_pre_hooks" not in getattr(optimizer, "__dict__", ()) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


# ---- Clippings -------------------------------------------------------------------------------------------------------


def _tell_of_clipping(parameters: list[torch.Tensor], statistics: GradientStatistics) -> None:
    """Tell the monitors whose parameters are among these."""
    for monitor in _everyone():
        if any(id(parameter) in monitor._layout.names for parameter in parameters):
            monitor._after_clipping((parameters, statistics))


listeners.append(_tell_of_clipping)

# ---- Steps that a scaler skips ---------------------------------------------------------------------------------------


def _listen_to_scalers() -> None:
    """Put a function of ours in the place of `GradScaler.step` while monitors are open, and the original back after.

    A scaler that finds NaN or inf does not call the optimizer, whose hooks see nothing. Somebody else may have replaced
    the function meanwhile: theirs stays, and ours below it does nothing without monitors.
    """
    scaler: Any = torch.amp.GradScaler
    if bool(_monitors) != _is_ours(scaler.step):
        scaler.step = _telling(scaler.step) if _monitors else scaler.step.__wrapped__


def _is_ours(step: Any) -> bool:
    """By identity, because `functools.wraps` of somebody else copies what is written on a function."""
    return getattr(step, "of_monitors", None) is step


def _telling(step: Any) -> Any:
    """`GradScaler.step` that tells the monitors of the optimizer if no step came of it."""

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
    """Whether there were NaN or inf, as the device knows it. None if the scaler, being turned off, did not look."""
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    found = list(state.get("found_inf_per_device", {}).values())
    return torch.stack([part.to(found[0].device, non_blocking=True) for part in found]).sum() if found else None
