"""Calls of a step that wait for the device, copy from the host, or draw from generators that a graph does not know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..diagnosis.lines import Location, users_line
from .generators import TorchGenerators
from .hooks import default_devices
from .record import Call, Record, leaves_in, text_of_number
from .remedies import INSIDE_OF_OPERATORS, INSTEAD_OF_READS, RESEEDING_REMEDY, WAITS_IN_LIBRARIES, step_count_remedy
from .report import Findings
from .state import memory_of

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
_READ_IN_OPERATORS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
#: Functions that check values on a CPU only: on a GPU they do not wait.
_CHECK_ON_CPUS = {"quantile", "nanquantile", "one_hot"}
#: The same for events of the profiler: operators, and nodes of the backward pass.
_READS_OF_CPUS = re.compile(
    r"aten::(std|std_mean|_assert_async|one_hot|quantile|nanquantile|masked_fill_?|index|_?index_put\w*|_fused_\w+|_?linalg_\w+_ex"
    r"|_amp_\w+)$|(Max|Min|Median|Nanmedian|LinalgSolveEx|LinalgInvEx)Backward\d+$|gradscale"
)
_NODE = re.compile(r"(\w+)Backward\d+$")
#: Functions that make a tensor of numbers or arrays, on the host.
_MADE_ON_HOST = {"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "scalar_tensor", "new_tensor"}
#: Functions that make a tensor on the CPU if no device is given.
_FACTORIES = {
    "zeros", "ones", "full", "empty", "arange", "linspace", "logspace", "eye", "rand", "randn", "randint", "randperm",
    "tril_indices", "triu_indices", "hann_window", "hamming_window",
}  # fmt: skip
#: Functions with numbers that no operator shows.
_WITH_NUMBERS = {*_MADE_ON_HOST, "__setitem__"}


class Watch(Record):
    """A record of a step, which adds findings about its single calls, and can put back what the step wrote to."""

    def __init__(
        self,
        arguments: Iterable[torch.Tensor],
        state: Iterable[torch.Tensor],
        generators: Sequence[torch.Generator],
        findings: Findings,
    ) -> None:
        """`generators`: of the state, which a graph knows."""
        super().__init__(arguments, state)
        self._findings, self._generators = findings, generators
        self._contents: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._drawn: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._random = TorchGenerators(generators)
        self._function: tuple[str, tuple[Any, ...], dict[str, Any]] = ("", (), {})
        self._reads: dict[int, tuple[str, str]] = {}

    def has_made(self, tensor: torch.Tensor) -> bool:
        """True if the step made the memory of a tensor."""
        memory = memory_of(tensor)
        return memory is not None and self.makes(memory)

    def restore_foreign(self) -> None:
        """Put back what the step changed outside of the state: memory and generators."""
        for memory, contents in self._contents:
            if memory.nbytes() == contents.nbytes():
                memory.copy_(contents)
        for generator, state in self._drawn.values():
            generator.set_state(state)

    def call(self, name: str, leaves: list[Any]) -> Call:
        """A call that is about to be made. Only operators draw from PyTorch's generators: other changes are seeds."""
        call = super().call(name, leaves)
        self.find_seeds()
        return call

    def find_seeds(self) -> None:
        """Find generators whose state was set since the last operator."""
        for name in self._random.changed():
            cause = f"the step sets the state of {name}; a graph draws on from where the call before ended"
            self._findings.add("generator", cause, self.location, RESEEDING_REMEDY, key=name)
        self._random.save()

    def note_write(self, memory: torch.UntypedStorage, call: Call) -> None:
        """Keep what memory outside of the state had before the first write."""
        if not any(memory._cdata in known for known in (self._arguments, self._state, self.written)):
            self._contents.append((memory, memory.clone()))  # type: ignore[no-untyped-call]
        super().note_write(memory, call)

    # ---- Functions: what users write -------------------------------------------------------------------------------

    def on_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that a function mode saw, and note what no operator will show."""
        name = getattr(function, "__name__", "")
        outer, self._function = self._function, (name, args, kwargs)
        try:
            is_ours = str(getattr(function, "_schema", "")).startswith("gradscale_ext::")
            if is_ours or name in _READS or name in _WITH_NUMBERS or name in _FACTORIES or name == "to":
                self._note_function(str(function) if is_ours else name, args, kwargs)
            return function(*args, **kwargs)
        finally:
            self._function = outer

    def _note_function(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self.call(name, leaves_in((args, kwargs)))
        if call.place.owner is not None or (name == "to" and not _is_moved_to_cpu(args, kwargs)):
            return  # the operators show what PyTorch's optimizers do
        self.calls.append(call)
        data = args[1:] if name == "new_tensor" else args or tuple(kwargs.values())
        if name in _READS or name == "to":
            self._add_read(call, _READS.get(name, "to('cpu')"), name)
        elif name in _MADE_ON_HOST and not isinstance(data[0], torch.Tensor) and not call.place.is_ours:
            self._add_host_copy(call, f"{'' if name == 'new_tensor' else 'torch.'}{name} makes")
        elif name in _FACTORIES and self._is_of_user(call) and not any(map(kwargs.get, ("device", "out", "generator"))):
            self._add_host_copy(call, f"torch.{name} without device= makes")

    @staticmethod
    def _is_of_user(call: Call) -> bool:
        """True for a call that is made on the CPU unless the user's line says something else."""
        return not (call.place.library or call.place.is_ours or default_devices())

    def _add_host_copy(self, call: Call, maker: str) -> None:
        self._findings.add("host_copy", f"{maker} a tensor on the host at each step", call.location)

    # ---- Operators ---------------------------------------------------------------------------------------------------

    def note(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Note a call of an operator, and whether it waits for the device."""
        call = super().note(operator, args, kwargs)
        is_users = not call.place.is_ours and call.place.owner is None
        if call.name == "aten.lift_fresh.default" and self._function[0] not in _WITH_NUMBERS and is_users:
            self._add_host_copy(call, "an array or a list of numbers becomes")
        for generator in leaves_in((args, kwargs)):
            if isinstance(generator, torch.Generator) and self._is_unknown(generator):
                self._drawn.setdefault(_address(generator), (generator, generator.get_state()))
                cause = f"{call.shown} draws from a generator of {generator.device} that a graph does not know"
                self._findings.add("generator", cause, call.location)
        by_user = self._function[0] in _READS and call.place.owner is None  # found already
        if (read := self._read(operator, args, kwargs)) and not by_user and not self._checks_on_cpu(args):
            if call.name != "aten._local_scalar_dense.default":
                self._add_read(call, *read)
            else:
                self._reads[id(call)] = read
        return call

    def note_result(self, call: Call, result: Any) -> None:
        """Note what a call made. A number that an optimizer reads is one that a graph would keep."""
        operands = call.operands
        super().note_result(call, result)
        self._random.save()
        if (read := self._reads.pop(id(call), None)) is not None:
            if isinstance(call.place.owner, torch.optim.Optimizer):
                self._add_read_of_optimizer(call, call.place.owner, operands[0], result)
            else:
                self._add_read(call, *read)

    def _add_read(self, call: Call, what: str, name: str) -> None:
        """Add a finding: the step waits for the device."""
        function, cause = self._function[0], f"{what} waits for the device"
        remedy = INSTEAD_OF_READS.get(function, INSTEAD_OF_READS.get("print" if name == "__repr__" else name))
        for library, (prefix, instead) in WAITS_IN_LIBRARIES.items():
            if call.place.library.startswith(library):
                cause, remedy = f"{prefix} ({cause})", instead
        self._findings.add("sync", cause, call.location, remedy, key=call.place.library)

    def _add_read_of_optimizer(
        self, call: Call, optimizer: torch.optim.Optimizer, tensor: torch.Tensor, value: Any
    ) -> None:
        dicts = *(state for state in optimizer.state.values() if isinstance(state, dict)), *optimizer.param_groups
        held = ((key, own) for each in dicts for key, own in each.items() if isinstance(own, torch.Tensor))
        name = next((key for key, own in held if own.data_ptr() == tensor.data_ptr()), "")
        if not name:  # computed from one of them
            has_tensor = any(isinstance(group.get("lr"), torch.Tensor) for group in optimizer.param_groups)
            name = "step" if counts_steps(optimizer) else "lr" if has_tensor else ""
        what = {"step": "its step count", "lr": "its learning rate, a tensor,", "": "values"}.get(name, f"its {name}")
        kind = type(optimizer).__name__
        cause = f"{kind} reads {what} on the host; a graph keeps the number ({text_of_number(float(abs(value)))})"
        self._findings.add("stale_number", cause, call.location, step_count_remedy(optimizer), key="read")

    def _read(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
        """What waits for the device in an operator, and the operator's short name."""
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
        elif schema in ("aten::_to_copy", "aten::copy_"):
            source, to = (args[0], kwargs.get("device")) if schema == "aten::_to_copy" else (args[1], args[0].device)
            is_copied = isinstance(source, torch.Tensor) and source.device.type != "cpu"
            what = "a copy to the CPU" if is_copied and to and torch.device(to).type == "cpu" else None
        short = name.removeprefix("aten::").partition(".")[0].strip("_").removesuffix("_impl")
        return None if what is None else (what, short)

    def _checks_on_cpu(self, args: tuple[Any, ...]) -> bool:
        """True if the values are read to check them, which PyTorch does on a CPU only."""
        function, given, named = self._function
        if function == "one_hot":
            classes = named.get("num_classes", given[1] if len(given) > 1 else -1)
            return isinstance(classes, int) and classes >= 0 and args[0].device.type == "cpu"
        return function in _CHECK_ON_CPUS and args[0].device.type == "cpu"

    def _is_unknown(self, generator: torch.Generator) -> bool:
        defaults = [torch.default_generator]
        if generator.device.type == "cuda":
            defaults = list(torch.cuda.default_generators)
        # A mode gets another Python object for the generator at each call.
        return not any(_address(generator) == _address(one) for one in (*defaults, *self._generators))

    # ---- Events of the profiler: what no mode sees -------------------------------------------------------------------

    def find_reads_in_operators(self, events: Iterable[Any]) -> None:
        """Find operators that read a value inside of C++, from a run without modes."""
        events = list(events)
        lines = _Lines(self.calls, events)
        for event in events:
            if event.name not in _READ_IN_OPERATORS:
                continue
            outer = [event, *_outer(event)]
            names = [one.name for one in outer if one.name not in (*_READ_IN_OPERATORS, "aten::item")]
            if not any(name.startswith("aten::") or _NODE.search(name) for name in names):
                continue  # of Python, where a mode saw it
            if any(_READS_OF_CPUS.search(name) for name in names):
                continue
            name, line = lines.of(outer)
            is_hidden = line is None and not any(_NODE.search(one.name) for one in outer)  # in a print, for example
            if not is_hidden and (line is None or not self._findings.has_any("sync", line)):
                cause = f"{name} reads a value on the host, and waits for the device"
                self._findings.add("sync", cause, line, INSIDE_OF_OPERATORS.get(_short(name)), key=name)


class Functions(TorchFunctionMode):
    """Shows a watch the functions that users call."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.on_function(func, args, kwargs or {})


class _Lines:
    """Lines of events: the n-th event of a name in the forward pass is the n-th such call of the record."""

    def __init__(self, calls: list[Call], events: list[Any]) -> None:
        self._calls: dict[str, list[Call]] = {}
        self._events: dict[str, list[Any]] = {}
        for call in calls:
            if call.name.startswith("aten.") and not call.is_backward:
                self._calls.setdefault(_short(call.name), []).append(call)
        for event in events:
            if not any(_NODE.search(outer.name) for outer in (event, *_outer(event))):
                self._events.setdefault(_short(event.name), []).append(event)

    def of(self, outer: list[Any]) -> tuple[str, Location | None]:
        """The name of the outermost operator around an event, or of its node, and its line if it is known."""
        shown = ""
        for one in reversed(outer):
            node = _NODE.fullmatch(one.name)
            if not (one.name.startswith("aten::") or node) or one.name in ("aten::item", "aten::_local_scalar_dense"):
                continue
            name = _short(node[1] if node else one.name)
            shown = shown or (node[1] if node else one.name.removeprefix("aten::").lstrip("_"))
            calls, events = self._calls.get(name, []), self._events.get(name, [])
            # The last operator with the node's number has made it.
            found = [i for i, e in enumerate(events) if e is one or (node and e.sequence_nr == one.sequence_nr)]
            if found and calls and len(events) % len(calls) == 0:
                call = calls[found[-1] // (len(events) // len(calls))]
                return call.shown.lstrip("_") if node else shown, call.location
        return shown, None


def _outer(event: Any) -> Iterator[Any]:
    """The events around an event, the innermost first."""
    while (event := event.cpu_parent) is not None:
        yield event


def _short(name: str) -> str:
    """A name by which operators, calls and nodes can be compared: "linalgdet"."""
    return name.removeprefix("aten::").removeprefix("aten.").partition(".")[0].replace("_", "").lower()


def _address(generator: Any) -> int:
    return generator._cdata  # type: ignore[no-any-return]


def _is_moved_to_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for `.to("cpu")`. On a CPU, `.to(device)` may have the same arguments; the text of the line tells."""
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    line = users_line() if isinstance(target, str) and target == "cpu" else None
    return line is not None and re.search(r"""\.to\((device=)?["']cpu["']""", line.source) is not None


def counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer has a step count, a tensor."""
    return any("step" in state for state in optimizer.state.values() if isinstance(state, dict))
