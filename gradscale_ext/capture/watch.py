"""Watching a step: its calls of PyTorch, with their numbers, shapes and places, and findings about single calls."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _context
from ..diagnosis.lines import NOT_THE_USERS, Location, users_frame, users_line
from .graphs import seeming_to_capture
from .remedies import INSTEAD_OF_READS, RESEEDING_REMEDY, step_count_remedy
from .report import Findings
from .snapshot import host_generators, states_of_torch
from .state import Item, memory_of

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_HERE)) + os.sep

#: Functions of Python that read a tensor's values, by the name that a function mode sees; what users write for them.
_READS = {
    "item": "item()", "tolist": "tolist()", "numpy": "numpy()", "__array__": "a conversion to NumPy", "cpu": "cpu()",
    "__float__": "float()", "__int__": "int()", "__index__": "a use as an index or size", "__complex__": "complex()",
    "__bool__": "a use as a condition (if, while, and, or, not, assert)", "__repr__": "print or str()",
    "__format__": "an f-string or format()", "__contains__": "`in`", "__dlpack__": "an export by DLPack",
    "equal": "torch.equal", "allclose": "torch.allclose", "is_nonzero": "is_nonzero()",
}  # fmt: skip
#: Operators whose results have as many elements as values decide, or that read values on the host.
_OPERATORS_THAT_READ = {
    "aten::_local_scalar_dense": "a tensor used as a number",
    "aten::nonzero": "nonzero",
    "aten::nonzero_numpy": "nonzero",
    "aten::argwhere": "argwhere",
    "aten::masked_select": "masked_select",
    "aten::equal": "torch.equal",
    "aten::_unique": "unique",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique_consecutive",
    "aten::unique_dim_consecutive": "unique_consecutive",
    "aten::bincount": "bincount",
    "aten::_linalg_check_errors": "a check of torch.linalg",
    "aten::normal.float_Tensor": "torch.normal with a tensor as std",
    "aten::normal.Tensor_Tensor": "torch.normal with a tensor as std",
}
_SCALERS, _DISTRIBUTIONS = "amp/grad_scaler.py", "distributions/"
_OWNERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
#: Functions that check values on a CPU only: on a GPU they do not wait.
_CHECK_ON_CPUS = {"quantile", "nanquantile", "one_hot"}
#: Operators that write to running statistics, which their schemas do not mark.
_WRITE_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
#: Functions that make a tensor of numbers or arrays, on the host.
_MADE_ON_HOST = {"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "scalar_tensor", "new_tensor"}
#: Functions with numbers that no operator shows.
_WITH_NUMBERS = {*_MADE_ON_HOST, "__setitem__"}


@dataclass
class Call:
    """A call of PyTorch by the step, as it is compared with the same call of the next step."""

    name: str
    numbers: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    location: Location | None
    library: str
    """The file of PyTorch whose Python code made the call for the user, such as "optim/adam.py"."""
    is_ours: bool
    """True if this package made the call for the user."""
    owner: Any
    """The optimizer or scheduler whose step made the call."""
    is_backward: bool
    """True in a backward pass."""
    foreign: tuple[tuple[torch.UntypedStorage, tuple[int, ...]], ...] = ()
    """Memory that existed before the step and belongs to neither the state nor the arguments, with tensors' shapes."""

    @property
    def shown(self) -> str:
        """The name as users write it."""
        name = self.name.removeprefix("aten.").removeprefix("gradscale_ext.")
        return name.rpartition(".")[0] or name


class Watch:
    """Records the calls of a step, and finds those that no graph can hold. `torch.compile` is off meanwhile."""

    def __init__(
        self,
        known: Iterable[torch.Tensor],
        generators: Sequence[torch.Generator],
        findings: Findings | None,
        before: Watch | None,
    ) -> None:
        """`known`: tensors of the state and of the arguments. `findings`: if given, the step is told that a graph is
        captured. `before`: the watch of the step before."""
        self._is_captured = findings is not None
        self._findings = findings or Findings()
        self._known = {memory._cdata: memory for memory in filter(None, map(memory_of, known))}
        self._generators = generators
        self._survivors = {} if before is None else before._alive(except_for=self._known)
        self._made: dict[int, tuple[StorageWeakRef, Location | None]] = {}
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._saved_generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._random, self._random_of_torch = host_generators(), states_of_torch(generators)
        self._function: tuple[str, tuple[Any, ...], dict[str, Any]] = ("", (), {})
        self._location: Location | None = None
        self.calls: list[Call] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls in this context."""
        with (
            _context.showing_operators(),
            seeming_to_capture() if self._is_captured else contextlib.nullcontext(),
            torch.compiler.set_stance("force_eager"),
            _Functions(self),
            _Operators(self),
        ):
            yield
        self._find_draws()

    def restore_foreign(self) -> None:
        """Put back what the step changed outside of the state: memory and generators."""
        for memory, contents in self._saved.values():
            if memory.nbytes() == contents.nbytes():
                memory.copy_(contents)
        for generator, state in self._saved_generators.values():
            generator.set_state(state)

    def _alive(self, except_for: Container[int]) -> dict[int, torch.UntypedStorage]:
        """Memory that the step made and that still exists."""
        found = {}
        for key, (reference, _) in self._made.items():
            if key not in except_for and not reference.expired():  # type: ignore[no-untyped-call]
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if storage is not None:
                    found[key] = storage
        return found

    # ---- Functions: what users write -------------------------------------------------------------------------------

    def on_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that a function mode saw, and note what no operator will show."""
        name = getattr(function, "__name__", "")
        outer, self._function = self._function, (name, args, kwargs)
        data = _first(args[1:] if name == "new_tensor" else args, kwargs)
        is_made = name in _MADE_ON_HOST and not isinstance(data, torch.Tensor)
        try:
            is_ours = str(getattr(function, "_schema", "")).startswith("gradscale_ext::")
            if name in _READS or name in _WITH_NUMBERS or is_ours or (name == "to" and _is_moved_to_cpu(args, kwargs)):
                call = self._call(str(function) if is_ours else name, args, kwargs)
                if call.owner is None:  # the operators show what PyTorch's optimizers do
                    self.calls.append(call)
                    if name in _READS or name == "to":
                        self._add_read(call, _READS.get(name, "to('cpu')"), name)
                    if is_made and not call.is_ours:  # the kernels get numbers without such tensors
                        self._add_host_copy(call, f"{'' if name == 'new_tensor' else 'torch.'}{name} makes")
            result = function(*args, **kwargs)
            if is_made:  # reported already: what reads it is no finding of its own
                self._note_made(result, [])
            return result
        finally:
            self._function = outer

    # ---- Operators ---------------------------------------------------------------------------------------------------

    def on_operator(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that a dispatch mode saw, and record it."""
        if operator.namespace == "profiler":
            return operator(*args, **kwargs)
        call = self._call(str(operator), args, kwargs)
        operands = list(_tensors((args, kwargs)))
        if call.name == "aten.lift_fresh.default":  # what numbers of the host have become
            self._note_made(operands, [])
            if self._function[0] not in _WITH_NUMBERS and not call.is_ours and call.owner is None:
                self._add_host_copy(call, "an array or a list of numbers becomes")
        if not call.is_ours:
            writes_number = self._function[0] == "__setitem__"  # PyTorch makes a tensor of it
            call.foreign = tuple(
                (memory, tuple(tensor.shape))
                for tensor in operands
                if (memory := self._foreign(tensor)) is not None and not (writes_number and tensor.dim() == 0)
            )
        self._find_memory(call, operands, _written(operator, args, kwargs))
        for generator in filter(self._is_unknown, _generators((args, kwargs))):
            self._saved_generators.setdefault(_address(generator), (generator, generator.get_state()))
            cause = f"{call.shown} draws from a generator of {generator.device} that a graph does not know"
            self._findings.add("generator", cause, call.location)
        read = self._read(operator, args, kwargs, call.owner is None)
        result = operator(*args, **kwargs)
        self._random_of_torch = states_of_torch(self._generators)
        is_scalar = call.name == "aten._local_scalar_dense.default"
        if is_scalar and call.owner is not None:
            call.numbers = (result,)
        if read is not None and is_scalar and isinstance(call.owner, torch.optim.Optimizer):
            self._add_read_of_optimizer(call, call.owner, operands[0])
        elif read is not None:
            self._add_read(call, *read)
        self._note_made(result, operands)
        self.calls.append(call)
        return result

    def _find_memory(self, call: Call, operands: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        for tensor in written:
            if self._foreign(tensor) is not None:
                cause = f"{call.shown} writes to a tensor of shape {list(tensor.shape)} that is not part of the state"
                self._findings.add("unnamed_state", cause, call.location, key="written")
            self._save(tensor)
        for tensor in operands:
            if self._key(tensor) in self._survivors:
                self._findings.add(
                    "unnamed_state",
                    f"{call.shown} reads a tensor of shape {list(tensor.shape)} that the step before made; a graph "
                    "would read the one of the step that was captured",
                    call.location,
                    "keep it in a tensor that exists before the step, write to it with copy_(), and name it in the "
                    "state; for gradients, pass set_to_none=False to zero_grad()",
                    key="survivor",
                )

    def _add_host_copy(self, call: Call, maker: str) -> None:
        self._findings.add("host_copy", f"{maker} a tensor on the host at each step", call.location)

    def _add_read(self, call: Call, what: str, name: str) -> None:
        """Add a finding: the step waits for the device."""
        function, cause = self._function[0], f"{what} waits for the device"
        remedy = INSTEAD_OF_READS.get(function, INSTEAD_OF_READS.get("print" if name == "__repr__" else name))
        if call.library == _SCALERS:
            cause = "GradScaler.step reads on the host whether gradients are finite"
            remedy = "an optimizer with fused=True, which skips such a step on the device"
        elif call.library.startswith(_DISTRIBUTIONS):
            cause = f"torch.distributions checks its arguments on the host ({cause})"
            remedy = "validate_args=False for the distribution"
        self._findings.add("sync", cause, call.location, remedy, key=call.library)

    def _add_read_of_optimizer(self, call: Call, optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> None:
        dicts = *(state for state in optimizer.state.values() if isinstance(state, dict)), *optimizer.param_groups
        held = ((key, value) for own in dicts for key, value in own.items() if isinstance(value, torch.Tensor))
        name = next((key for key, value in held if self._key(value) == self._key(tensor)), "")
        if not name:  # computed from one of them
            has_tensor = any(isinstance(group.get("lr"), torch.Tensor) for group in optimizer.param_groups)
            name = "step" if counts_steps(optimizer) else "lr" if has_tensor else ""
        what = {"step": "its step count", "lr": "its learning rate, a tensor,", "": "values"}.get(name, f"its {name}")
        kind = type(optimizer).__name__
        cause = f"{kind} reads {what} on the host; a graph keeps the number ({abs(call.numbers[0]):.6g})"
        self._findings.add("stale_number", cause, call.location, step_count_remedy(optimizer), key="read")

    def _call(self, name: str, args: Any, kwargs: Any) -> Call:
        frame = users_frame()
        if frame is not None:  # threads of autograd have no frame of the user's
            self._location = Location(frame.f_code.co_filename, frame.f_lineno)
        self._find_draws()
        shapes = tuple(tuple(tensor.shape) for tensor in _tensors((args, kwargs)))
        is_backward = torch._C._current_graph_task_id() != -1
        return Call(name, tuple(_numbers((args, kwargs))), shapes, self._location, *_caller(frame), is_backward)

    def _find_draws(self) -> None:
        """Find generators that have changed since the last operator. Only operators draw from PyTorch's."""
        states = host_generators()
        for library in [library for library, state in states.items() if state != self._random.get(library, state)]:
            cause = f"the step draws from {library}; a graph would repeat the numbers of one step"
            self._findings.add("generator", cause, self._location, key=library)
        self._random = states
        now = states_of_torch(self._generators)
        for name in [name for name, state in now.items() if state != self._random_of_torch.get(name, state)]:
            cause = f"the step sets the state of {name}; a graph draws on from where the call before ended"
            self._findings.add("generator", cause, self._location, RESEEDING_REMEDY, key=name)
        self._random_of_torch = now

    def _read(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by_user: bool
    ) -> tuple[str, str] | None:
        """What waits for the device in an operator, and the operator's short name."""
        function, *_ = self._function
        schema = operator._schema.name
        name = schema if schema in _OPERATORS_THAT_READ else str(operator).replace(".", "::", 1)
        what = _OPERATORS_THAT_READ.get(name)
        if schema in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            # A single value is filled in where the mask is True, without counting.
            only_masks = len(masks) == sum(index is not None for index in args[1])
            fills = schema != "aten::index" and args[2].numel() == 1 and only_masks
            what = "an index that is a mask" if masks and not fills else None
        elif schema == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            what = "repeat_interleave" if isinstance(args[0], torch.Tensor) else None
        elif schema in ("aten::_to_copy", "aten::copy_") and what is None:
            what = self._read_by_copying(schema, args, kwargs)
        if what is None or (by_user and function in _READS) or self._checks_on_cpu(args):
            return None
        return what, name.removeprefix("aten::").partition(".")[0].strip("_").removesuffix("_impl")

    def _checks_on_cpu(self, args: tuple[Any, ...]) -> bool:
        """True if the values are read to check them, which PyTorch does on a CPU only."""
        function, given, named = self._function
        if function == "one_hot":
            classes = named.get("num_classes", given[1] if len(given) > 1 else -1)
            return isinstance(classes, int) and classes >= 0 and args[0].device.type == "cpu"
        return function in _CHECK_ON_CPUS and args[0].device.type == "cpu"

    @staticmethod
    def _read_by_copying(schema: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        source, target = (args[0], kwargs.get("device")) if schema == "aten::_to_copy" else (args[1], args[0].device)
        if not isinstance(source, torch.Tensor) or source.device.type == "cpu" or target is None:
            return None
        return "a copy to the CPU" if torch.device(target).type == "cpu" else None

    # ---- Memory ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        memory = memory_of(tensor)
        return 0 if memory is None else memory._cdata

    def _foreign(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """The memory of a tensor that existed before the step, and is neither state nor an argument."""
        memory = memory_of(tensor)
        if memory is None or memory._cdata in self._known or memory._cdata in self._survivors:
            return None
        return None if self._makes(memory) else memory

    def _makes(self, memory: torch.UntypedStorage) -> bool:
        reference, _ = self._made.get(memory._cdata, (None, None))
        return reference is not None and not reference.expired()  # type: ignore[no-untyped-call]

    def has_made(self, tensor: torch.Tensor) -> bool:
        """True if the step made the memory of a tensor."""
        memory = memory_of(tensor)
        return memory is not None and self._makes(memory)

    def find_replaced(self, tensors: Iterable[Item]) -> None:
        """Add a finding for each tensor whose memory the step has made."""
        for name, tensor, *_ in tensors:
            if self.has_made(tensor):
                self._findings.add(
                    "unnamed_state",
                    f"the step replaces {name} by another tensor; a graph would read the one that was captured",
                    self._made[self._key(tensor)][1],
                    "keep one tensor, and write to it with copy_()",
                    key="replaced",
                )

    def _save(self, tensor: torch.Tensor) -> None:
        memory = memory_of(tensor)
        is_foreign = self._foreign(tensor) is not None or self._key(tensor) in self._survivors
        if memory is not None and is_foreign and memory._cdata not in self._saved:
            self._saved[memory._cdata] = memory, memory.clone()  # type: ignore[no-untyped-call]

    def _note_made(self, result: Any, operands: list[torch.Tensor]) -> None:
        """Note the memory that a call made, which its operands do not have."""
        before = {*self._known, *self._survivors, *map(self._key, operands), 0}
        for tensor in _tensors(result):
            if (key := self._key(tensor)) not in before:
                reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._made[key] = reference, self._location

    def _is_unknown(self, generator: torch.Generator) -> bool:
        defaults = [torch.default_generator]
        if generator.device.type == "cuda":
            defaults = list(torch.cuda.default_generators)
        # A mode gets another Python object for the generator at each call.
        return not any(_address(generator) == _address(one) for one in (*defaults, *self._generators))


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.on_function(func, args, kwargs or {})


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.on_operator(func, args, kwargs or {})


def _address(generator: Any) -> int:
    return generator._cdata  # type: ignore[no-any-return]


def _is_moved_to_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for `.to("cpu")`. On a CPU, `.to(device)` may have the same arguments; the text of the line tells."""
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    line = users_line() if isinstance(target, str) and target == "cpu" else None
    return line is not None and re.search(r"""\.to\((device=)?["']cpu["']""", line.source) is not None


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


def _generators(value: Any) -> Iterator[torch.Generator]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Generator))


def _numbers(value: Any) -> Iterator[Any]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, int | float | complex | str))


@functools.cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    arguments = operator._schema.arguments
    if operator._schema.name in _WRITE_STATISTICS:
        return tuple((i, a.name) for i, a in enumerate(arguments) if a.name in ("running_mean", "running_var"))
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that an operator writes to."""
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(operator)]
    return list(_tensors(given))


def _caller(frame: FrameType | None) -> tuple[str, bool, Any]:
    """The file of PyTorch that the user's frame called into, True if this package is between them and the call, and the
    optimizer or scheduler whose code runs."""
    library, is_ours, owner = "", False, None
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        file = here.f_code.co_filename
        if file.startswith(_TORCH):
            library = file[len(_TORCH) :]
            if library.startswith("optim/") and isinstance(own := here.f_locals.get("self"), _OWNERS):
                owner = own
        is_ours = is_ours or (file.startswith(_PACKAGE) and not file.startswith(_HERE))
        here = here.f_back
    return library, is_ours, owner


def counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer has a step count, a tensor."""
    return any("step" in state for state in optimizer.state.values() if isinstance(state, dict))


def location_of(error: BaseException) -> Location | None:
    """The user's innermost line that an error passed."""
    found, place = None, error.__traceback__
    while place is not None:
        file = place.tb_frame.f_code.co_filename
        if not file.startswith(NOT_THE_USERS):
            found = Location(file, place.tb_lineno)
        place = place.tb_next
    return found
