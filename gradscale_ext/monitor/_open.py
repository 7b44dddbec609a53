"""Open monitors, and the events that no optimizer hook reports to them: clippings, and steps that a scaler skips."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from .. import _context
from ..statistics import listeners
from ..statistics.gradients import GradientStatistics, gradient_statistics
from ..statistics.passes import histograms_of, statistics_of
from ._activations import CallHook


class Monitor(Protocol):
    """A `GradientMonitor`, as clippings and scalers see it."""

    _layout: Any
    _optimizer: Any
    _selection: Any
    _taken: int
    _due: bool
    _step_scaler: Any
    _has_scaler: bool

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None: ...
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None: ...
    def _after_call(self, name: str, output: Any) -> None: ...
    def _before_clipping(self) -> None: ...
    def _after_clipping(
        self, parameters: list[torch.Tensor], result: torch.Tensor, statistics: GradientStatistics | None
    ) -> None: ...
    def _finish_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def _after_skipping(self, found_inf: torch.Tensor | None) -> None: ...
    def _write_earlier(self) -> None: ...


_monitors: set[weakref.ref[Monitor]] = set()
_lock = threading.RLock()  # reentrant: garbage collection may close a monitor meanwhile


def attach(
    monitor: Monitor, optimizer: torch.optim.Optimizer, modules: dict[str, torch.nn.Module]
) -> weakref.finalize[Any, Any]:
    """Report steps of the optimizer, calls of modules, clippings and skipped steps to a monitor from now on.

    Only the hooks of the optimizer keep the monitor alive. Return a function that detaches it, and that is called when
    the monitor is collected.
    """
    with contextlib.ExitStack() as attached:  # undone if a hook cannot be attached
        for register, hook in (
            (optimizer.register_step_pre_hook, monitor._before_step),
            (optimizer.register_step_post_hook, monitor._after_step),
        ):
            attached.callback(register(_context.in_eager_mode("a GradientMonitor watches the optimizer")(hook)).remove)
        for name, module in modules.items():
            attached.callback(module.register_forward_hook(CallHook(monitor._after_call, name)).remove)
        reference = weakref.ref(monitor)
        attached.callback(listen)
        attached.callback(_monitors.discard, reference)  # called before `listen`
        _monitors.add(reference)
        listen()
        detach = weakref.finalize(monitor, attached.pop_all().close)
    detach.atexit = False  # type: ignore[misc]
    return detach


def _everyone() -> list[Monitor]:
    return [monitor for reference in list(_monitors) if (monitor := reference()) is not None]


def monitors_of(optimizer: Any) -> list[Monitor]:
    """Open monitors of an optimizer, or of the one that it wraps."""
    inner = innermost(optimizer)
    return [monitor for monitor in _everyone() if monitor._optimizer is inner]


def innermost(optimizer: Any) -> Any:
    """The wrapped optimizer whose steps run hooks: Accelerate's and other wrappers run none."""
    while "_optimizer_step_pre_hooks" not in getattr(optimizer, "__dict__", ()) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


# ---- Clippings -------------------------------------------------------------------------------------------------------


def _before_clipping(parameters: list[torch.Tensor]) -> list[Monitor]:
    """Tell the monitors of the parameters that these are going to be clipped; return the monitors."""
    ids = set(map(id, parameters))
    monitors = [monitor for monitor in _everyone() if not ids.isdisjoint(monitor._layout.names)]
    for monitor in monitors:
        monitor._before_clipping()
    return monitors


def _write_histograms(monitors: list[Monitor]) -> bool:
    """Return True if a monitor writes histograms of the next step."""
    return any(monitor._due and monitor._selection.histograms for monitor in monitors)


def _report_our_clipping(parameters: list[torch.Tensor]) -> Callable[[GradientStatistics], None]:
    monitors = _before_clipping(parameters)
    histogram: torch.Tensor | None = None
    if _write_histograms(monitors):
        gradients = [parameter.grad for parameter in parameters]
        histogram = histograms_of(gradients, statistics_of(gradients, 2.0, None)[1])

    def tell(statistics: GradientStatistics) -> None:
        for monitor in monitors:
            monitor._after_clipping(parameters, statistics.clipping, replace(statistics, histogram=histogram))

    return tell


listeners.callbacks.append(_report_our_clipping)


def _reporting_clipping(result_of: Callable[..., torch.Tensor], clip: Any) -> Any:
    """Wrap a function of PyTorch that clips, so that monitors record the clipping once it has succeeded.

    `result_of` gets the clipping's result, as in `GradientStatistics.clipping`, from the function's arguments.
    """

    def clip_and_tell(parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if not (monitors := _before_clipping(parameters)):
            return clip(parameters, *args, **kwargs)
        with torch.no_grad():
            result, statistics = result_of(parameters, *args, **kwargs), None
            if any(monitor._due or monitor._has_scaler for monitor in monitors):
                statistics = gradient_statistics(parameters, histogram=_write_histograms(monitors))
                statistics = replace(statistics, _clipping=result)
        returned = clip(parameters, *args, **kwargs)
        for monitor in monitors:
            monitor._after_clipping(parameters, result, statistics)
        return returned

    in_eager_mode = _context.in_eager_mode("a GradientMonitor watches parameters that are clipped")(clip_and_tell)

    @functools.wraps(clip)
    def telling(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if listeners.leaves_graph(parameters):
            return in_eager_mode(parameters, *args, **kwargs)
        return (clip_and_tell if _context.is_eager() else clip)(parameters, *args, **kwargs)

    return _marked(telling)


def _norm_result(parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None) -> torch.Tensor:
    total = total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm
    total = total.detach().to(_context.widest(total.device))
    factor = (max_norm / (total + 1e-6)).clamp(max=1)
    return torch.stack([total, factor, (factor != 1).to(total)])


def _value_result(parameters: Any, clip_value: float, foreach: bool | None = None) -> torch.Tensor:
    """The result of clamping each element, which has no common factor."""
    statistics = gradient_statistics(parameters)
    changed = (statistics.abs_max.max() > clip_value) | (statistics.infs.sum() > 0)
    total = statistics.total_norm
    return torch.stack([total, torch.full_like(total, math.nan), changed.to(total)])


# ---- Steps that a scaler skips ---------------------------------------------------------------------------------------


def _reporting_steps(step: Any) -> Any:
    """Wrap `GradScaler.step` so that the optimizer's monitors learn when it skipped the step.

    A scaler that finds NaN or inf does not call the optimizer, so no hook runs.
    """

    def step_and_tell(scaler: torch.amp.GradScaler, /, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        steps_before = {monitor: monitor._taken for monitor in monitors_of(optimizer)}
        for monitor in steps_before:
            monitor._step_scaler, monitor._has_scaler = scaler, scaler.is_enabled()
        try:
            result = step(scaler, optimizer, *args, **kwargs)
        finally:
            for monitor in steps_before:
                monitor._step_scaler = None
        with contextlib.ExitStack() as work:  # last added, first called; all are called, even if a writer raises
            for monitor in steps_before:
                work.callback(monitor._write_earlier)
            for monitor, steps in steps_before.items():
                if monitor._taken == steps:
                    work.callback(monitor._after_skipping, _found_inf(scaler, optimizer))
        if not listeners.watched:
            listen()  # other code may have put this wrapper back after the last monitor was closed
        return result

    in_eager_mode = _context.in_eager_mode("a GradientMonitor is open, which sees skipped steps")(step_and_tell)

    @functools.wraps(step)
    def telling(scaler: torch.amp.GradScaler, /, *args: Any, **kwargs: Any) -> Any:
        return (step_and_tell if _context.is_eager() else in_eager_mode)(scaler, *args, **kwargs)

    return _marked(telling)


def _found_inf(scaler: Any, optimizer: Any) -> torch.Tensor | None:
    """A tensor that is nonzero if the scaler found NaN or inf; None if it is disabled and did not look."""
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    found = list(state.get("found_inf_per_device", {}).values())
    return torch.stack([part.to(found[0].device, non_blocking=True) for part in found]).sum() if found else None


# ---- Functions of PyTorch that are replaced while monitors are open --------------------------------------------------

# Every program that calls `clip_grad_norm_`, under any name, calls the part that multiplies the gradients.
_by_norm, _by_value = (functools.partial(_reporting_clipping, result) for result in (_norm_result, _value_result))
_REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (torch.amp.GradScaler, "step", _reporting_steps),
    (torch.nn.utils.clip_grad, "_clip_grads_with_norm_", _by_norm),
    (torch.nn.utils, "clip_grads_with_norm_", _by_norm),
    (torch.nn.utils.clip_grad, "clip_grad_value_", _by_value),
    (torch.nn.utils, "clip_grad_value_", _by_value),
)


def listen() -> None:
    """Replace the functions while monitors are open, and restore them afterwards. Notice which parameters are watched.

    If other code has wrapped one of our wrappers meanwhile, both stay, and ours does nothing while no monitor is open.
    """
    with _lock:
        monitors = _everyone()
        listeners.watched = frozenset().union(*(monitor._layout.names for monitor in monitors))
        for owner, name, wrapped in _REPLACED:
            function = getattr(owner, name, None)  # one of them is private, and PyTorch may remove it
            if function and bool(monitors) != _is_ours(function):
                setattr(owner, name, wrapped(function) if monitors else function.__wrapped__)
        if monitors != _everyone():  # a garbage collection has closed one meanwhile
            listen()


def _is_ours(function: Any) -> bool:
    """Return True for a wrapper of ours. `functools.wraps` of other code copies the mark, but not the identity."""
    return getattr(function, "is_monitor_wrapper", None) is function


def _marked(function: Any) -> Any:
    function.__dict__["is_monitor_wrapper"] = function
    return function
