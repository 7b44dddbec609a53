"""The operators that a step calls, with their numbers, shapes and memory. `CapturedStep` and `diagnose_capture` compare
such records of two steps."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _context
from ..diagnosis.lines import Location, users_frame, users_line
from .graphs import replaced, seeming_to_capture
from .state import memory_of

_MOST = 16
"""Elements of the longest tensor made of a list of numbers that are compared as numbers."""
#: Operators that write to running statistics, which their schemas do not mark.
_WRITE_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}


@dataclass
class Call:
    """A call of PyTorch by the step, as it is compared with the same call of another step."""

    name: str
    numbers: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    location: Location | None
    addresses: tuple[int, ...] = ()
    """For each tensor, the address of its first element, or the negative number of the memory that the step made."""
    scalars: tuple[Any, ...] = ()
    """Values of tensors of the host with one element, which kernels get as numbers; None for other tensors."""

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

    def note(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Note a call that is about to be made."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return self._note(operator, args, kwargs)

    def _note(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        frame = users_frame()
        if frame is not None:  # threads of autograd have no frame of the user's
            self.location = Location(frame.f_code.co_filename, frame.f_lineno)
        operands = list(tensors_in((args, kwargs)))
        name = str(operator)
        numbers = tuple(leaf for leaf in leaves_in((args, kwargs)) if isinstance(leaf, int | float | complex | str))
        if name == "aten.lift_fresh.default":  # what numbers of the host have become
            if operands[0].numel() <= _MOST and not operands[0].is_meta:
                numbers += tuple(operands[0].flatten().tolist())
            self.note_made(operands, [])
        shapes = tuple(tuple(tensor.shape) for tensor in operands)
        addresses = tuple(map(self._address, operands))
        call = Call(name, numbers, shapes, self.location, addresses, tuple(map(_scalar, operands)))
        self.calls.append(call)
        for tensor in written_by(operator, args, kwargs):
            memory = memory_of(tensor)
            if memory is not None and not self._makes(memory):
                self.written.setdefault(memory._cdata, (memory, call.shown, self.location))
        return call

    def note_made(self, result: Any, operands: list[torch.Tensor]) -> None:
        """Note the memory that a call made, which its operands do not have."""
        before = {memory._cdata for memory in map(memory_of, operands) if memory is not None}
        for tensor in tensors_in(result):
            memory = memory_of(tensor)
            if memory is None or memory._cdata in before or memory._cdata in self._state:
                continue
            if memory._cdata not in self._arguments:
                reference = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
                self._made[memory._cdata] = reference, len(self._made) + 1, self.location

    def _makes(self, memory: torch.UntypedStorage) -> bool:
        found = self._made.get(memory._cdata)
        return found is not None and not found[0].expired()  # type: ignore[no-untyped-call]

    def _address(self, tensor: torch.Tensor) -> int:
        memory = memory_of(tensor)
        if memory is None or memory._cdata in self._arguments or not tensor.numel():
            return 0
        if self._makes(memory):
            return -self._made[memory._cdata][1]
        if memory._cdata not in self._state:
            self.foreign[memory._cdata] = memory
            self._owners[tensor.data_ptr()] = memory._cdata
        return tensor.data_ptr()

    def is_temporary(self, address: int) -> bool:
        """True if an address is of memory that the step made unseen."""
        return self._owners.get(address) in self.temporary

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
        return self._made[memory._cdata][2] if self._makes(memory) else None

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
        self._record.note(func, args, kwargs)
        result = func(*args, **kwargs)
        self._record.note_made(result, list(tensors_in((args, kwargs))))
        return result


@contextlib.contextmanager
def recording(record: Record) -> Iterator[None]:
    """Record the operators in this context. PyTorch answers questions about a capture as during one."""
    kind, call = torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.LRScheduler.step

    def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        record.schedulers[type(scheduler).__name__] = users_line()
        return call(scheduler, *args, **kwargs)

    with _context.showing_operators(), seeming_to_capture(), replaced(kind, "step", step), Recorder(record):
        yield


def difference(then: Record, now: Record, device: torch.device) -> tuple[str, Location | None, bool] | None:
    """The first difference of two records: what it is, its line, and True if only other memory is read."""
    is_host = device.type == "cpu"
    moved = None
    for one, other in zip(then.calls, now.calls, strict=False):
        if one.name != other.name:
            was = f"{one.shown} at {one.location}" if one.location else one.shown
            return f"the step calls {other.shown}, but the captured step called {was}", other.location, False
        if one.shapes != other.shapes:
            return f"{one.shown} gets shapes {other.shapes}, but the graph has {one.shapes}", other.location, False
        for before, after in zip(one.numbers, other.numbers, strict=False):
            if not same_number(before, after):
                text = f"{one.shown} gets the number {text_of_number(after)}, but the graph keeps"
                return f"{text} {text_of_number(before)}", other.location, False
        for index, (before, after) in enumerate(zip(one.addresses, other.addresses, strict=True)):
            was, value = one.scalars[index], other.scalars[index]
            is_number = was is not None and value is not None and (not is_host or before > 0 < after != before)
            if is_number and not same_number(was, value):
                text = f"{one.shown} gets {text_of_number(value)} from a tensor of the CPU, but the graph keeps"
                return f"{text} {text_of_number(was)}", other.location, False
            is_other = before and after and before != after and moved is None and not is_number
            if is_other and not (then.is_temporary(before) or now.is_temporary(after)):
                text = f"{one.shown} reads a tensor of shape {list(one.shapes[index])} from another memory"
                moved = text, other.location, before > 0 < after
    if len(then.calls) != len(now.calls):
        longer = then.calls if len(then.calls) > len(now.calls) else now.calls
        call = longer[min(len(then.calls), len(now.calls))]
        which = "the captured step" if longer is then.calls else "the step"
        return f"only {which} calls {call.shown}", call.location, False
    return moved


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


def leaves_in(value: Any) -> Iterator[Any]:
    """The leaves of the arguments of an operator."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_in(item)
    else:
        yield value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among them."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, torch.Tensor))


@functools.cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    arguments = operator._schema.arguments
    if operator._schema.name in _WRITE_STATISTICS:
        return tuple((i, a.name) for i, a in enumerate(arguments) if a.name in ("running_mean", "running_var"))
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def written_by(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that an operator writes to."""
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(operator)]
    return list(tensors_in(given))


def _scalar(tensor: torch.Tensor) -> Any:
    if tensor.dim() or tensor.device.type != "cpu" or memory_of(tensor) is None:
        return None
    return tensor.item()
