"""What a CUDA graph of a learner step would get wrong, found by comparing plain steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.autograd import profiler_legacy

from .. import _context
from .arguments import Arguments, Given, Signature, argument, each_tensor, flatten, like, named_leaves, read, result
from .checks import Refusals, hook_problems, kept_graph_problems, mark_kept_graphs
from .graphs import seeming_to_capture
from .hooks import rehearsing, running
from .problems import Findings, Problem, text_of
from .record import differences, same_number
from .report import CaptureDiagnosis
from .snapshot import Snapshot
from .state import Item, State, memory_of
from .watch import Functions, Watch


@_context.in_eager_mode("diagnose_capture: call it outside of a function with fullgraph=True")
def diagnose_capture(step: Callable[..., Any], batches: Sequence[Any], *state: Any) -> CaptureDiagnosis:
    """Find what a CUDA graph of a learner step would get wrong, without a GPU.

    The step runs once on the first batch, so that optimizers make their state, then on each batch while its calls of
    PyTorch are watched, and once more under PyTorch's profiler. A graph repeats the calls of one step, with the same
    numbers, shapes and memory; so what differs between two steps on arguments of the same shapes, or waits for the
    device, is reported with its line, and so is what `CapturedStep` refuses or warns about. Afterwards everything in
    `state` (parameters, buffers, gradients, optimizers, schedulers, `training`), tensors that the step changed
    elsewhere, PyTorch's modes, and the random generators of PyTorch, Python and NumPy are as before, bit by bit, also
    if the step raises. What the step's Python counts or appends has moved.

    ==================  ================================================================================================
    stale_number        an operator's Python number differs between two steps, an optimizer reads one from a tensor, or
                        the step itself counts, or changes a mode, such as `training` or grad mode
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
        self.findings, self.watches = Findings(step), list[Watch]()
        self._signatures: list[Signature] = []

    def run(self, batches: Sequence[Any]) -> None:
        """Run the step on every batch, and on two of each signature of arguments."""
        self.findings.add(hook_problems(self._state))
        if running.owner is None:  # a captured step that asks has looked before its first call
            mark_kept_graphs(self._state)
            self.findings.add(kept_graph_problems(self._state))
        self._watch(batches[0])
        groups: dict[Signature | None, list[Any]] = {}
        for batch in batches:
            groups.setdefault(self._signature(batch), []).append(batch)
        for group in groups.values():
            last = None
            for batch in group if len(group) > 1 else group * 2:
                watch, returned = self._watch(batch)
                if last is not None:
                    self.findings.add(filter(self._is_new, differences(last[0], watch, self._device)))
                    self._compare_results(last[1], returned)
                last = watch, returned
        if not torch._C._autograd._profiler_enabled():  # by the user: there can be only one
            self._profile(batches[-1])

    def _is_new(self, problem: Problem) -> bool:
        """False for a consequence of something that is a finding already."""
        if problem.key == "option":
            options = problem.cause.partition(" ")[0] + ".param_groups"
            is_known = any(options in finding.cause for finding in self.findings.found)
            return not (is_known or self.findings.has_any("stale_number", problem.location))
        is_of_memory = problem.code == "host_copy"
        return not is_of_memory or (
            problem.key == "replaced" and not self.findings.has_any("unnamed_state", problem.location)
        )

    def _signature(self, batch: Any) -> Signature | None:
        """Which graph is right for a batch. Adds findings for arguments that `CapturedStep` refuses."""
        arguments = self._read(batch)
        if isinstance(arguments, Exception):
            cause, _, remedy = str(arguments).removeprefix("CapturedStep: ").partition("; ")
            self.findings.add([Problem("argument", cause, remedy)])
            return None
        for signature in self._signatures:
            if signature.structure != arguments.signature.structure:
                continue
            for (name, value), one, other in zip(
                arguments.leaves(), signature.leaves, arguments.signature.leaves, strict=True
            ):
                if isinstance(value, float) and one != other:
                    cause = f"{name} is another number in each batch: {one[1]}, then {other[1]}"
                    remedy = "pass a tensor, whose value may change"
                    self.findings.add([Problem("stale_number", cause, remedy, key=name)])
        self._signatures.append(arguments.signature)
        return arguments.signature

    def _read(self, batch: Any) -> Arguments | Exception:
        try:
            return read(batch if isinstance(batch, tuple) else (batch,), {}, self._device)
        except (TypeError, ValueError) as error:
            return error

    def _given(self, batch: Any) -> tuple[Arguments | None, list[torch.Tensor], Given]:
        """The arguments, copies of their tensors, which the step may write to, and arguments with these copies."""
        arguments = self._read(batch)
        if not isinstance(arguments, Exception):
            inputs = [like(tensor) for tensor in arguments.tensors]
            return arguments, inputs, arguments.build(inputs)
        args = each_tensor(lambda x: x.detach().clone().requires_grad_(x.requires_grad), batch)
        args = args if isinstance(batch, tuple) else (args,)
        return None, [leaf for _, leaf in named_leaves(args, argument) if isinstance(leaf, torch.Tensor)], (args, {})

    @contextlib.contextmanager
    def _as_captured(self, is_plain: bool = False) -> Iterator[None]:
        """In this context, the step runs as in a capture, with modules that are not compiled."""
        with (
            mock.patch.object(running, "owner", running.owner or self),
            rehearsing(self._state),
            torch.compiler.set_stance("force_eager"),
            contextlib.nullcontext() if is_plain else seeming_to_capture(),
        ):
            yield

    def _watch(self, batch: Any) -> tuple[Watch, Any]:
        """Run the step, and add what a single step shows, except the first one, which stands for a plain call."""
        is_first, is_second = not self.watches, len(self.watches) == 1
        before = None if is_first or is_second else self.watches[-1]
        arguments, inputs, given = self._given(batch)
        tensors = [item.value for item in self._state.tensors() if _exists_before(item, before)]
        watch = Watch(inputs, tensors, self._state.generators(), Findings(self._step) if is_first else self.findings)
        refusals = Refusals(self._step, self._state, arguments, inputs, given)
        self.watches.append(watch)
        drawing = refusals.before.host_generators.noting_lines()
        with self._as_captured(is_first), drawing, Functions(watch), watch.recording():
            returned = self._step(*given[0], **given[1])
        watch.find_seeds()
        watch.finish()
        if before is not None:
            self.findings.add(_survivors(before, watch))
        try:
            flatten(returned, result)
        except TypeError as error:
            cause = str(error).removeprefix("CapturedStep: ")
            remedy = "return tensors and numbers"
            self.findings.add([Problem("argument", cause, remedy, key="result")])
            returned = None
        for problem in refusals.problems(watch, returned):
            # A plain call may make state. Only the first one shows a mode that each call leaves changed.
            if problem.key.startswith("mode") or not (is_first or (is_second and problem.key == "made")):
                self.findings.add([problem])
        refusals.before.modes.restore(self._device)
        return watch, returned

    def _profile(self, batch: Any) -> None:
        """Run the step without modes: some operators read values inside of C++, and only there."""
        args, kwargs = self._given(batch)[2]
        with self._as_captured(), profiler_legacy.profile(with_stack=True) as profile:  # type: ignore[no-untyped-call]
            self._step(*args, **kwargs)
        self.watches[-1].find_reads_in_operators(profile.function_events or ())

    def _compare_results(self, one: Any, other: Any) -> None:
        """Find numbers and strings in the results that differ. A step that reads tensors has a finding."""
        if any(finding.code == "sync" for finding in self.findings.found):
            return
        after = dict(named_leaves(other, result))
        for place, value in named_leaves(one, result):
            now = after.get(place)
            if isinstance(value, int | float | str) and type(value) is type(now) and not same_number(value, now):
                where = f" in {result(place)}" if place else ""
                cause = f"the step returns {text_of(value)}, then {text_of(now)}{where}"
                remedy = "return a tensor of the device, or compute the number outside of the step"
                self.findings.add([Problem("stale_number", cause, remedy, key=place)])


def _survivors(before: Watch, watch: Watch) -> Iterator[Problem]:
    for call, shape in watch.reads_of(before):
        cause = f"{call.shown} reads a tensor of shape {list(shape)} that the step before made; a graph would read the "
        cause += "one of the step that was captured"
        remedy = "keep it in a tensor that exists before the step, write to it with copy_(), and name it in the state; "
        remedy += "for gradients, pass set_to_none=False to zero_grad()"
        yield Problem("unnamed_state", cause, remedy, call.location, "survivor")


def _exists_before(item: Item, before: Watch | None) -> bool:
    """True for tensors that a graph may read: those that a step makes for the next one are not."""
    if item.role == "gradient" and before is not None:
        return not before.makes(memory_of(item.value))
    return item.role != "attribute"
