"""What a CUDA graph of a learner step would get wrong, found by comparing plain steps."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import _context, _structures
from ..diagnosis.lines import Location, users_line
from .arguments import flatten, refuse_result
from .graphs import replaced
from .hooks import Inside, hook_location, hook_name, hooks_of, is_of_monitor, rehearsing
from .remedies import TENSOR_RATE, option_remedy, scheduler_remedy, step_count_remedy
from .report import CaptureDiagnosis, Findings
from .snapshot import Snapshot
from .state import Item, State
from .watch import Call, Watch, counts_steps


@_context.in_eager_mode("diagnose_capture: call it outside of a function with fullgraph=True")
def diagnose_capture(step: Callable[..., Any], batches: Sequence[Any], *state: Any) -> CaptureDiagnosis:
    """Find what a CUDA graph of a learner step would get wrong, without a GPU.

    The step runs once on the first batch, so that optimizers make their state, and then once on each batch while its
    calls of PyTorch are watched. A graph repeats the calls of one step, with the same numbers, shapes and memory; so
    what differs between two steps, or waits for the device, is reported with its line. Afterwards everything in
    `state` (parameters, buffers, gradients, optimizers, schedulers, `training`), tensors that the step changed
    elsewhere, and the random generators of PyTorch, Python and NumPy are as before, bit by bit, also if the step
    raises.

    ==================  ================================================================================================
    stale_number        an operator's Python number differs between two steps, or an optimizer reads one from a tensor
    sync                the step waits for the device: `item()`, `if`, a boolean index, `print` and so on
    changing_shape      shapes differ between two steps
    changing_operators  the operators differ between two steps
    host_copy           a tensor is made on the host in the step, or read from another memory at each step
    generator           random numbers come from a generator that a graph does not know
    python_hook         a hook on a module, parameter or optimizer, which a replay does not run; `GradientMonitor` may
    unnamed_state       the step changes, or leaves for the next step, a tensor that is not part of `state`
    ==================  ================================================================================================

    Args:
        step: makes one learner step: forward pass, loss, backward pass, optimizer. Modules that are compiled with
            `torch.compile` run eagerly here.
        batches: at least two batches, as different from each other as in training. A tuple is unpacked into the step's
            arguments, anything else is one argument.
        *state: the modules, optimizers, schedulers, tensors and generators that the step changes, as for
            `CapturedStep`; lists, tuples and dicts of them.

    Returns:
        `CaptureDiagnosis`. Differences that happen less often than the batches show, such as a target network that is
        updated every 100 steps, are not found.

    Raises:
        TypeError: `step` is not callable, or an object in `state` is of another type.
        ValueError: fewer than two batches, or a lazy module that has not been called yet.
        Exception: what the step raises.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> def step(x):
    ...     loss = model(x).square().mean()
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    >>> diagnosis = diagnose_capture(step, [torch.ones(4, 2), torch.zeros(4, 2)], model, optimizer)
    >>> [(finding.code, finding.source) for finding in diagnosis.findings]
    [('stale_number', 'optimizer.step()')]
    """
    _check(step, batches)
    own = State("diagnose_capture", state)
    if name := own.uninitialized():
        raise ValueError(f"diagnose_capture: {name} is uninitialized; call its lazy module once before")
    before, watches, results, findings = Snapshot(own), list[Watch](), list[Any](), Findings()
    for name, hook in hooks_of(own):
        if not is_of_monitor(hook):
            cause = f"{name} has the hook {hook_name(hook)}, which a replay does not run"
            findings.add("python_hook", cause, hook_location(hook), key=name)
    numbers, counts = [], [_counts_of_schedulers(own)]
    try:
        for index, batch in enumerate([batches[0], *batches]):
            copies: list[torch.Tensor] = []
            given = _copied(batch if isinstance(batch, tuple) else (batch,), copies)
            numbers.append(_numbers_of_groups(own))
            is_first = index == 0
            before_it = None if index < 2 else watches[-1]
            known = [*(item.value for item in own.tensors() if _exists_before(item, before_it)), *copies]
            watches.append(Watch(known, own.generators(), None if is_first else findings, before_it))
            with Inside(watches), rehearsing(own), _noting_schedulers(own) as places, watches[-1].recording():
                results.append(step(*given))
        watches[-1].find_replaced(own.tensors("kept", "optimizer"))
        numbers.append(_numbers_of_groups(own))
        counts.append(_counts_of_schedulers(own))
    finally:
        for watch in reversed(watches):
            watch.restore_foreign()
        before.restore()
    _Comparison(watches[1:], numbers[1:], findings).run()
    _compare_results(step, results[1:], findings)
    _add_schedulers(counts[0], counts[1], places, findings)
    return CaptureDiagnosis(findings.found, len(watches[-1].calls))


def _check(step: Any, batches: Any) -> None:
    if not callable(step):
        raise TypeError(f"diagnose_capture: step must be callable, but it is of type {type(step).__name__}")
    if isinstance(batches, torch.Tensor | str) or not isinstance(batches, Sequence):
        raise TypeError(
            "diagnose_capture: batches must be a list or tuple of batches, but it is of type "
            f"{type(batches).__name__}; write [batch, another_batch]"
        )
    if len(batches) < 2:
        raise ValueError(
            f"diagnose_capture: batches must have at least two batches, which the step is compared on, but it has "
            f"{len(batches)}"
        )


def _copied(batch: Any, copies: list[torch.Tensor]) -> Any:
    """A batch of copies, which the step may write to. Appends them to a list."""

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        copies.append(value.detach().clone().requires_grad_(value.requires_grad))
        return copies[-1]

    return _structures.mapped("diagnose_capture", copied, batch)


def _exists_before(item: Item, before_it: Watch | None) -> bool:
    """True for tensors that a graph may read: those that a step makes for the next one are not."""
    if item.role == "gradient" and before_it is not None:
        return not before_it.has_made(item.value)
    return item.role != "attribute"


def _compare_results(step: Any, results: list[Any], findings: Findings) -> None:
    """Find numbers and strings in the results that differ between steps. A step that reads tensors has a finding."""
    try:
        leaves = [flatten(result, refuse_result)[1] for result in results]
    except TypeError:  # CapturedStep says so
        return
    if any(finding.code == "sync" for finding in findings.found):
        return
    for one, other in itertools.pairwise(leaves):
        for (place, value), (also, now) in zip(one, other, strict=False):
            is_constant = place == also and isinstance(value, int | float | str) and type(value) is type(now)
            if is_constant and not _same(value, now):
                where = f" in its result{place}" if place else ""
                cause = f"the step returns {_text(value)}, then {_text(now)}{where}"
                remedy = "return a tensor of the device, or compute the number outside of the step"
                findings.add("stale_number", cause, hook_location(step), remedy, key=place)


def _numbers_of_groups(state: State) -> dict[int, list[dict[str, Any]]]:
    """The numbers in the parameter groups of optimizers, by the optimizers' ids."""
    return {
        id(optimizer): [{k: v for k, v in group.items() if _is_numeric(v)} for group in optimizer.param_groups]
        for optimizer in state.optimizers().values()
    }


def _is_numeric(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(map(_is_numeric, value)))


def _counts_of_schedulers(state: State) -> dict[str, list[int]]:
    """What each scheduler has counted, by its name."""
    kind = torch.optim.lr_scheduler.LRScheduler
    return {name: _counts(root) for name, root in state.roots.items() if isinstance(root, kind)}


def _counts(scheduler: Any) -> list[int]:
    """The count of a scheduler, or of the schedulers that it consists of: a ChainedScheduler has none of its own."""
    parts = [count for part in getattr(scheduler, "_schedulers", ()) for count in _counts(part)]
    return parts or [scheduler.last_epoch]


@contextlib.contextmanager
def _noting_schedulers(state: State) -> Iterator[dict[str, Location | None]]:
    """The lines on which schedulers of the state are called in this context."""
    places: dict[str, Location | None] = {}

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            places.setdefault(name, users_line())
            return call(*args, **kwargs)

        return step

    schedulers = {n: root for n, root in state.roots.items() if isinstance(root, torch.optim.lr_scheduler.LRScheduler)}
    with contextlib.ExitStack() as work:
        for name, scheduler in schedulers.items():
            work.enter_context(replaced(scheduler, "step", noting(name, scheduler.step)))
        yield places


def _add_schedulers(
    before: dict[str, list[int]], after: dict[str, list[int]], places: dict[str, Location | None], findings: Findings
) -> None:
    """Report the schedulers that the step calls, unless there is a finding about a learning rate."""
    for name, counts in before.items():
        if counts != after[name] and not any(TENSOR_RATE in finding.remedy for finding in findings.found):
            cause = f"the step calls {name}.step(), which counts on the host and decides there what the rate becomes"
            findings.add("stale_number", cause, places.get(name), scheduler_remedy())


class _Comparison:
    """Compares each step with the next one."""

    def __init__(
        self, watches: list[Watch], numbers: list[dict[int, list[dict[str, Any]]]], findings: Findings
    ) -> None:
        """`numbers`: of parameter groups, before each step and after the last one."""
        self._watches, self._group_numbers, self._findings = watches, numbers, findings
        self._values = set[str]()

    def run(self) -> None:
        """Add findings for everything that differs."""
        for index in range(len(self._watches) - 1):
            first, second = self._watches[index].calls, self._watches[index + 1].calls
            has_other_shapes = False
            for one, other in self._pairs(first, second):
                if one.shapes != other.shapes:
                    if not has_other_shapes:
                        shapes = f"{_text(one.shapes)}, then {_text(other.shapes)}"
                        self._findings.add("changing_shape", f"{one.shown} gets shapes {shapes}", one.location)
                    has_other_shapes = True
                    continue
                self._compare(one, other, index, has_other_shapes)

    def _pairs(self, first: list[Call], second: list[Call]) -> Iterator[tuple[Call, Call]]:
        """Calls at the same places of two steps: the beginnings and ends of the sequences, as far as they are equal."""
        shorter = min(len(first), len(second))
        begin = 0
        while begin < shorter and first[begin].name == second[begin].name:
            begin += 1
        end = 0
        while end < shorter - begin and first[-1 - end].name == second[-1 - end].name:
            end += 1
        yield from zip(first[:begin], second[:begin], strict=True)
        if len(first) != len(second) or begin < len(first):
            here = [calls[begin] if begin < len(calls) - end else None for calls in (first, second)]
            names = ["nothing" if call is None else f"{call.shown} at {call.location}" for call in here]
            place = next((call.location for call in here if call is not None), None)
            cause = f"one step calls {names[0]}, the next {names[1]}"
            owners = {type(call.owner) for call in here if call is not None}
            is_schedule = any(issubclass(owner, torch.optim.lr_scheduler.LRScheduler) for owner in owners)
            self._findings.add("changing_operators", cause, place, scheduler_remedy() if is_schedule else None)
        if end:
            yield from zip(first[-end:], second[-end:], strict=True)

    def _compare(self, one: Call, other: Call, index: int, has_other_shapes: bool) -> None:
        changed = [
            (a, b)
            for a, b in zip(one.numbers, other.numbers, strict=False)
            if not _same(a, b) and not (has_other_shapes and isinstance(a, int))
        ]
        if changed and one.name != "aten._local_scalar_dense.default":
            self._add_number(one, *changed[0], index)
        for (memory, shape), (now, _) in zip(one.foreign, other.foreign, strict=False):
            is_known = self._findings.has_any("unnamed_state", one.location)
            if memory._cdata != now._cdata and memory.nbytes() and not is_known:
                cause = f"{one.shown} reads a tensor of shape {list(shape)} from another memory at each step"
                self._findings.add("host_copy", cause, one.location, key="memory")

    def _add_number(self, call: Call, before: Any, after: Any, index: int) -> None:
        values = f"{_text(before)}, then {_text(after)}"
        if call.is_backward and values in self._values:
            return  # of the forward pass
        self._values.add(values)
        if isinstance(call.owner, torch.optim.Optimizer):
            self._add_optimizer_number(call, call.owner, values, index)
            return
        if call.owner is not None:
            cause = f"{type(call.owner).__name__} computes with another number at each step ({values})"
            self._findings.add("stale_number", cause, call.location, scheduler_remedy(), key="number")
            return
        cause = f"{call.shown} gets the number {values}"
        self._findings.add("stale_number", cause, call.location, key="number")

    def _add_optimizer_number(self, call: Call, optimizer: torch.optim.Optimizer, values: str, index: int) -> None:
        kind = type(optimizer).__name__
        groups = [self._group_numbers[i].get(id(optimizer), []) for i in (index, index + 1, index + 2)]
        found = False
        for before, after in (groups[:2], groups[1:]):
            for group, (was, now) in enumerate(zip(before, after, strict=False)):
                for key in was.keys() & now.keys():
                    if was[key] != now[key]:
                        found = True
                        cause = (
                            f"{kind}.param_groups[{group}]['{key}'] is a Python number that changes: "
                            f"{_text(was[key])}, then {_text(now[key])}; a graph keeps the first"
                        )
                        remedy = option_remedy(optimizer, key) or None
                        self._findings.add("stale_number", cause, call.location, remedy, key=("group", key))
        is_on_device = all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        if (counts_steps(optimizer) and not is_on_device) or not found:
            cause = f"{kind} computes with its step count as a Python number ({call.shown} gets {values})"
            self._findings.add("stale_number", cause, call.location, step_count_remedy(optimizer), key="read")


def _same(one: Any, other: Any) -> bool:
    return one == other or (
        isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return repr(value)
