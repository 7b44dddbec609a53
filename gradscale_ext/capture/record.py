"""The calls of PyTorch that a step makes, with their numbers, shapes and memory.

`CapturedStep` compares the records of the captured step and of a plain one, and `diagnose_capture` the records of two
plain steps.
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
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _context
from ..diagnosis import lines
from ..diagnosis.lines import Location, users_line
from .graphs import replaced
from .state import memory_of

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_SCHEDULER = torch.optim.lr_scheduler.LRScheduler
_NUMBERS = (int, float, complex, str)
_CONTAINERS = (list, tuple, dict)
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
            if of_torch:
                library = of_torch
                if library.startswith("optim/"):
                    own = frame.f_locals.get("self")
                    owner = own if isinstance(own, torch.optim.Optimizer | _SCHEDULER) else owner
            is_ours = is_ours or of_ours
            frame = frame.f_back
        location = None if frame is None else Location(frame.f_code.co_filename, frame.f_lineno)
        return cls(location, library, is_ours, owner)


@functools.cache
def _origin(file: str, libraries: tuple[str, ...]) -> tuple[bool, str, bool]:
    """True for a file of a library, its name if it is of PyTorch, and True if it is of this package's functions."""
    of_torch = file[len(_TORCH) :] if file.startswith(_TORCH) else ""
    return file.startswith(libraries), of_torch, file.startswith(_PACKAGE) and not file.startswith(_HERE)


@dataclass
class Call:
    """A call of PyTorch by the step, as it is compared with the same call of another step."""

    name: str
    numbers: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    place: Place
    is_backward: bool = False
    addresses: tuple[int, ...] = ()
    """For each tensor, the address of its first element, or the negative number of the memory that the step made."""
    scalars: tuple[Any, ...] = ()
    """Values of tensors of the host with one element, which kernels get as numbers; None for other tensors."""
    operands: Sequence[torch.Tensor] = ()
    """The tensors, while the call is being made."""
    memories: Sequence[torch.UntypedStorage | None] = ()
    """Their memory, while the call is being made."""

    @property
    def location(self) -> Location | None:
        """The user's line."""
        return self.place.location

    @property
    def shown(self) -> str:
        """The name as users write it."""
        name = self.name.removeprefix("aten.").removeprefix("gradscale_ext.")
        return name.rpartition(".")[0] or name


class Record:
    """The calls of one step, and the memory that they made, read and wrote to."""

    def __init__(self, arguments: Iterable[torch.Tensor], state: Iterable[torch.Tensor] = ()) -> None:
        """Keep the memory of the tensors that the step gets and changes by name."""
        self.calls: list[Call] = []
        self.location: Location | None = None
        self._arguments = {memory._cdata: memory for memory in map(memory_of, arguments) if memory is not None}
        self._state = {memory._cdata: memory for memory in map(memory_of, state) if memory is not None}
        self._made: dict[int, tuple[StorageWeakRef, int, Location | None]] = {}
        self._owners: dict[int, int] = {}
        """The memory of an address outside of the step's own."""
        self.foreign: dict[int, torch.UntypedStorage] = {}
        """Memory that existed before the step, or that was made unseen. A graph that reads it must keep it."""
        self.written: dict[int, tuple[torch.UntypedStorage, str, Location | None]] = {}
        """Memory that operators wrote to, with the first one and its line."""
        self.schedulers: dict[str, Location | None] = {}
        """Kinds of schedulers that the step calls, with the lines."""
        self.temporary: set[int] = set()
        """Foreign memory that nothing else held after the step, such as of compiled code."""

    def call(self, name: str, leaves: list[Any]) -> Call:
        """A call that is about to be made, with the leaves of its arguments."""
        place = Place.of_caller()
        self.location = place.location or self.location
        if place.location is None:
            place = place._replace(location=self.location)
        numbers = tuple([leaf for leaf in leaves if isinstance(leaf, _NUMBERS)])
        operands = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        is_backward = torch._C._current_graph_task_id() != -1
        return Call(name, numbers, tuple([x.shape for x in operands]), place, is_backward, operands=operands)

    def note(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Note a call of an operator that is about to be made."""
        call = self.call(_name_of(operator), leaves_in((*args, *kwargs.values())))
        call.memories = [memory_of(tensor) for tensor in call.operands]
        if call.name == "aten.lift_fresh.default":  # what numbers of the host have become
            (made,) = call.operands
            if made.numel() <= _MOST and not made.is_meta:
                call.numbers += tuple(made.flatten().tolist())
            self._add_made(call.memories)
        call.addresses = tuple(map(self._address, call.operands, call.memories))
        call.scalars = tuple(map(_scalar, call.operands, call.memories))
        self.calls.append(call)
        if _written_arguments(operator):
            for memory in map(memory_of, written_by(operator, args, kwargs)):
                if memory is not None and not self.makes(memory):
                    self.note_write(memory, call)
        return call

    def note_write(self, memory: torch.UntypedStorage, call: Call) -> None:
        """Note a write to memory that the step did not make."""
        self.written.setdefault(memory._cdata, (memory, call.shown, call.location))

    def note_result(self, call: Call, result: Any) -> None:
        """Note the memory that a call made, which its operands do not have."""
        before = {own._cdata for own in call.memories if own is not None}
        made = map(memory_of, tensors_in(result))
        self._add_made(own for own in made if own is not None and own._cdata not in before)
        call.operands = call.memories = ()

    def _add_made(self, memories: Iterable[torch.UntypedStorage | None]) -> None:
        for memory in memories:
            if memory is not None and (key := memory._cdata) not in self._state and key not in self._arguments:
                self._made[key] = StorageWeakRef(memory), len(self._made) + 1, self.location  # type: ignore[no-untyped-call]

    def makes(self, memory: torch.UntypedStorage) -> bool:
        """True if the step has made the memory."""
        found = self._made.get(memory._cdata)
        return found is not None and not found[0].expired()  # type: ignore[no-untyped-call]

    def _address(self, tensor: torch.Tensor, memory: torch.UntypedStorage | None) -> int:
        if memory is None or (key := memory._cdata) in self._arguments or not tensor.numel():
            return 0
        if self.makes(memory):
            return -self._made[key][1]
        address = tensor.data_ptr()
        if key not in self._state:
            self.foreign[key] = memory
            self._owners[address] = key
        return address

    def owner_of(self, address: int) -> int | None:
        """The foreign memory of an address; None if it is not foreign."""
        return self._owners.get(address)

    def is_temporary(self, address: int) -> bool:
        """True if an address is of memory that the step made unseen."""
        return self.owner_of(address) in self.temporary

    def add_written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note memory that operators wrote to without saying so."""
        for memory in map(memory_of, tensors):
            if memory is not None:
                self.written.setdefault(memory._cdata, (memory, "", None))

    def finish(self) -> None:
        """Find out which memory was made unseen. Call this after the step, when its frames have gone."""
        for key, memory in self.foreign.items():
            if torch._C._storage_Use_Count(memory._cdata) <= 1:
                self.temporary.add(key)

    def survivors(self) -> dict[int, StorageWeakRef]:
        """Memory that the step made and that still exists."""
        found = {key: reference for key, (reference, *_) in self._made.items()}
        return {key: one for key, one in found.items() if not one.expired()}  # type: ignore[no-untyped-call]

    def reads_of(self, memory: dict[int, StorageWeakRef]) -> list[torch.UntypedStorage]:
        """Foreign memory of this step that another one made."""
        return [
            own
            for key, own in self.foreign.items()
            if key in memory and not memory[key].expired()  # type: ignore[no-untyped-call]
        ]

    def line_that_made(self, memory: torch.UntypedStorage) -> Location | None:
        """The line on which the step made memory."""
        return self._made[memory._cdata][2] if self.makes(memory) else None

    def written_arguments(self) -> set[int]:
        """Keys of the arguments' memory that the step wrote to."""
        return self._arguments.keys() & self.written.keys()

    def written_elsewhere(self) -> list[tuple[str, Location | None]]:
        """Operators that wrote to memory that is neither an argument nor part of the state, and their lines."""
        known = {*self._arguments, *self._state, *self.temporary}
        return [(name, line) for key, (_, name, line) in self.written.items() if key not in known]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills a record with the calls of a step. Compiled modules stay compiled."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work in this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            call = self._record.note(func, args, kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self._record.note_result(call, result)
        return result


@contextlib.contextmanager
def recording(record: Record) -> Iterator[None]:
    """Record the operators in this context."""
    with _context.showing_operators(), _noting_schedulers(record), Recorder(record):
        yield


@contextlib.contextmanager
def _noting_schedulers(record: Record) -> Iterator[None]:
    def noting(call: Any) -> Any:
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if not (line := users_line()) or line not in record.schedulers.values():  # not a part of another scheduler
                record.schedulers.setdefault(type(scheduler).__name__, line)
            return call(scheduler, *args, **kwargs)

        return step

    left, kinds = [_SCHEDULER], set[Any]()
    while left:
        kinds.add(kind := left.pop())
        left += kind.__subclasses__()
    with contextlib.ExitStack() as work:
        for kind in kinds:
            if "step" in vars(kind):
                work.enter_context(replaced(kind, "step", noting(kind.step)))
        yield


class Difference(NamedTuple):
    """A call that differs between two steps."""

    kind: Literal["operators", "shapes", "number", "memory"]
    then: Call | None
    now: Call | None
    values: tuple[Any, Any] = (None, None)
    is_replaced: bool = False
    """True if a tensor from before the first step has become another one from before the second."""

    @property
    def shown(self) -> str:
        """The name of the operator."""
        call = self.then or self.now
        return "" if call is None else call.shown

    @property
    def location(self) -> Location | None:
        """The line in the second step, if it makes the call."""
        call = self.now or self.then
        return None if call is None else call.location


def differences(then: Record, now: Record, device: torch.device) -> Iterator[Difference]:
    """The differences between two steps, in the order of the calls."""
    has_other_shapes = False
    for one, other in _pairs(then.calls, now.calls):
        if one is None or other is None or one.name != other.name:
            yield Difference("operators", one, other)
        elif one.shapes != other.shapes:
            if not has_other_shapes:
                yield Difference("shapes", one, other, (one.shapes, other.shapes))
            has_other_shapes = True
        else:
            yield from _different_numbers(one, other, has_other_shapes)
            yield from _different_operands(one, other, then, now, device.type == "cpu")


def difference_text(found: Difference) -> str:
    """Say how a plain step differs from the one that was captured."""
    kind, then, now, (one, other), _ = found
    if then is None:
        return f"only the step calls {found.shown}"
    if now is None:
        return f"only the captured step calls {found.shown}"
    if kind == "operators":
        was = f"{then.shown} at {then.location}" if then.location else then.shown
        return f"the step calls {now.shown}, but the captured step called {was}"
    if kind == "shapes":
        return f"{found.shown} gets shapes {other}, but the graph has {one}"
    if kind == "number":
        return f"{found.shown} gets the number {text_of_number(other)}, but the graph keeps {text_of_number(one)}"
    return f"{found.shown} reads a tensor of shape {list(one)} from another memory"


def _pairs(first: list[Call], second: list[Call]) -> Iterator[tuple[Call | None, Call | None]]:
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


def _different_numbers(one: Call, other: Call, has_other_shapes: bool) -> Iterator[Difference]:
    for values in zip(one.numbers, other.numbers, strict=False):
        if not same_number(*values) and not (has_other_shapes and isinstance(values[0], int)):
            yield Difference("number", one, other, values)
            return


def _different_operands(one: Call, other: Call, then: Record, now: Record, is_host: bool) -> Iterator[Difference]:
    for index, (before, after) in enumerate(zip(one.addresses, other.addresses, strict=True)):
        values = one.scalars[index], other.scalars[index]
        if None not in values and (not is_host or before > 0 < after != before):
            if not same_number(*values):
                yield Difference("number", one, other, values)
        elif before and after and before != after and not then.is_temporary(before) and not now.is_temporary(after):
            yield Difference("memory", one, other, (one.shapes[index],) * 2, before > 0 < after)


def same_number(one: Any, other: Any) -> bool:
    """True for equal numbers of one type, with NaN equal to itself."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return bool(one == other)


def text_of_number(value: Any) -> str:
    """A number, or a tuple of numbers, in a message."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(text_of_number, value)) + "]"
    return repr(value)


def leaves_in(value: Any) -> list[Any]:
    """The leaves of the arguments of an operator."""
    if not isinstance(value, _CONTAINERS):
        return [value]
    leaves: list[Any] = []
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, _CONTAINERS):
            leaves += leaves_in(item)
        else:
            leaves.append(item)
    return leaves


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among them."""
    return [leaf for leaf in leaves_in(value) if isinstance(leaf, torch.Tensor)]


_name_of = functools.cache(str)


@functools.cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    arguments = operator._schema.arguments
    if operator._schema.name in _WRITE_STATISTICS:
        return tuple((i, a.name) for i, a in enumerate(arguments) if a.name in ("running_mean", "running_var"))
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def written_by(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that an operator writes to."""
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(operator)]
    return tensors_in(given)


def _scalar(tensor: torch.Tensor, memory: torch.UntypedStorage | None) -> Any:
    return None if memory is None or tensor.dim() or tensor.device.type != "cpu" else tensor.item()
