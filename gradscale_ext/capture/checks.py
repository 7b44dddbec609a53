"""What a replay would not repeat of a captured call, and the difference between a replay and a plain step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .arguments import Leaf, argument
from .remedies import option_remedy, scheduler_remedy, step_count_remedy
from .snapshot import Change, Snapshot, is_equal
from .state import ROLES_REPLACED, State, memory_of


def problems(before: Snapshot, state: State, *, verifies: bool) -> Iterator[str]:
    """What the captured call made or changed on the host, which a replay would not. If the second replay is compared
    with a plain step, that shows whether a step reads an attribute that it replaces."""
    names = {saved.item.name for saved in before.tensors}
    copies = dict(before.contents())
    roles = ("kept", "optimizer", *(() if verifies else ROLES_REPLACED))
    for name, tensor, *_ in state.tensors(*roles):
        memory = memory_of(tensor)
        if memory is not None and memory._cdata not in before.memory and name in names:
            yield (
                f"the step replaces {name} by another tensor, but a replay writes to the one that was captured; keep "
                "one tensor, and write to it with copy_()"
            )
        elif memory is not None and memory._cdata not in before.memory:
            yield (
                f"the step makes {name} in the call that is captured, and a replay would make it again, forgetting "
                "what it held; raise warmup, so that a plain call makes it"
            )
        if name in copies and not is_equal(tensor, copies[name]):
            optimizer = optimizer_of(name, state)
            yield (
                f"the step changes {name}, a tensor of the CPU, which a replay does not; "
                + (step_count_remedy(optimizer) if optimizer is not None else "keep it on the device")
            )
    flags = (
        Change("flag", f"{saved.item.name}.requires_grad", saved.requires_grad, saved.item.value.requires_grad)
        for saved in before.tensors
        if saved.requires_grad != saved.item.value.requires_grad and saved.item.role == "kept"
    )
    for change in (*before.changes(), *flags):
        is_kept = change.item is not None and change.item.role in ("options", "optimizer", "updater")
        if change.kind == "flag" or (is_kept and change.is_of_a_number):
            yield f"the step changes {shown(change)}, which a replay does not; {_remedy(change, state)}"
    for library in before.random.changes():
        yield f"the step draws from {library}, and a replay would repeat the numbers; draw them before the step"
    for saved in before.outside:
        if saved.item.value._version != saved.version:
            yield _written_outside(saved.item.name)


def _written_outside(name: str) -> str:
    return f"the step writes to {name}, which is not part of the state; name what holds it in CapturedStep(step, ...)"


class Elsewhere:
    """Copies of what a step may read but not write to: its arguments, and parameters that are not part of the state.
    Writes through `.data`, which PyTorch does not count, show here."""

    def __init__(self, before: Snapshot) -> None:
        """Copy the parameters. Other tensors may be large, belong to the graph, or change in other threads."""
        self._copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for saved in before.outside:
            memory = memory_of(saved.alias)
            if isinstance(saved.item.value, torch.nn.Parameter) and memory is not None:
                contents = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
                self._copies.append((saved.item.name, contents, contents.clone()))

    def writes(self, arguments: list[Leaf], inputs: list[torch.Tensor]) -> list[str]:
        """Name what the replay has written to, and put it back. `inputs`: the graph's own memory of the arguments."""
        pairs = zip(arguments, inputs, strict=True)
        found = [written_argument(place) for (place, value), own in pairs if not is_equal(value, own)]
        for name, contents, copied in self._copies:
            if not is_equal(contents, copied):
                contents.copy_(copied)
                found.append(_written_outside(name))
        return found


def written_argument(place: str, *, is_state: bool = False) -> str:
    """The problem of a step that writes to an argument."""
    if is_state:
        return f"the step writes to {argument(place)}, a tensor of the state; use that where it is, not as an argument"
    return f"the step writes to {argument(place)}; write to a copy, x.clone()"


def changed_argument(name: str) -> str:
    """The problem of a step that changes a list, dict or object that is an argument, or in one."""
    return (
        f"the step puts something else in {name}, which the caller does not see, because a replay runs no Python; "
        "change a copy, such as dict(batch), and return what is new"
    )


def _remedy(change: Change, state: State) -> str:
    if change.kind == "flag":
        return "write train(), eval() and requires_grad_() outside of the step"
    root = state.roots.get(change.name.partition(".")[0])
    is_updater = change.item is not None and change.item.role == "updater"
    if is_updater and not isinstance(root, torch.optim.Optimizer | torch.amp.GradScaler):
        return scheduler_remedy()
    if change.key == "lr":
        return f"write {option_remedy(optimizer_of(change.name, state), change.key)}"
    return "change it outside of the step, and call reset() after a change"


def changed_between(changes: list[Change]) -> str:
    """The end of an error that names what has changed between the calls; empty if nothing has."""
    if not changes:
        return ""
    names = ", ".join(dict.fromkeys(map(shown, changes)))
    return (
        f". Between the calls, {names} changed, and a graph keeps what was captured; pass it to the step as an "
        "argument (a tensor, if it keeps changing), or call reset() after a change"
    )


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


class Outcome:
    """What a step left: its result, the state, and the random generators."""

    def __init__(self, results: list[Leaf], state: State) -> None:
        """Copy everything."""
        self.state = Snapshot(state)
        named = {f"the result{place}": value for place, value in results}
        self._tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        self._constants = {name: value for name, value in named.items() if name not in self._tensors}
        self._constants |= self.state.random.of_torch()
        self._tensors |= dict(self.state.contents())

    def differences(self, other: Outcome) -> dict[str, float]:
        """Names of what differs, and by how much: the largest difference of two elements."""
        found = {}
        for name, value in self._constants.items():
            now = other._constants.get(name)
            if value != now and not (value != value and now != now):
                found[name if isinstance(value, bytes) else f"{name} ({value!r} and {now!r})"] = math.inf
        for name in [*self._tensors, *(other._tensors.keys() - self._tensors.keys())]:
            one, two = self._tensors.get(name), other._tensors.get(name)
            if one is None or two is None or one.shape != two.shape:
                found[name] = math.inf
            elif not is_equal(one, two):
                found[name] = _distance(one, two)
        return found


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    distance = (one.to(wide) - other.to(wide)).abs()
    distance = torch.where((one == other) | ((one != one) & (other != other)), 0, distance)
    largest = distance.amax().item()
    return math.inf if math.isnan(largest) else largest


def beyond_noise(differences: dict[str, float], noise: dict[str, float]) -> tuple[str, float] | None:
    """The first difference that is more than what two plain steps of a device that adds in no fixed order have."""
    for name, distance in differences.items():
        if distance == math.inf or not distance <= 4 * noise.get(name, 0.0):
            return name, distance
    return None
