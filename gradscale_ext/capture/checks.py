"""What a replay would not repeat of a step, which `CapturedStep` refuses and `diagnose_capture` reports."""

from __future__ import annotations

import gc
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..diagnosis.lines import LIBRARY_PATHS, Location
from .arguments import Arguments, Leaf, argument, flatten, refuse_result
from .generators import CPU
from .hooks import hook_location, hook_name, hooks_of, is_of_monitor
from .record import Record
from .remedies import RETURN_REMEDY, option_remedy, scheduler_remedy, step_count_remedy
from .report import Code
from .snapshot import NUMBERS, Change, Snapshot, is_same
from .state import State, memory_of

_MARK = "gradscale_ext"


class Problem(NamedTuple):
    """A reason why no graph can make a step."""

    code: Code
    cause: str
    remedy: str
    location: Location | None = None
    is_certain: bool = True
    """False if a graph may be right."""
    key: str = ""
    """The same for problems on a line that have one reason."""

    def __str__(self) -> str:
        at = f" at {self.location}: {self.location.source}" if self.location else ""
        return f"{self.cause}{at}; {self.remedy}"


class Refusals:
    """What a step does that a replay would not repeat. Made before the step runs, and asked after it."""

    def __init__(
        self,
        step: Callable[..., Any],
        state: State,
        arguments: Arguments | None,
        inputs: list[torch.Tensor],
        given: Any,
    ) -> None:
        """`arguments`: None if they are of types that no graph has. `inputs`: the tensors that the step gets for them.
        `given`: all its arguments, with these tensors."""
        self._state, self._arguments, self._inputs, self._given = state, arguments, inputs, given
        self._device = state.device()
        self.before = Snapshot(state, lambda item: item.value.device.type == "cpu")
        self._counters = Counters(step, [*given[0], *given[1].values()])

    def problems(self, record: Record, result: Any) -> Iterator[Problem]:
        """Compare with what was before. Raises TypeError for a result that no graph can have."""
        yield from self._results(flatten(result, refuse_result)[1])
        if self._arguments is not None:
            yield from self._written_arguments(self._arguments, record)
            if name := self._arguments.changed_in(self._given, self._inputs):
                yield changed_argument(name)
        yield from self._tensors(record)
        yield from self._changes(record)
        for name, root in self._state.roots.items():
            if isinstance(root, torch.amp.GradScaler) and any(
                own.get("found_inf_per_device") for own in root._per_optimizer_states.values()
            ):
                cause = f"the step calls {name}.step() without {name}.update(), which would find nothing after a replay"
                yield Problem("stale_number", cause, "call update() in the step, too")
        if self._device.type != "cpu" and CPU in self.before.contents.generators.changed():
            cause = "the step draws from PyTorch's generator of the CPU, and a replay would repeat the numbers"
            yield Problem("generator", cause, "draw them before the step, or on the device")
        yield from self._draws()
        for name, line in record.written_elsewhere():
            cause = f"{name} writes to a tensor that is not part of the state"
            yield Problem("unnamed_state", cause, "name what holds it in CapturedStep(step, ...)", line)
        yield from self._counters.changes()

    def _draws(self) -> Iterator[Problem]:
        """A problem for each generator of the host. If other threads run, they may have drawn the numbers."""
        for name, is_global, line in self.before.host_generators.drawn():
            cause = f"the step draws from {name}, and a replay would repeat the numbers, or the choice"
            is_certain = is_global or threading.active_count() == 1
            if not is_certain:
                cause += " (unless another thread draws from it)"
            remedy = "draw before the step, and pass tensors as arguments"
            yield Problem("generator", cause, remedy, line, is_certain, key=name)

    def _results(self, results: list[Leaf]) -> Iterator[Problem]:
        for place, value in results:
            if isinstance(value, torch.Tensor) and value.device != self._device:
                cause = f"its result{place} is on {value.device}, where a replay computes nothing"
                yield Problem("host_copy", cause, "return the tensor of the device, and move it afterwards")

    def _written_arguments(self, arguments: Arguments, record: Record) -> Iterator[Problem]:
        written = record.written_arguments()
        for (place, _), tensor in zip(arguments.tensors(), self._inputs, strict=True):
            memory = memory_of(tensor)
            if memory is not None and memory._cdata in written:
                remedy = "write to a copy, x.clone(); a tensor of the state is used where it is, not as an argument"
                line = record.written[memory._cdata][2]
                yield Problem("argument", f"the step writes to {argument(place)}", remedy, line)

    def _tensors(self, record: Record) -> Iterator[Problem]:
        names = {saved.item.name for saved in self.before.tensors}
        changed = dict(self.before.contents.differences()) if self._device.type != "cpu" else {}
        for name, tensor, *_ in self._state.tensors("kept", "optimizer"):
            memory = memory_of(tensor)
            if memory is not None and memory._cdata not in self.before.memory:
                cause = f"the step replaces {name} by another tensor, but a replay writes to the one that was captured"
                remedy, key = "keep one tensor, and write to it with copy_()", "replaced"
                if name not in names:
                    cause = f"the step makes {name} in the call that is captured, and a replay would make it again, "
                    cause += "forgetting what it held"
                    remedy, key = "raise warmup, so that a plain call makes it", "made"
                yield Problem("unnamed_state", cause, remedy, record.line_that_made(memory), key=key)
            if name in changed:
                optimizer = optimizer_of(name, self._state)
                remedy = step_count_remedy(optimizer) if optimizer is not None else "keep it on the device"
                cause = f"the step changes {name}, a tensor of the CPU, which a replay does not"
                yield Problem("stale_number", cause, remedy, key="of the CPU")

    def _changes(self, record: Record) -> Iterator[Problem]:
        """Numbers and modes of the state that the step changes."""
        flags = (
            Change("flag", f"{saved.item.name}.requires_grad", saved.requires_grad, saved.item.value.requires_grad)
            for saved in self.before.tensors
            if saved.requires_grad != saved.item.value.requires_grad and saved.item.role == "kept"
        )
        line = next(iter(record.schedulers.values()), None)
        has_rate = False
        for change in (*self.before.changes(), *flags):
            is_option = change.item is not None and change.item.role == "options"
            is_kept = is_option or (change.item is not None and change.item.role in ("optimizer", "updater"))
            is_of_schedule = is_kept and not is_option and record.schedulers and self._is_scheduler(change)
            if change.kind == "flag" or (is_kept and change.is_of_a_number and not is_of_schedule):
                has_rate = has_rate or (is_option and change.key == "lr")
                cause = f"the step changes {shown(change)}, which a replay does not"
                key = "mode" if change.kind == "flag" else str(change.key)
                remedy = self._remedy(change, has_schedule=bool(record.schedulers))
                yield Problem("stale_number", cause, remedy, line if is_option else None, key=key)
        for kind, at in record.schedulers.items() if not has_rate else ():
            cause = f"the step calls {kind}.step(), which counts on the host and decides there what the rate becomes"
            yield Problem("stale_number", cause, scheduler_remedy(), at)

    def _is_scheduler(self, change: Change) -> bool:
        root = self._state.roots.get(change.name.partition(".")[0])
        return not isinstance(root, torch.optim.Optimizer | torch.amp.GradScaler)

    def _remedy(self, change: Change, has_schedule: bool) -> str:
        if change.kind == "flag":
            return "call train(), eval() and requires_grad_() outside of the step"
        is_of_scheduler = change.item is not None and change.item.role == "updater" and self._is_scheduler(change)
        if is_of_scheduler:
            return scheduler_remedy()
        if change.key == "lr" and has_schedule:
            return scheduler_remedy(optimizer_of(change.name, self._state))
        own = option_remedy(optimizer_of(change.name, self._state), change.key) if change.item is not None else ""
        return f"write {own}" if own else "change it outside of the step, and call reset() after a change"


def hook_problems(state: State) -> Iterator[Problem]:
    """Hooks that a replay does not run."""
    for name, hook in hooks_of(state):
        if not is_of_monitor(hook):
            cause = f"{name} has the hook {hook_name(hook)}, which a replay would not run"
            remedy = "remove it, or pass hooks='ignore' if it consists of calls of PyTorch, which the graph repeats"
            yield Problem("python_hook", cause, remedy, hook_location(hook), key=name)


def kept_graph_problems(state: State) -> Iterator[Problem]:
    """A result of an earlier plain call that still holds its graph."""
    if not state.is_distributed() and (name := kept_graph(state)):
        cause = "a loss from before the first call, or another result with its graph, is still kept, and its graph "
        cause += f"reaches {name}: a backward pass would leave the stream that is captured"
        yield Problem("unnamed_state", cause, "keep loss.detach() in place of loss")


def is_of_step(error: BaseException) -> bool:
    """True for errors that have nothing to do with the capture: the code of the user raises them, not PyTorch."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return not (isinstance(error, RuntimeError) or innermost.filename.startswith(LIBRARY_PATHS))


def location_of(error: BaseException) -> Location | None:
    """The user's innermost line that an error passed."""
    own = [at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith(LIBRARY_PATHS)]
    return Location(own[-1].filename, own[-1].lineno or 0) if own else None


def changed_argument(name: str) -> Problem:
    """The problem of a step that changes a list, dict or object that is an argument, or in one."""
    cause = f"the step puts something else in {name}, which the caller does not see, because a replay runs no Python"
    return Problem("argument", cause, "change a copy, such as dict(batch), and return what is new")


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
                yield Problem("stale_number", cause, RETURN_REMEDY, is_certain=False, key=name)


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
    # torch.nn.utils.weight_norm keeps a weight, and with it the graph, until it makes another in the next call.
    own = {
        id(parameter)
        for _, module in state.modules()
        if any(isinstance(held, torch.Tensor) and held.grad_fn is not None for held in vars(module).values())
        for parameter in module.parameters(recurse=False)
    }
    leaves = ((name, tensor) for name, tensor, *_ in state.tensors("kept") if tensor.is_leaf and tensor.requires_grad)
    return [
        (name, torch.autograd.graph.get_gradient_edge(tensor).node.metadata)
        for name, tensor in leaves
        if id(tensor) not in own and not torch.nn.parameter.is_lazy(tensor)
    ]
