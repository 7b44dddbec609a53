"""What a replay would not repeat of a step, which `CapturedStep` refuses and `diagnose_capture` reports."""

from __future__ import annotations

import gc
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .arguments import Arguments, Given, named_leaves, result
from .generators import CPU
from .hooks import hooks_of, is_of_monitor
from .modes import Modes
from .problems import Problem, definition_of, option_remedy, scheduler_remedy, step_count_remedy, text_of
from .record import Record
from .snapshot import NUMBERS, Change, Snapshot, is_same
from .state import State, memory_of

_MARK = "gradscale_ext"


class Refusals:
    """What a step does that a replay would not repeat. Made before the step runs, and asked after it."""

    def __init__(
        self,
        step: Callable[..., Any],
        state: State,
        arguments: Arguments | None,
        inputs: list[torch.Tensor],
        given: Given,
    ) -> None:
        """`arguments`: None if they are of types that no graph has. `inputs`: the tensors that the step gets for them.
        `given`: all its arguments, with these tensors."""
        self._state, self._arguments, self._inputs, self._given = state, arguments, inputs, given
        self._device = state.device()
        self.before = Snapshot(state, lambda item: item.value.device.type == "cpu")
        self._counters = _Counters(step, [*given[0], *given[1].values()])

    def problems(self, record: Record, returned: Any) -> Iterator[Problem]:
        """Compare with what was before."""
        for place, value in named_leaves(returned, result):
            if isinstance(value, torch.Tensor) and value.device != self._device:
                cause = f"{result(place)} is on {value.device}, where a replay computes nothing"
                yield Problem("host_copy", cause, "return the tensor of the device, and move it afterwards")
        if self._arguments is not None:
            yield from self._changed_arguments(self._arguments, record)
        yield from self._tensors(record)
        for name, before, now in self.before.modes.changes(Modes.of(self._device)):
            cause = f"the step changes {name} ({text_of(before)}, then {text_of(now)}), which a replay does not"
            remedy = "change it outside of the step, or in a `with` block, at whose end it is as before"
            yield Problem("stale_number", cause, remedy, key=f"mode: {name}")
        yield from self._changes(record)
        for name, root in self._state.roots.items():
            if isinstance(root, torch.amp.GradScaler) and any(
                own.get("found_inf_per_device") for own in root._per_optimizer_states.values()
            ):
                cause = f"the step calls {name}.step() without {name}.update(), which would find nothing after a replay"
                yield Problem("stale_number", cause, "call update() in the step, too")
        yield from self._draws()
        for name, line in record.written_elsewhere():
            cause = f"{name} writes to a tensor that is not part of the state"
            yield Problem("unnamed_state", cause, "name what holds it in CapturedStep(step, ...)", line)
        yield from self._counters.changes()

    def _draws(self) -> Iterator[Problem]:
        """A problem for each generator of the host. If other threads run, they may have drawn the numbers."""
        drawn = [*self.before.host_generators.drawn()]
        if self._device.type != "cpu" and CPU in self.before.contents.generators.changed():
            drawn.append((CPU, True, None))
        for name, is_global, line in drawn:
            cause = f"the step draws from {name}, and a replay would repeat the numbers, or the choice"
            is_certain = is_global or threading.active_count() == 1
            if not is_certain:
                cause += " (unless another thread draws from it)"
            yield Problem(
                "generator", cause, "draw before the step, and pass tensors as arguments", line, name, is_certain
            )

    def _changed_arguments(self, arguments: Arguments, record: Record) -> Iterator[Problem]:
        for name, tensor in zip(arguments.names(), self._inputs, strict=True):
            memory = memory_of(tensor)
            if memory is not None and memory._cdata in record.written:
                remedy = "write to a copy, x.clone(); a tensor of the state is used where it is, not as an argument"
                yield Problem("argument", f"the step writes to {name}", remedy, record.written[memory._cdata][1])
        if name := arguments.changed_in(self._given, self._inputs):
            yield changed_argument(name)

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
                yield Problem("unnamed_state", cause, remedy, record.line_that_made(memory), key)
            if name in changed:
                optimizer = self._state.optimizer_of(name)
                remedy = "keep it on the device" if optimizer is None else step_count_remedy(optimizer)
                cause = f"the step changes {name}, a tensor of the CPU, which a replay does not"
                yield Problem("stale_number", cause, remedy, key="of the CPU")

    def _changes(self, record: Record) -> Iterator[Problem]:
        """Numbers and modes of the state that the step changes, and schedulers that it calls."""
        line, has_rate = next(iter(record.schedulers), None), False
        for change in self.before.changes():
            name, role = change.name, change.item.role if change.item is not None else ""
            is_of_scheduler = role == "updater" and self._state.is_scheduler(name)
            if change.kind == "flag":
                remedy, key = "call train(), eval() and requires_grad_() outside of the step", "mode"
            elif role not in ("options", "optimizer", "updater") or not change.is_of_a_number:
                continue
            elif is_of_scheduler and record.schedulers:
                continue  # what a scheduler counts: it has a problem of its own
            else:
                optimizer, key = self._state.optimizer_of(name), str(change.key)
                remedy = (
                    option_remedy(optimizer, key) or "change it outside of the step, and call reset() after a change"
                )
                if is_of_scheduler or (key == "lr" and record.schedulers):
                    remedy = scheduler_remedy(optimizer)
                has_rate = has_rate or (role == "options" and key == "lr")
            cause = f"the step changes {change}, which a replay does not"
            yield Problem("stale_number", cause, remedy, line if role == "options" else None, key)
        for at, kind in record.schedulers.items() if not has_rate else ():
            cause = f"the step calls {kind}.step(), which counts on the host and decides there what the rate becomes"
            yield Problem("stale_number", cause, scheduler_remedy(), at)


def hook_problems(state: State) -> Iterator[Problem]:
    """Hooks that a replay does not run."""
    for name, hook in hooks_of(state):
        if not is_of_monitor(hook):
            shown = getattr(hook, "__qualname__", None) or type(hook).__qualname__
            cause = f"{name} has the hook {shown}, which a replay would not run"
            remedy = "remove it, or pass hooks='ignore' if it consists of calls of PyTorch, which the graph repeats"
            yield Problem("python_hook", cause, remedy, definition_of(hook), key=name)


def kept_graph_problems(state: State) -> Iterator[Problem]:
    """A result of an earlier plain call that still holds its graph."""
    if not state.is_distributed() and (name := _kept_graph(state)):
        cause = "a loss from before the first call, or another result with its graph, is still kept, and its graph "
        cause += f"reaches {name}: a backward pass would leave the stream that is captured"
        yield Problem("unnamed_state", cause, "keep loss.detach() in place of loss")


def changed_argument(name: str) -> Problem:
    """The problem of a step that changes a list, dict or object that is an argument, or in one."""
    cause = f"the step puts something else in {name}, which the caller does not see, because a replay runs no Python"
    return Problem("argument", cause, "change a copy, such as dict(batch), and return what is new")


def changed_option(change: Change, state: State) -> str:
    """The problem of an option of an optimizer that has changed between the calls."""
    if change.kind == "rate":
        return f"{change.name} is another tensor than the captured one; change that one with fill_() or copy_()"
    then, now = text_of(change.before), text_of(change.now)
    remedy = option_remedy(state.optimizer_of(change.name), change.key)
    if change.key != "lr":
        remedy = ", or ".join(filter(None, ["call reset() after a change, which captures again", remedy]))
    return f"{change.name} is {now}, but a graph keeps {then}, the value that was captured; {remedy}"


# ---- One look at what the step's Python counts -----------------------------------------------------------------------


class _Counters:
    """Numbers that the step's own code can count with: in its closure, in its object, and in its globals."""

    def __init__(self, step: Callable[..., Any], arguments: Iterable[Any] = ()) -> None:
        """Note the numbers as they are."""
        self._step, self._arguments = step, list(arguments)
        self._before = self._numbers()

    def _numbers(self) -> dict[str, Any]:
        step, found = self._step, dict[str, Any]()
        objects = [(type(value).__name__, value) for value in self._arguments]
        if isinstance(step, types.FunctionType):
            objects.append((step.__name__, step))
        elif not isinstance(owner := getattr(step, "__self__", step), types.ModuleType | type):
            objects.append(("self", owner))
        for name, value in objects:
            found |= {f"{name}.{key}": held for key, held in getattr(value, "__dict__", {}).items()}
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
        remedy = "keep it in a tensor of the device that is part of the state, or change it outside of the step"
        for name, before in self._before.items():
            if name in now and not is_same(before, now[name]):
                change = Change("number", name, before, now[name])
                cause = f"the step changes {change}, which a replay does not"
                yield Problem("stale_number", cause, remedy, key=name, is_certain=False)


# ---- Results that hold a graph of autograd ---------------------------------------------------------------------------


def mark_kept_graphs(state: State) -> None:
    """Mark the nodes that accumulate gradients in autograd graphs which something still holds. Other nodes are made
    for the mark, and have gone afterwards."""
    torch.clear_autocast_cache()  # its converted weights have graphs, too
    for _, metadata in _nodes(state):
        metadata[_MARK] = True


def _kept_graph(state: State) -> str:
    """The name of a parameter whose node is still the one that was marked; empty if there is none."""
    if any(_MARK in metadata for _, metadata in _nodes(state)):
        gc.collect()
    return next((name for name, metadata in _nodes(state) if _MARK in metadata), "")


@torch.inference_mode(False)
@torch.enable_grad()
def _nodes(state: State) -> list[tuple[str, Any]]:
    # torch.nn.utils.weight_norm keeps a weight, and with it the graph, until it makes another in the next call.
    own = {
        id(parameter)
        for module in state.modules()
        if any(isinstance(held, torch.Tensor) and held.grad_fn is not None for held in vars(module).values())
        for parameter in module.parameters(recurse=False)
    }
    leaves = ((name, tensor) for name, tensor, *_ in state.tensors("kept") if tensor.is_leaf and tensor.requires_grad)
    return [
        (name, torch.autograd.graph.get_gradient_edge(tensor).node.metadata)
        for name, tensor in leaves
        if id(tensor) not in own and not torch.nn.parameter.is_lazy(tensor)
    ]
