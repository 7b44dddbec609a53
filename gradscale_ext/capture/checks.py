"""What a replay would not repeat of a step, which `CapturedStep` refuses and `diagnose_capture` reports."""

from __future__ import annotations

import gc
import random
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..diagnosis.lines import NOT_THE_USERS, Location
from .arguments import Leaf, argument
from .record import Record
from .remedies import RETURN_REMEDY, option_remedy, scheduler_remedy, step_count_remedy
from .report import Code
from .snapshot import NUMBERS, Change, Snapshot, is_equal, is_same
from .state import State, memory_of

_MARK = "gradscale_ext"


class Problem(NamedTuple):
    """A reason why no graph can make a step."""

    code: Code
    cause: str
    remedy: str
    location: Location | None = None

    def __str__(self) -> str:
        at = f" at {self.location}: {self.location.source}" if self.location else ""
        return f"{self.cause}{at}; {self.remedy}"


def problems(before: Snapshot, state: State, record: Record) -> Iterator[Problem]:
    """What a step made or changed on the host or outside of the state, which a replay would not, or would wrongly."""
    names = {saved.item.name for saved in before.tensors}
    copies = dict(before.contents())
    for name, tensor, *_ in state.tensors("kept", "optimizer"):
        memory = memory_of(tensor)
        if memory is not None and memory._cdata not in before.memory:
            what = (
                f"the step replaces {name} by another tensor, but a replay writes to the one that was captured",
                "keep one tensor, and write to it with copy_()",
            )
            if name not in names:
                what = (
                    f"the step makes {name} in the call that is captured, and a replay would make it again, forgetting "
                    "what it held",
                    "raise warmup, so that a plain call makes it",
                )
            yield Problem("unnamed_state", *what, record.line_that_made(memory))
        if name in copies and not is_equal(tensor, copies[name]):
            optimizer = optimizer_of(name, state)
            remedy = step_count_remedy(optimizer) if optimizer is not None else "keep it on the device"
            cause = f"the step changes {name}, a tensor of the CPU, which a replay does not"
            yield Problem("stale_number", cause, remedy)
    flags = (
        Change("flag", f"{saved.item.name}.requires_grad", saved.requires_grad, saved.item.value.requires_grad)
        for saved in before.tensors
        if saved.requires_grad != saved.item.value.requires_grad and saved.item.role == "kept"
    )
    for change in (*before.changes(), *flags):
        is_kept = change.item is not None and change.item.role in ("options", "optimizer", "updater")
        if change.kind == "flag" or (is_kept and change.is_of_a_number):
            cause = f"the step changes {shown(change)}, which a replay does not"
            yield Problem("stale_number", cause, _remedy(change, state, has_schedule=bool(record.schedulers)))
    for name, root in state.roots.items():
        if isinstance(root, torch.amp.GradScaler) and any(
            own.get("found_inf_per_device") for own in root._per_optimizer_states.values()
        ):
            cause = f"the step calls {name}.step() without {name}.update(), which after a replay has nothing to read"
            yield Problem("stale_number", cause, "call update() in the step, too")
    for kind, line in record.schedulers.items():
        cause = f"the step calls {kind}.step(), which counts on the host and decides there what the rate becomes"
        yield Problem("stale_number", cause, scheduler_remedy(), line)
    for library in before.random.changes():
        cause = f"the step draws from {library}, and a replay would repeat the numbers"
        yield Problem("generator", cause, "draw them before the step")
    for name, line in record.written_elsewhere():
        cause = f"{name} writes to a tensor that is not part of the state"
        yield Problem("unnamed_state", cause, "name what holds it in CapturedStep(step, ...)", line)


def written_arguments(arguments: Iterable[Leaf], inputs: Iterable[torch.Tensor], record: Record) -> Iterator[Problem]:
    """The arguments that a step wrote to. `inputs`: the tensors that it got for them."""
    written = record.written_arguments()
    for (place, _), tensor in zip(arguments, inputs, strict=True):
        memory = memory_of(tensor)
        if memory is not None and memory._cdata in written:
            remedy = "write to a copy, x.clone(); a tensor of the state is used where it is, not as an argument"
            line = record.written[memory._cdata][2]
            yield Problem("argument", f"the step writes to {argument(place)}", remedy, line)


def is_of_step(error: BaseException) -> bool:
    """True for errors that have nothing to do with the capture: the code of the user raises them, not PyTorch."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return not (isinstance(error, RuntimeError) or innermost.filename.startswith(NOT_THE_USERS))


def changed_argument(name: str) -> Problem:
    """The problem of a step that changes a list, dict or object that is an argument, or in one."""
    cause = f"the step puts something else in {name}, which the caller does not see, because a replay runs no Python"
    return Problem("argument", cause, "change a copy, such as dict(batch), and return what is new")


def _remedy(change: Change, state: State, has_schedule: bool) -> str:
    if change.kind == "flag":
        return "call train(), eval() and requires_grad_() outside of the step"
    root = state.roots.get(change.name.partition(".")[0])
    is_updater = change.item is not None and change.item.role == "updater"
    if is_updater and not isinstance(root, torch.optim.Optimizer | torch.amp.GradScaler):
        return scheduler_remedy()
    if change.key == "lr" and has_schedule:
        return scheduler_remedy()
    if change.key == "lr":
        return f"write {option_remedy(optimizer_of(change.name, state), change.key)}"
    return "change it outside of the step, and call reset() after a change"


def changed_option(change: Change, state: State) -> str:
    """The problem of an option of an optimizer that has changed between the calls."""
    if change.kind == "rate":
        return f"{change.name} is another tensor than the captured one; change that one with fill_() or copy_()"
    then, now = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in (change.before, change.now))
    own = option_remedy(optimizer_of(change.name, state), change.key)
    remedy = f"write {own}" if own else ""
    if change.key != "lr":
        remedy = "call reset() after a change, which captures again" + (f", or {remedy}" if own else "")
    return f"{change.name} is {now}, but a graph keeps {then}, the value that was captured; {remedy}"


def optimizer_of(name: str, state: State) -> torch.optim.Optimizer | None:
    """The optimizer whose state or groups have something of this name in messages; None if there is none."""
    return state.optimizers().get(name.partition(".")[0])


def shown(change: Change) -> str:
    """A change as messages name it, with both numbers if it is a change of a number."""
    if not change.is_of_a_number:
        return change.name
    before, now = (f"{x:.6g}" if isinstance(x, float) else repr(x) for x in (change.before, change.now))
    return f"{change.name} ({before}, then {now})"


# ---- One look at what the step's Python counts -----------------------------------------------------------------------


class Counters:
    """Numbers that the step's own code can count with: in its closure, in its object, and in its globals."""

    def __init__(self, step: Callable[..., Any], arguments: Iterable[Any] = ()) -> None:
        """Note the numbers as they are."""
        self._step, self._arguments = step, list(arguments)
        self._before = self._numbers()

    def _numbers(self) -> dict[str, Any]:
        step, found = self._step, dict[str, Any]()
        for value in self._arguments:
            found |= {f"{type(value).__name__}.{key}": held for key, held in getattr(value, "__dict__", {}).items()}
        if isinstance(step, types.FunctionType):
            found |= {f"{step.__name__}.{key}": held for key, held in vars(step).items()}
        owner = step if not callable(getattr(step, "__func__", None)) else step.__self__  # type: ignore[attr-defined]
        if not isinstance(owner, types.FunctionType | types.ModuleType | type):
            found |= {f"self.{key}": held for key, held in getattr(owner, "__dict__", {}).items()}
        function = getattr(step, "__func__", step)
        function = function if isinstance(function, types.FunctionType) else vars(type(step)).get("__call__")
        if isinstance(function, types.FunctionType):
            code = function.__code__
            found |= {name: function.__globals__.get(name) for name in code.co_names}
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                if cell != types.CellType():
                    found[name] = cell.cell_contents
        return {name: held for name, held in found.items() if isinstance(held, NUMBERS)}

    def changes(self) -> Iterator[Problem]:
        """The numbers that have changed since."""
        now = self._numbers()
        for name, before in self._before.items():
            if name in now and not is_same(before, now[name]):
                cause = f"the step changes {shown(Change('number', name, before, now[name]))}, which a replay does not"
                yield Problem("stale_number", cause, RETURN_REMEDY)


class HostGenerators:
    """The states of every generator of Python and NumPy that a program has made itself, wherever it is kept."""

    def __init__(self) -> None:
        """Note the states as they are."""
        self._before = [(generator, _state_of(generator)) for generator in _own_generators()]

    def changes(self) -> Iterator[Problem]:
        """A problem for each that has drawn numbers since. If other threads run, they may have drawn them."""
        for generator, before in self._before:
            if before != _state_of(generator):
                kind = f"{type(generator).__module__.partition('.')[0]}.{type(generator).__name__}"
                cause = f"the step draws from a {kind}, and a replay would repeat the numbers, or the choice"
                yield Problem("generator", cause, "draw before the step, and pass tensors as arguments")


def _own_generators() -> list[Any]:
    numpy = sys.modules.get("numpy.random")
    kinds = {random.Random, *((numpy.Generator, numpy.RandomState) if numpy is not None else ())}
    of_all = [random._inst, None if numpy is None else numpy.mtrand._rand]
    found = [one for one in gc.get_objects() if type(one) in kinds]
    return [one for one in found if all(one is not known for known in of_all)]


def _state_of(generator: Any) -> Any:
    if hasattr(generator, "bit_generator"):
        return repr(generator.bit_generator.state)
    return repr(generator.getstate() if hasattr(generator, "getstate") else generator.get_state())


def mark_kept_graphs(state: State) -> None:
    """Mark the nodes that accumulate gradients in autograd graphs which something still holds. Other nodes are made
    for the mark, and have gone afterwards."""
    torch.clear_autocast_cache()  # its converted weights have graphs, too
    for _, metadata in _nodes(state):
        metadata[_MARK] = True


def kept_graph(state: State) -> str:
    """The name of a parameter whose node is still the one that was marked; empty if there is none."""
    for collect in (lambda: None, gc.collect):
        collect()
        name = next((name for name, metadata in _nodes(state) if _MARK in metadata), "")
        if not name:
            break
    return name


@torch.inference_mode(False)
@torch.enable_grad()
def _nodes(state: State) -> list[tuple[str, Any]]:
    leaves = ((name, tensor) for name, tensor, *_ in state.tensors("kept") if tensor.is_leaf and tensor.requires_grad)
    return [
        (name, torch.autograd.graph.get_gradient_edge(tensor).node.metadata)
        for name, tensor in leaves
        if not torch.nn.parameter.is_lazy(tensor)
    ]
