"""What a CUDA graph of a learner step would get wrong, found by comparing plain steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler_legacy

from .. import _context, _structures
from .arguments import Arguments, Form, argument, flatten, like, read, refuse_result
from .checks import Problem, Refusals, hook_problems, kept_graph_problems, mark_kept_graphs
from .graphs import seeming_to_capture
from .hooks import Inside, hook_location, is_inside_another, rehearsing
from .record import Difference, differences, recording, same_number, text_of_number
from .remedies import scheduler_remedy, step_count_remedy
from .report import CaptureDiagnosis, Findings
from .snapshot import Snapshot
from .state import Item, State
from .watch import Functions, Watch, counts_steps


@_context.in_eager_mode("diagnose_capture: call it outside of a function with fullgraph=True")
def diagnose_capture(step: Callable[..., Any], batches: Sequence[Any], *state: Any) -> CaptureDiagnosis:
    """Find what a CUDA graph of a learner step would get wrong, without a GPU.

    The step runs once on the first batch, so that optimizers make their state, then on each batch while its calls of
    PyTorch are watched, and once more under PyTorch's profiler. A graph repeats the calls of one step, with the same
    numbers, shapes and memory; so what differs between two steps on arguments of one form, or waits for the device, is
    reported with its line, and so is what `CapturedStep` refuses or warns about. Afterwards everything in `state`
    (parameters, buffers, gradients, optimizers, schedulers, `training`), tensors that the step changed elsewhere, and
    the random generators of PyTorch, Python and NumPy are as before, bit by bit, also if the step raises. What the
    step's Python counts or appends has moved.

    ==================  ================================================================================================
    stale_number        an operator's Python number differs between two steps, an optimizer reads one from a tensor, or
                        the step itself counts
    sync                the step waits for the device: `item()`, `if`, a boolean index, `print` and so on
    changing_shape      shapes differ between two steps
    changing_operators  the operators differ between two steps
    host_copy           a tensor is made on the host in the step, or read from another memory at each step
    generator           random numbers come from a generator that a graph does not know
    python_hook         a hook on a module, parameter or optimizer, which a replay does not run; `GradientMonitor` may
    unnamed_state       a tensor outside of `state` is changed or left for the next step; or an earlier loss is kept
    argument            the step writes to an argument, or arguments or results are of types that no graph has
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
    >>> diagnosis = diagnose_capture(
    ...     step, [torch.ones(4, 2), torch.zeros(4, 2)], model, optimizer
    ... )
    >>> [(finding.code, finding.source) for finding in diagnosis.findings]
    [('stale_number', 'optimizer.step()')]
    """
    _check(step, batches)
    own = State("diagnose_capture", state)
    if name := own.uninitialized():
        raise ValueError(f"diagnose_capture: {name} is uninitialized; call its lazy module once before")
    before, diagnosis = Snapshot(own), _Diagnosis(step, own)
    try:
        diagnosis.run(batches)
    finally:
        for watch in reversed(diagnosis.watches):
            watch.restore_foreign()
        before.restore()
    return CaptureDiagnosis(diagnosis.findings.found, len(diagnosis.watches[-1].calls))


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


class _Diagnosis:
    """The runs of a step, and what they show."""

    def __init__(self, step: Callable[..., Any], state: State) -> None:
        self._step, self._state, self._device = step, state, state.device()
        self.findings, self.watches = Findings(), list[Watch]()
        self._forms: list[Form] = []
        self._values = set[str]()

    def run(self, batches: Sequence[Any]) -> None:
        """Run the step on every batch, and on two of each form of arguments."""
        problems = list(hook_problems(self._state))
        if not is_inside_another(self):  # a captured step that asks has looked before its first call
            mark_kept_graphs(self._state)
            problems += kept_graph_problems(self._state)
        for problem in problems:
            self._add(problem)
        self._watch(batches[0])
        groups: dict[Form, list[Any]] = {}
        for batch in batches:
            groups.setdefault(self._form(batch), []).append(batch)
        for group in groups.values():
            last = None
            for batch in group if len(group) > 1 else group * 2:
                watch, result = self._watch(batch)
                if last is not None:
                    for found in differences(last[0], watch, self._device):
                        self._add_difference(found)
                    self._compare_results(last[1], result)
                last = watch, result
        if not torch._C._autograd._profiler_enabled():  # by the user: there can be only one
            self._profile(batches[-1])

    def _form(self, batch: Any) -> Form:
        """Which graph is right for a batch. Adds findings for arguments that `CapturedStep` refuses."""
        arguments = self._read(batch)
        if isinstance(arguments, Exception):
            text = str(arguments).removeprefix("CapturedStep: ")
            cause, _, remedy = text.partition("; ")
            self._findings_of_arguments(cause, remedy)
            return None
        for form in self._forms:
            for (place, value), one, other in zip(arguments.leaves, form[1], arguments.form[1], strict=False):
                if isinstance(value, float) and form[0] == arguments.form[0] and one != other:
                    cause = f"{argument(place)} is another number in each batch: {one[1]}, then {other[1]}"
                    self.findings.add("stale_number", cause, None, "pass a tensor, whose value may change", key=place)
        self._forms.append(arguments.form)
        return arguments.form

    def _findings_of_arguments(self, cause: str, remedy: str) -> None:
        self.findings.add("argument", cause, None, remedy or None, key=cause)

    def _read(self, batch: Any) -> Arguments | Exception:
        try:
            return read(batch if isinstance(batch, tuple) else (batch,), {}, self._device)
        except (TypeError, ValueError) as error:
            return error

    def _given(self, batch: Any) -> tuple[Arguments | None, list[torch.Tensor], Any]:
        """The arguments, copies of their tensors, which the step may write to, and arguments with these copies."""
        arguments = self._read(batch)
        if not isinstance(arguments, Exception):
            inputs = [like(value) for _, value in arguments.tensors()]
            return arguments, inputs, arguments.build(inputs)
        copies: list[torch.Tensor] = []

        def copied(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            copies.append(value.detach().clone().requires_grad_(value.requires_grad))
            return copies[-1]

        args = batch if isinstance(batch, tuple) else (batch,)
        return None, copies, (_structures.mapped("diagnose_capture", copied, args), {})

    def _watch(self, batch: Any) -> tuple[Watch, Any]:
        """Run the step, and add what a single step shows, except the first one, which stands for a plain call."""
        is_first, is_second = not self.watches, len(self.watches) == 1
        before = None if is_first or is_second else self.watches[-1]
        arguments, inputs, given = self._given(batch)
        tensors = [item.value for item in self._state.tensors() if _exists_before(item, before)]
        watch = Watch(inputs, tensors, self._state.generators(), Findings() if is_first else self.findings)
        refusals = Refusals(self._step, self._state, arguments, inputs, given)
        self.watches.append(watch)
        with (
            Inside(self),
            rehearsing(self._state),
            torch.compiler.set_stance("force_eager"),
            contextlib.nullcontext() if is_first else seeming_to_capture(),
            refusals.before.host_generators.noting_lines(),
            Functions(watch),
            recording(watch),
        ):
            result = self._step(*given[0], **given[1])
        watch.find_seeds()
        watch.finish()
        if before is not None:
            self._add_survivors(before, watch)
        try:
            leaves = flatten(result, refuse_result)[1]
        except TypeError as error:
            cause = str(error).removeprefix("CapturedStep: ")
            self.findings.add("argument", cause, hook_location(self._step), "return tensors and numbers", key="result")
            result, leaves = None, None
        for problem in refusals.problems(watch, result):
            # A plain call may make state. Only the first one shows a mode that each call leaves changed.
            if problem.key == "mode" or not (is_first or (is_second and problem.key == "made")):
                self._add(problem)
        return watch, leaves

    def _profile(self, batch: Any) -> None:
        """Run the step without modes: some operators read values inside of C++, and only there."""
        _, _, (args, kwargs) = self._given(batch)
        with (
            Inside(self),
            rehearsing(self._state),
            seeming_to_capture(),
            torch.compiler.set_stance("force_eager"),
            profiler_legacy.profile() as profile,  # type: ignore[no-untyped-call]
        ):
            self._step(*args, **kwargs)
        self.watches[-1].find_reads_in_operators(profile.function_events or ())

    def _add(self, problem: Problem) -> None:
        key = problem.key or ("" if problem.location else problem.cause)
        self.findings.add(problem.code, problem.cause, problem.location, problem.remedy, key=key)

    def _add_survivors(self, before: Watch, watch: Watch) -> None:
        alive = before.survivors()
        owners = {memory._cdata for memory in watch.reads_of(alive)}
        for call in watch.calls:
            for shape, address in zip(call.shapes, call.addresses, strict=False):
                if watch.owner_of(address) in owners:
                    self.findings.add(
                        "unnamed_state",
                        f"{call.shown} reads a tensor of shape {list(shape)} that the step before made; a graph would "
                        "read the one of the step that was captured",
                        call.location,
                        "keep it in a tensor that exists before the step, write to it with copy_(), and name it in the "
                        "state; for gradients, pass set_to_none=False to zero_grad()",
                        key="survivor",
                    )

    def _add_difference(self, found: Difference) -> None:
        """Report what differs between two steps."""
        kind, then, now, (one, other), _ = found
        values = f"{text_of_number(one)}, then {text_of_number(other)}"
        if then is None or now is None or kind == "operators":
            names = ["nothing" if call is None else f"{call.shown} at {call.location}" for call in (then, now)]
            owners = [call.place.owner for call in (then, now) if call is not None]
            is_schedule = any(isinstance(owner, torch.optim.lr_scheduler.LRScheduler) for owner in owners)
            remedy = scheduler_remedy() if is_schedule else None
            place = next((call.location for call in (then, now) if call is not None), None)
            self.findings.add("changing_operators", f"one step calls {names[0]}, the next {names[1]}", place, remedy)
        elif kind == "shapes":
            self.findings.add("changing_shape", f"{found.shown} gets shapes {values}", then.location)
        elif kind == "number":
            self._add_number(found, values)
        elif found.is_replaced and not self.findings.has_any("unnamed_state", then.location):
            cause = f"{found.shown} reads a tensor of shape {list(one)} from another memory at each step"
            self.findings.add("host_copy", cause, then.location, key="memory")

    def _add_number(self, found: Difference, values: str) -> None:
        assert found.then is not None
        call, owner = found.then, found.then.place.owner
        if call.is_backward and values in self._values:
            return  # of the forward pass
        self._values.add(values)
        if owner is None:
            cause = f"{found.shown} gets the number {values}"
            self.findings.add("stale_number", cause, call.location, key="number")
        elif isinstance(owner, torch.optim.Optimizer):  # that the step calls a scheduler is a finding already
            kind = type(owner).__name__
            is_on_device = all(group.get("fused") or group.get("capturable") for group in owner.param_groups)
            is_option = any(f"{kind}.param_groups" in finding.cause for finding in self.findings.found)
            if (counts_steps(owner) and not is_on_device) or not is_option:
                cause = f"{kind} computes with its step count as a Python number ({call.shown} gets {values})"
                self.findings.add("stale_number", cause, call.location, step_count_remedy(owner), key="read")

    def _compare_results(self, one: Any, other: Any) -> None:
        """Find numbers and strings in the results that differ. A step that reads tensors has a finding."""
        if one is None or other is None or any(finding.code == "sync" for finding in self.findings.found):
            return
        for (place, value), (also, now) in zip(one, other, strict=False):
            is_constant = place == also and isinstance(value, int | float | str) and type(value) is type(now)
            if is_constant and not same_number(value, now):
                where = f" in its result{place}" if place else ""
                cause = f"the step returns {text_of_number(value)}, then {text_of_number(now)}{where}"
                remedy = "return a tensor of the device, or compute the number outside of the step"
                self.findings.add("stale_number", cause, hook_location(self._step), remedy, key=place)


def _exists_before(item: Item, before: Watch | None) -> bool:
    """True for tensors that a graph may read: those that a step makes for the next one are not."""
    if item.role == "gradient" and before is not None:
        return not before.has_made(item.value)
    return item.role != "attribute"
