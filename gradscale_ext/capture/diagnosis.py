"""What a CUDA graph of a learner step would get wrong, found by comparing plain steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import _context
from ..diagnosis.lines import Location
from .hooks import hook_name, hooks_of, inside, is_of_monitor, rehearsing
from .remedies import rate_remedy, scheduler_remedy, step_count_remedy
from .report import CaptureDiagnosis, CaptureFinding, finding_of
from .snapshot import Snapshot
from .state import State
from .watch import Call, Watch

_SCALERS = "amp/grad_scaler.py"
_DISTRIBUTIONS = "distributions/"

#: What to write in place of a call that waits for the device, by the name of the function or operator.
_INSTEAD_OF_READS = {
    "__bool__": "torch.where or a product with a mask in place of the condition; a check that raises goes before or "
    "after the step",
    "masked_select": "torch.where(mask, x, 0) and sums over mask, so that the shape does not depend on values",
    "nonzero": "torch.where(mask, x, 0), or topk with a fixed number, so that the shape does not depend on values",
    "index": "torch.where(mask, x, 0), or a product with the mask, so that the shape does not depend on values",
    "index_put": "torch.where(mask, values, x), with values of the shape of x",
    "repeat_interleave": "repeat_interleave(..., output_size=n)",
    "one_hot": "one_hot(x, num_classes=n)",
    "bincount": "torch.zeros(n, device=x.device).scatter_add_(0, x, torch.ones_like(x, dtype=torch.float32))",
    "linalg_check_errors": "the function of torch.linalg that does not check, such as inv_ex, cholesky_ex, solve_ex",
    "normal": "mean + std * torch.randn_like(mean)",
    "print": "print after the step, what the step returns",
}


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
        ValueError: fewer than two batches.
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
    before, watches, fixed = Snapshot(own), list[Watch](), list[_Fixed]()
    replaced: list[tuple[str, Location | None]] = []
    try:
        for index, batch in enumerate([batches[0], *batches]):
            given = batch if isinstance(batch, tuple) else (batch,)
            fixed.append(_Fixed(own))
            known = [*(item.value for item in own.tensors() if item.role != "attribute"), *tensors_in(given)]
            before_it = watches[-1] if index > 1 else None
            watches.append(Watch(known, own.generators(), before_it, is_captured=index > 0))
            with inside(watches), rehearsing(own), watches[-1].recording():
                step(*given)
            replaced = watches[-1].replaced(own.tensors("kept", "optimizer"))
        fixed.append(_Fixed(own))
    finally:
        for watch in reversed(watches):
            watch.restore_foreign()
        before.restore()
    findings = _Findings(watches[1:], fixed[1:])
    findings.add_hooks(own)
    findings.add_calls()
    findings.add_replaced(replaced)
    findings.add_differences()
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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a structure."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Fixed:
    """The numbers of optimizers before a step."""

    def __init__(self, state: State) -> None:
        self.numbers = {
            id(optimizer): [
                {key: value for key, value in group.items() if isinstance(value, int | float)}
                for group in optimizer.param_groups
            ]
            for optimizer in state.optimizers().values()
        }


class _Findings:
    """The findings, each once."""

    def __init__(self, watches: list[Watch], fixed: list[_Fixed]) -> None:
        self._watches, self._fixed = watches, fixed
        self._seen: set[tuple[Any, ...]] = set()
        self.found: list[CaptureFinding] = []

    def _add(self, key: Any, code: Any, cause: str, location: Location | None, remedy: str | None = None) -> None:
        if (code, location, key) not in self._seen:
            self._seen.add((code, location, key))
            self.found.append(finding_of(code, cause, location, remedy=remedy))

    def add_hooks(self, state: State) -> None:
        for name, hook in hooks_of(state):
            if not is_of_monitor(hook):
                self._add(
                    name, "python_hook", f"{name} has the hook {hook_name(hook)}, which a replay does not run", None
                )

    # ---- Calls that no graph can hold --------------------------------------------------------------------------------

    def add_calls(self) -> None:
        for watch in self._watches:
            for call in watch.calls:
                self._add_call(call)

    def _add_call(self, call: Call) -> None:
        if call.read is not None and isinstance(call.owner, torch.optim.Optimizer):
            self._add_optimizer_read(call, call.owner)
        elif call.read is not None:
            self._add_read(call)
        if call.made_on_host:
            is_named = not call.name.startswith("aten.")
            maker = f"torch.{call.name} makes" if is_named else "an array or a list of numbers becomes"
            self._add("", "host_copy", f"{maker} a tensor on the host at each step", call.location)
        if call.generator is not None:
            cause = f"{_shown(call)} draws from a generator of {call.generator.device} that a graph does not know"
            self._add("", "generator", cause, call.location)
        if call.random:
            cause = f"the step draws from {call.random}; a graph would repeat the numbers of one step"
            self._add(call.random, "generator", cause, call.location)
        for shape in call.written:
            cause = f"{_shown(call)} writes to a tensor of shape {list(shape)} that is not part of the state"
            self._add("written", "unnamed_state", cause, call.location)
        for shape in call.survivors:
            self._add(
                "survivor",
                "unnamed_state",
                f"{_shown(call)} reads a tensor of shape {list(shape)} that the step before made; a graph would read "
                "the one of the step that was captured",
                call.location,
                "keep it in a tensor that exists before the step, write to it with copy_(), and name it in the state",
            )

    def add_replaced(self, replaced: list[tuple[str, Location | None]]) -> None:
        for name, location in replaced:
            self._add(
                "replaced",
                "unnamed_state",
                f"the step replaces {name} by another tensor; a graph would read the one that was captured",
                location,
                "keep one tensor, and write to it with copy_()",
            )

    def _add_optimizer_read(self, call: Call, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer).__name__
        has_tensor = any(isinstance(group.get("lr"), torch.Tensor) for group in optimizer.param_groups)
        what = "its learning rate, a tensor," if has_tensor and not _counts_steps(optimizer) else "its step count"
        cause = f"{kind} reads {what} on the host; a graph keeps the number ({_text(abs(call.numbers[0]))})"
        self._add("read", "stale_number", cause, call.location, step_count_remedy(optimizer))

    def _add_read(self, call: Call) -> None:
        assert call.read is not None
        what, name = call.read
        cause = f"{what} waits for the device"
        remedy = _INSTEAD_OF_READS.get(name)
        if call.function in _INSTEAD_OF_READS:
            remedy = _INSTEAD_OF_READS[call.function]
        if name == "__repr__":
            remedy = _INSTEAD_OF_READS["print"]
        if call.library == _SCALERS:
            cause = "GradScaler.step reads on the host whether gradients are finite"
            remedy = "an optimizer with fused=True, which skips such a step on the device"
        elif call.library.startswith(_DISTRIBUTIONS):
            cause = f"torch.distributions checks its arguments on the host ({cause})"
            remedy = "validate_args=False for the distribution"
        self._add(call.library, "sync", cause, call.location, remedy)

    # ---- Differences between two steps -------------------------------------------------------------------------------

    def add_differences(self) -> None:
        for index in range(len(self._watches) - 1):
            first, second = self._watches[index].calls, self._watches[index + 1].calls
            has_other_shapes = False
            for one, other in self._pairs(first, second):
                if one.shapes != other.shapes:
                    if not has_other_shapes:
                        shapes = f"{_text(one.shapes)}, then {_text(other.shapes)}"
                        self._add("", "changing_shape", f"{_shown(one)} gets shapes {shapes}", one.location)
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
            names = ["nothing" if call is None else f"{_shown(call)} at {call.location}" for call in here]
            place = next((call.location for call in here if call is not None), None)
            cause = f"one step calls {names[0]}, the next {names[1]}"
            self._add("", "changing_operators", cause, place)
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
            if memory._cdata != now._cdata:
                cause = f"{_shown(one)} reads a tensor of shape {list(shape)} from another memory at each step"
                self._add("memory", "host_copy", cause, one.location)

    def _add_number(self, call: Call, before: Any, after: Any, index: int) -> None:
        values = f"{_text(before)}, then {_text(after)}"
        if isinstance(call.owner, torch.optim.Optimizer):
            self._add_optimizer_number(call, call.owner, values, index)
            return
        if call.owner is not None:
            cause = f"{type(call.owner).__name__} computes with another number at each step ({values})"
            self._add("number", "stale_number", cause, call.location, scheduler_remedy())
            return
        self._add("number", "stale_number", f"{_shown(call)} gets the number {values}", call.location)

    def _add_optimizer_number(self, call: Call, optimizer: torch.optim.Optimizer, values: str, index: int) -> None:
        kind = type(optimizer).__name__
        groups = [self._fixed[i].numbers.get(id(optimizer), []) for i in (index, index + 1, index + 2)]
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
                        remedy = rate_remedy(optimizer) if key == "lr" else None
                        self._add(("group", key), "stale_number", cause, call.location, remedy)
        if _counts_steps(optimizer) or not found:
            cause = f"{kind} computes with its step count as a Python number ({_shown(call)} gets {values})"
            if ("stale_number", call.location, "read") not in self._seen:
                self._add("read", "stale_number", cause, call.location, step_count_remedy(optimizer))


def _counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    return any("step" in state for state in optimizer.state.values() if isinstance(state, dict))


def _shown(call: Call) -> str:
    """The name of a call as users write it."""
    name = call.name.removeprefix("aten.").removeprefix("gradscale_ext.")
    return name.rpartition(".")[0] or name


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
