"""The calls of PyTorch that a step makes, with their numbers, shapes and memory, and how two steps differ in them.

`CapturedStep` compares the captured step with a plain one, and `diagnose_capture` compares two plain steps.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _context
from ..diagnosis import lines
from ..diagnosis.lines import Location
from .problems import Problem, scheduler_remedy, step_count_remedy, text_of
from .state import memory_of

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NUMBERS = (int, float, complex, str)
_MOST = 16
"""Elements of the longest tensor made of a list of numbers that are compared as numbers."""
#: Operators that write to running statistics, which their schemas do not mark.
_WRITE_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}


class Place(NamedTuple):
    """Where a call of PyTorch comes from."""

    location: Location | None
    """The user's innermost line; None in threads of autograd."""
    library: str
    """The file of PyTorch whose Python code made the call for the user, such as "optim/adam.py"."""
    is_ours: bool
    """True if this package made the call for the user."""
    owner: Any
    """The optimizer or scheduler whose step made the call."""

    @classmethod
    def of_caller(cls) -> Place:
        """Walk from the call to the user's innermost frame."""
        library, is_ours, owner = "", False, None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            is_library, of_torch, of_ours = _origin(frame.f_code.co_filename, lines.LIBRARY_PATHS)
            if not is_library:
                break
            library, is_ours = of_torch or library, is_ours or of_ours
            if of_torch.startswith("optim/"):
                own = frame.f_locals.get("self")
                owner = own if isinstance(own, torch.optim.Optimizer | LRScheduler) else owner
            frame = frame.f_back
        location = None if frame is None else Location(frame.f_code.co_filename, frame.f_lineno)
        return cls(location, library, is_ours, owner)


@functools.cache
def _origin(file: str, libraries: tuple[str, ...]) -> tuple[bool, str, bool]:
    """True for a file of a library, its name if it is of PyTorch, and True if it is of this package's functions."""
    of_torch = file[len(_TORCH) :] if file.startswith(_TORCH) else ""
    return file.startswith(libraries), of_torch, file.startswith(_PACKAGE) and not file.startswith(_HERE)


@dataclass
class TorchCall:
    """A call of PyTorch by the step, as it is compared with the same call of another step."""

    name: str
    numbers: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    place: Place
    is_backward: bool
    keys: tuple[int, ...] = ()
    """For each tensor, its memory; 0 for tensors without their own."""
    addresses: tuple[int, ...] = ()
    """For each tensor, the address of its first element, or the negative number of the memory that the step made; 0 if
    it may differ between two steps."""
    scalars: tuple[Any, ...] = ()
    """Values of tensors of the host with one element, which kernels get as numbers; None for other tensors."""

    @property
    def location(self) -> Location | None:
        """The user's line."""
        return self.place.location

    @property
    def shown(self) -> str:
        """The name as users write it."""
        name = self.name.removeprefix("aten.").removeprefix("gradscale_ext.")
        return name.rpartition(".")[0] or name


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The calls of one step, and the memory that they made, read and wrote to."""

    def __init__(self, arguments: Iterable[torch.Tensor], state: Iterable[torch.Tensor] = ()) -> None:
        """Keep the memory of the tensors that the step gets and changes by name."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[TorchCall] = []
        self.location: Location | None = None
        self._arguments, self._state = _memory(arguments), _memory(state)
        self._made: dict[int, tuple[StorageWeakRef, int, Location | None]] = {}
        self.foreign: dict[int, torch.UntypedStorage] = {}
        """Memory that existed before the step, or that was made unseen. A graph that reads it must keep it."""
        self.written: dict[int, tuple[str, Location | None]] = {}
        """Memory that operators wrote to, with the first one and its line."""
        self.schedulers: dict[Location | None, str] = {}
        """Lines on which the step calls schedulers, with the kind of scheduler."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the step in this context."""

        def set_attribute(scheduler: LRScheduler, name: str, value: Any) -> None:
            self.schedulers[lines.users_line()] = type(scheduler).__name__  # one that consists of others comes last
            object.__setattr__(scheduler, name, value)

        patch = mock.patch.object(LRScheduler, "__setattr__", set_attribute)
        with _context.showing_operators(), patch, self:
            yield

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled modules stay compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            call = self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self.after(call, func, args, kwargs, result)
        return result

    def call(self, name: str, leaves: list[Any]) -> TorchCall:
        """A call that is about to be made, with the leaves of its arguments."""
        place = Place.of_caller()
        self.location = place.location or self.location
        if place.location is None:
            place = place._replace(location=self.location)
        numbers = tuple([leaf for leaf in leaves if isinstance(leaf, _NUMBERS)])
        shapes = tuple([leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return TorchCall(name, numbers, shapes, place, is_backward=torch._C._current_graph_task_id() != -1)

    def before(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchCall:
        """Note a call of an operator that is about to be made."""
        leaves = leaves_in([*args, *kwargs.values()])
        call = self.call(_name_of(operator), leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        memories = [memory_of(tensor) for tensor in tensors]
        if call.name == "aten.lift_fresh.default":  # what numbers of the host have become
            (made,) = tensors
            if made.numel() <= _MOST and not made.is_meta:
                call.numbers += tuple(made.flatten().tolist())
            self._add_made(memories)
        call.keys = tuple([0 if memory is None else memory._cdata for memory in memories])
        call.addresses = tuple(map(self._address, tensors, memories))
        call.scalars = tuple(map(_scalar, tensors, memories))
        self.calls.append(call)
        given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(operator)]
        for memory in _memory(leaves_in(given)).values() if given else ():
            if not self.makes(memory):
                self.note_write(memory, call)
        return call

    def after(self, call: TorchCall, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note the memory that a call made, which its operands do not have."""
        self._add_made(own for own in _memory(leaves_in([result])).values() if own._cdata not in call.keys)

    def note_write(self, memory: torch.UntypedStorage, call: TorchCall) -> None:
        """Note a write to memory that the step did not make."""
        self.written.setdefault(memory._cdata, (call.shown, call.location))

    def _add_made(self, memories: Iterable[torch.UntypedStorage | None]) -> None:
        for memory in memories:
            if memory is not None and (key := memory._cdata) not in self._state and key not in self._arguments:
                self._made[key] = StorageWeakRef(memory), len(self._made) + 1, self.location  # type: ignore[no-untyped-call]

    def makes(self, memory: torch.UntypedStorage | None) -> bool:
        """True if the step has made the memory."""
        return memory is not None and self._has_made(memory._cdata)

    def _has_made(self, key: int) -> bool:
        return key in self._made and not self._made[key][0].expired()  # type: ignore[no-untyped-call]

    def _address(self, tensor: torch.Tensor, memory: torch.UntypedStorage | None) -> int:
        if memory is None or memory._cdata in self._arguments or not tensor.numel():
            return 0
        if self.makes(memory):
            return -self._made[memory._cdata][1]
        if memory._cdata not in self._state:
            self.foreign[memory._cdata] = memory
        return tensor.data_ptr()

    def finish(self) -> None:
        """Forget memory that nothing else holds after the step: code that makes no visible calls, such as compiled
        code, has made and freed it. Call this when the frames of the step have gone."""
        unseen = {key for key, memory in self.foreign.items() if torch._C._storage_Use_Count(memory._cdata) <= 1}
        for call in self.calls:
            if not unseen.isdisjoint(call.keys):
                pairs = zip(call.keys, call.addresses, strict=True)
                call.addresses = tuple([0 if key in unseen else address for key, address in pairs])
        self.written = {key: found for key, found in self.written.items() if key not in unseen}

    def reads_of(self, other: Record) -> list[tuple[TorchCall, tuple[int, ...]]]:
        """Calls that read memory which another step made and something has kept, with the shapes of these tensors."""
        kept = {key for key in self.foreign if other._has_made(key)}
        operands = ((call, *pair) for call in self.calls for pair in zip(call.keys, call.shapes, strict=False))
        return [(call, shape) for call, key, shape in operands if key in kept]

    def line_that_made(self, memory: torch.UntypedStorage) -> Location | None:
        """The line on which the step made memory."""
        return self._made[memory._cdata][2] if self.makes(memory) else None

    def written_elsewhere(self) -> list[tuple[str, Location | None]]:
        """Operators that wrote to memory that is neither an argument nor part of the state, and their lines."""
        known = {*self._arguments, *self._state}
        return [found for key, found in self.written.items() if key not in known]


def leaves_in(values: Iterable[Any]) -> list[Any]:
    """The values, and in the place of lists, tuples and dicts what is in them."""
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple | dict):
            leaves += leaves_in(value.values() if isinstance(value, dict) else value)
        else:
            leaves.append(value)
    return leaves


def _memory(tensors: Iterable[Any]) -> dict[int, torch.UntypedStorage]:
    """The memory of the tensors among values."""
    found = [memory_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return {memory._cdata: memory for memory in found if memory is not None}


_name_of = functools.cache(str)


@functools.cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    arguments = operator._schema.arguments
    if operator._schema.name in _WRITE_STATISTICS:
        return tuple((i, a.name) for i, a in enumerate(arguments) if a.name in ("running_mean", "running_var"))
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _scalar(tensor: torch.Tensor, memory: torch.UntypedStorage | None) -> Any:
    return None if memory is None or tensor.dim() or tensor.device.type != "cpu" else tensor.item()


# ---- How two steps differ --------------------------------------------------------------------------------------------


def differences(then: Record, now: Record, device: torch.device) -> Iterator[Problem]:
    """The differences between two steps, in the order of the calls, with what they were in each step.

    The key of a problem with memory is "replaced" if a tensor from before the first step has become another one from
    before the second."""
    has_other_shapes = False
    seen: set[str] = set()
    for one, other in _pairs(then.calls, now.calls):
        if one is None or other is None or one.name != other.name:
            yield _different_operators(one, other)
        elif one.shapes != other.shapes:
            if not has_other_shapes:
                cause = f"{one.shown} gets shapes {text_of(one.shapes)}, then {text_of(other.shapes)}"
                yield Problem("changing_shape", cause, location=other.location)
            has_other_shapes = True
        else:
            yield from _different_numbers(one, other, has_other_shapes, seen)
            yield from _different_operands(one, other, device.type == "cpu", seen)


def _pairs(
    first: Sequence[TorchCall], second: Sequence[TorchCall]
) -> Iterator[tuple[TorchCall | None, TorchCall | None]]:
    """Calls at the same places of two steps: the beginnings and ends of the sequences, as far as they are equal, and
    between them the first calls that differ."""
    shorter, begin, end = min(len(first), len(second)), 0, 0
    while begin < shorter and first[begin].name == second[begin].name:
        begin += 1
    while end < shorter - begin and first[-1 - end].name == second[-1 - end].name:
        end += 1
    yield from zip(first[:begin], second[:begin], strict=True)
    if begin + end < max(len(first), len(second)):
        one, other = (calls[begin] if begin < len(calls) - end else None for calls in (first, second))
        yield one, other
    if end:
        yield from zip(first[-end:], second[-end:], strict=True)


def _different_operators(one: TorchCall | None, other: TorchCall | None) -> Problem:
    calls = [call for call in (one, other) if call is not None]
    names = ["nothing" if call is None else f"{call.shown} at {call.location}" for call in (one, other)]
    remedy = scheduler_remedy() if any(isinstance(call.place.owner, LRScheduler) for call in calls) else ""
    cause = f"one step calls {names[0]}, the next {names[1]}"
    return Problem("changing_operators", cause, remedy, calls[0].location, key="operators")


def _different_numbers(one: TorchCall, other: TorchCall, has_other_shapes: bool, seen: set[str]) -> Iterator[Problem]:
    for then, now in zip(one.numbers, other.numbers, strict=False):
        if not same_number(then, now) and not (has_other_shapes and isinstance(then, int)):
            yield from _different_number(other, then, now, seen)
            return


def _different_operands(one: TorchCall, other: TorchCall, is_host: bool, seen: set[str]) -> Iterator[Problem]:
    for shape, before, after, then, now in zip(
        one.shapes, one.addresses, other.addresses, one.scalars, other.scalars, strict=False
    ):
        is_replaced = before > 0 < after != before
        # On a CPU, tensors of the host that stay where they are may be written to.
        if None not in (then, now) and (not is_host or is_replaced):
            if not same_number(then, now):
                yield from _different_number(other, then, now, seen)
        elif before and after and before != after:
            cause = f"{one.shown} reads a tensor of shape {list(shape)} from another memory at each step"
            key = "replaced" if is_replaced else "memory"
            yield Problem("host_copy", cause, location=other.location, key=key)


def _different_number(call: TorchCall, then: Any, now: Any, seen: set[str]) -> Iterator[Problem]:
    """Nothing for a number in the backward pass that was seen in the forward pass, and for a scheduler, which has a
    problem of its own. The key is "option" if a number in the parameter groups may be the cause."""
    values, owner = f"{text_of(then)}, then {text_of(now)}", call.place.owner
    if isinstance(owner, LRScheduler) or (call.is_backward and values in seen):
        return
    seen.add(values)
    cause, remedy, key = f"{call.shown} gets the number {values}", "", "number"
    if isinstance(owner, torch.optim.Optimizer):
        is_on_device = all(group.get("fused") or group.get("capturable") for group in owner.param_groups)
        counts = any("step" in state for state in owner.state.values() if isinstance(state, dict))
        cause = f"{type(owner).__name__} computes with its step count as a Python number ({call.shown} gets {values})"
        remedy, key = step_count_remedy(owner), "read" if counts and not is_on_device else "option"
    yield Problem("stale_number", cause, remedy, call.location, key)


def same_number(one: Any, other: Any) -> bool:
    """True for equal numbers of one type, with NaN equal to itself."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return bool(one == other)
