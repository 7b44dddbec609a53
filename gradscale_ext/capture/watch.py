"""Calls of a step that wait for the device, copy from the host, or draw from generators that a graph does not know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..diagnosis.lines import LIBRARY_PATHS, Location, users_line
from .generators import TorchGenerators
from .modes import default_devices
from .problems import Findings, Problem, step_count_remedy, text_of
from .record import Record, TorchCall, leaves_in

_CONDITION = (
    "torch.where or a product with a mask in place of the condition; a check that raises goes before or after the "
    "step; an early stop goes between captured steps, one for each epoch or batch"
)
_MASK = "torch.where(mask, x, 0), or a product with the mask, so that the shape does not depend on values"
#: Functions of Python that read a tensor's values, by the name that a function mode sees: what users write for them,
#: and what to write instead.
_READS = {
    "item": ("item()", ""),
    "tolist": ("tolist()", ""),
    "numpy": ("numpy()", ""),
    "__array__": ("a conversion to NumPy", ""),
    "cpu": ("cpu()", ""),
    "to": ("to('cpu')", ""),
    "__float__": ("float()", ""),
    "__int__": ("int()", ""),
    "__index__": ("a use as an index or size", ""),
    "__complex__": ("complex()", ""),
    "__bool__": ("a use as a condition (if, while, and, or, not, assert)", _CONDITION),
    "__repr__": ("print or str()", "print after the step, what the step returns"),
    "__format__": ("an f-string or format()", ""),
    "__contains__": ("`in`", ""),
    "__dlpack__": ("an export by DLPack", ""),
    "equal": ("torch.equal", ""),
    "allclose": ("torch.allclose", ""),
    "is_nonzero": ("is_nonzero()", ""),
}
_NONZERO = (
    "nonzero",
    "torch.where(mask, x, 0), or topk with a fixed number, so that the shape does not depend on values",
)
_UNIQUE = (
    "x.sort(), and a comparison of neighbours, whose shapes do not depend on values; or unique() outside of the step"
)
_NORMAL = "torch.normal with a tensor as std", "mean + std * torch.randn_like(mean)"
#: The same for operators whose results have as many elements as values decide, or that read values on the host.
_OPERATORS_THAT_READ = {
    "aten::_local_scalar_dense": ("a tensor used as a number", ""),
    "aten::nonzero": _NONZERO,
    "aten::nonzero_numpy": _NONZERO,
    "aten::argwhere": ("argwhere", ""),
    "aten::masked_select": (
        "masked_select",
        "torch.where(mask, x, 0) and sums over mask, so that the shape does not depend on values",
    ),
    "aten::equal": ("torch.equal", ""),
    "aten::_unique": ("unique", _UNIQUE),
    "aten::_unique2": ("unique", _UNIQUE),
    "aten::unique_dim": ("unique", _UNIQUE),
    "aten::unique_consecutive": ("unique_consecutive", _UNIQUE),
    "aten::unique_dim_consecutive": ("unique_consecutive", _UNIQUE),
    "aten::bincount": (
        "bincount",
        "torch.zeros(n, device=x.device).scatter_add_(0, x, torch.ones_like(x, dtype=torch.float32))",
    ),
    "aten::_linalg_check_errors": (
        "a check of torch.linalg",
        "the function of torch.linalg that does not check, such as inv_ex, cholesky_ex, solve_ex",
    ),
    "aten::normal.float_Tensor": _NORMAL,
    "aten::normal.Tensor_Tensor": _NORMAL,
}
_LOG_DETERMINANT = "torch.linalg.lu_factor_ex(x)[0].diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)"
#: What to write for operators and functions that read a value inside of C++, mostly in the backward pass.
_INSIDE_OF_OPERATORS = {
    "onehot": "one_hot(x, num_classes=n)",
    "prod": "torch.exp(torch.log(x).sum(dim)) for positive x, or a product of slices",
    "cumprod": "torch.exp(torch.log(x).cumsum(dim)) for positive x",
    "linalgdet": f"{_LOG_DETERMINANT} for its logarithm",
    "linalgslogdet": _LOG_DETERMINANT,
    "histc": "torch.histc(x, bins, min, max) with numbers for min and max",
    "embeddingrenorm": "an Embedding without max_norm, and x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1)",
    **dict.fromkeys(
        (
            "linalgsvd", "linalgsvdvals", "svd", "linalgeigh", "linalgeigvalsh", "linalgmatrixnorm", "linalgpinv",
            "linalglstsq", "linalgcond", "linalgmatrixrank",
        ),
        "compute it outside of the step: on a GPU, too, the host reads whether the algorithm has converged",
    ),
}  # fmt: skip
#: By the file of PyTorch that waits: why, and what to write.
_WAITS_IN_LIBRARIES = {
    "amp/grad_scaler.py": (
        "GradScaler.step reads on the host whether gradients are finite",
        "an optimizer with fused=True, which skips such a step on the device",
    ),
    "distributions/": (
        "torch.distributions checks its arguments on the host",
        "torch.distributions.Distribution.set_default_validate_args(False), before the step",
    ),
    "optim/swa_utils.py": (
        "AveragedModel reads on the host how many models it has averaged",
        "call update_parameters() outside of the step",
    ),
}
_EVENTS_OF_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
#: Functions that check values on a CPU only: on a GPU they do not wait.
_CHECK_ON_CPUS = {"quantile", "nanquantile", "one_hot"}
#: The same for events of the profiler: operators, and nodes of the backward pass.
_READS_OF_CPUS = re.compile(
    r"aten::(std|std_mean|_assert_async|one_hot|quantile|nanquantile|masked_fill_?|index|_?index_put\w*|_fused_\w+|_?linalg_\w+_ex"
    r"|_amp_\w+)$|(Max|Min|Median|Nanmedian|LinalgSolveEx|LinalgInvEx)Backward\d+$|gradscale"
)
_OPERATOR_OR_NODE = re.compile(r"aten::(\w+)|(\w+)Backward\d+$")
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

    def _add(self, *problems: Problem) -> None:
        self._findings.add(problems)

    def restore_foreign(self) -> None:
        """Put back what the step changed outside of the state: memory and generators."""
        for memory, contents in self._contents:
            if memory.nbytes() == contents.nbytes():
                memory.copy_(contents)
        for generator, state in self._drawn.values():
            generator.set_state(state)

    def call(self, name: str, leaves: list[Any]) -> TorchCall:
        """A call that is about to be made. Only operators draw from PyTorch's generators: other changes are seeds."""
        call = super().call(name, leaves)
        self.find_seeds()
        return call

    def find_seeds(self) -> None:
        """Find generators whose state was set since the last operator."""
        for name in self._random.changed():
            cause = f"the step sets the state of {name}; a graph draws on from where the call before ended"
            remedy = "seed before the steps; for the same numbers at each step, draw them before and pass them as an "
            remedy += "argument; leave modules that draw, such as dropout, out of torch.utils.checkpoint"
            self._add(Problem("generator", cause, remedy, self.location, key=name))
        self._random.save()

    def note_write(self, memory: torch.UntypedStorage, call: TorchCall) -> None:
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
            if is_ours or name in _READS or name in _WITH_NUMBERS or name in _FACTORIES:
                self._note_function(str(function) if is_ours else name, args, kwargs)
            return function(*args, **kwargs)
        finally:
            self._function = outer

    def _note_function(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self.call(name, leaves_in([*args, *kwargs.values()]))
        if call.place.owner is not None or (name == "to" and not _is_moved_to_cpu(args, kwargs)):
            return  # the operators show what PyTorch's optimizers do
        self.calls.append(call)
        data = args[1:] if name == "new_tensor" else args or tuple(kwargs.values())
        is_users = not (call.place.library or call.place.is_ours or default_devices())
        if name in _READS:
            self._add_read(call, *_READS[name])
        elif name in _MADE_ON_HOST and not isinstance(data[0], torch.Tensor) and not call.place.is_ours:
            self._add_host_copy(call, f"{'' if name == 'new_tensor' else 'torch.'}{name} makes")
        elif name in _FACTORIES and is_users and not any(map(kwargs.get, ("device", "out", "generator"))):
            self._add_host_copy(call, f"torch.{name} without device= makes")

    def _add_host_copy(self, call: TorchCall, maker: str) -> None:
        self._add(Problem("host_copy", f"{maker} a tensor on the host at each step", location=call.location))

    # ---- Operators ---------------------------------------------------------------------------------------------------

    def before(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchCall:
        """Note a call of an operator, and generators that it draws from."""
        call = super().before(operator, args, kwargs)
        is_users = not call.place.is_ours and call.place.owner is None
        if call.name == "aten.lift_fresh.default" and self._function[0] not in _WITH_NUMBERS and is_users:
            self._add_host_copy(call, "an array or a list of numbers becomes")
        for generator in leaves_in([*args, *kwargs.values()]):
            if isinstance(generator, torch.Generator) and self._is_unknown(generator):
                self._drawn.setdefault(_key_of(generator), (generator, generator.get_state()))
                cause = f"{call.shown} draws from a generator of {generator.device} that a graph does not know"
                self._add(Problem("generator", cause, location=call.location))
        return call

    def after(self, call: TorchCall, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note what a call made, and whether it waited for the device."""
        super().after(call, operator, args, kwargs, result)
        self._random.save()
        owner, read = call.place.owner, self._read(operator, args, kwargs)
        if read is None or (self._function[0] in _READS and owner is None) or self._checks_on_cpu(args):
            return  # functions that read have been found already
        if isinstance(owner, torch.optim.Optimizer) and call.name == "aten._local_scalar_dense.default":
            self._add_read_of_optimizer(call, owner, args[0], result)
        else:
            self._add_read(call, *read)

    def _add_read(self, call: TorchCall, what: str, remedy: str) -> None:
        """Add a finding: the step waits for the device."""
        cause, remedy = f"{what} waits for the device", _INSIDE_OF_OPERATORS.get(_short(self._function[0]), remedy)
        for library, (prefix, instead) in _WAITS_IN_LIBRARIES.items():
            if call.place.library.startswith(library):
                cause, remedy = f"{prefix} ({cause})", instead
        if call.place.is_ours:
            remedy = "leave out check=True and nonfinite='error' in the step; print statistics after it"
        self._add(Problem("sync", cause, remedy, call.location, key=call.place.library))

    def _add_read_of_optimizer(
        self, call: TorchCall, optimizer: torch.optim.Optimizer, tensor: torch.Tensor, value: Any
    ) -> None:
        dicts = *(state for state in optimizer.state.values() if isinstance(state, dict)), *optimizer.param_groups
        held = ((key, own) for each in dicts for key, own in each.items() if isinstance(own, torch.Tensor))
        name = next((key for key, own in held if own.data_ptr() == tensor.data_ptr()), "")
        if not name:  # computed from one of them
            has_tensor = any(isinstance(group.get("lr"), torch.Tensor) for group in optimizer.param_groups)
            name = "step" if any("step" in each for each in dicts) else "lr" if has_tensor else ""
        what = {"step": "its step count", "lr": "its learning rate, a tensor,", "": "values"}.get(name, f"its {name}")
        kind = type(optimizer).__name__
        cause = f"{kind} reads {what} on the host; a graph keeps the number ({text_of(float(abs(value)))})"
        self._add(Problem("stale_number", cause, step_count_remedy(optimizer), call.location, key="read"))

    def _read(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
        """What waits for the device in an operator, and what to write instead."""
        schema = operator._schema.name
        if schema in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            # A single value is filled in where the mask is True, without counting.
            only_masks = len(masks) == sum(index is not None for index in args[1])
            fills = schema != "aten::index" and args[2].numel() == 1 and only_masks
            remedy = _MASK if schema == "aten::index" else "torch.where(mask, values, x), with values of the shape of x"
            return ("an index that is a mask", remedy) if masks and not fills else None
        if schema == "aten::repeat_interleave":
            is_read = isinstance(args[0], torch.Tensor) and kwargs.get("output_size") is None
            return ("repeat_interleave", "repeat_interleave(..., output_size=n)") if is_read else None
        if schema in ("aten::_to_copy", "aten::copy_"):
            source, to = (args[0], kwargs.get("device")) if schema == "aten::_to_copy" else (args[1], args[0].device)
            is_copied = isinstance(source, torch.Tensor) and source.device.type != "cpu"
            return ("a copy to the CPU", "") if is_copied and to and torch.device(to).type == "cpu" else None
        with_overload = str(operator).replace(".", "::", 1)
        return _OPERATORS_THAT_READ.get(schema, _OPERATORS_THAT_READ.get(with_overload))

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
        return not any(_key_of(generator) == _key_of(one) for one in (*defaults, *self._generators))

    # ---- Events of the profiler: what no mode sees -------------------------------------------------------------------

    def find_reads_in_operators(self, events: Iterable[Any]) -> None:
        """Find operators that read a value inside of C++, from a run without modes. An event in the backward pass has
        the line of its forward operator."""
        for event in events:
            if event.name not in _EVENTS_OF_READS:
                continue
            outer = [one for one in _with_outer(event) if one.name not in (*_EVENTS_OF_READS, "aten::item")]
            known = [one for one in outer if _OPERATOR_OR_NODE.match(one.name)]
            if not known or any(_READS_OF_CPUS.search(one.name) for one in outer):
                continue  # of Python, where a mode saw it, or of a CPU
            line, found = _line_of(known[-1].stack), _OPERATOR_OR_NODE.match(known[-1].name)
            if found is not None and not self._findings.has_any("sync", line):
                name = found[1].lstrip("_") if found[1] else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found[2]).lower()
                cause = f"{name} reads a value on the host, and waits for the device"
                self._add(Problem("sync", cause, _INSIDE_OF_OPERATORS.get(_short(name), ""), line, key=name))


class Functions(TorchFunctionMode):
    """Shows a watch the functions that users call."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.on_function(func, args, kwargs or {})


def _key_of(generator: Any) -> int:
    return int(generator._cdata)


def _with_outer(event: Any) -> Iterator[Any]:
    """An event and the events around it, the innermost first."""
    while event is not None:
        yield event
        event = event.cpu_parent


def _line_of(stack: Iterable[str]) -> Location | None:
    """The user's innermost line of a stack of the profiler, whose entries are "file(line): function"."""
    for entry in stack:
        found = re.match(r"(.+)\((\d+)\): ", entry)
        if found and not found[1].startswith(LIBRARY_PATHS):
            return Location(found[1], int(found[2]))
    return None


def _short(name: str) -> str:
    """The name of an operator, function or node, so that the three can be compared: "linalgdet"."""
    return name.replace("_", "").lower()


def _is_moved_to_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for `.to("cpu")`. On a CPU, `.to(device)` may have the same arguments; the text of the line tells."""
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    line = users_line() if isinstance(target, str) and target == "cpu" else None
    return line is not None and re.search(r"""\.to\((device=)?["']cpu["']""", line.source) is not None
