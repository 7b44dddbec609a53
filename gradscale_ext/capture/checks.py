"""What a capture must not change, and whether a replay does what a plain step does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from .guards import Gradients
from .remedies import rate_remedy, step_count_remedy
from .state import State, memory_of
from .structure import Leaf


class Before:
    """The state before a capture. Capturing executes nothing on the device; the rest is undone if it fails."""

    def __init__(self, state: State) -> None:
        """Save what the host can change: containers, flags, and tensors of the CPU."""
        self._state = state
        self._saved = state.save(lambda tensor: tensor.device.type == "cpu")
        self._names = {item.name for item in self._saved.items}
        self._memory = {memory._cdata: memory for _, memory in _memories(state.tensors())}
        self._numbers = group_numbers(state)
        leaves = [tensor for _, tensor in state.tensors() if tensor.is_leaf]
        self._leaves = [tensor for tensor in leaves if tensor.requires_grad or tensor.grad is not None]
        self._gradients = [(tensor.grad, 0 if tensor.grad is None else tensor.grad._version) for tensor in self._leaves]

    def restore(self) -> None:
        """Undo what the capture changed."""
        self._saved.restore()

    def gradients(self) -> Gradients:
        """The gradients before the capture and now."""
        pairs = list(zip(self._leaves, self._gradients, strict=True))
        return Gradients(
            before={id(tensor): gradient for tensor, (gradient, _) in pairs},
            after={id(tensor): tensor.grad for tensor in self._leaves},
            used={
                id(tensor)
                for tensor, (gradient, version) in pairs
                if gradient is not None and (tensor.grad is gradient or gradient._version != version)
            },
        )

    def problems(self, verifies: bool) -> Iterator[str]:
        """What the step made or changed on the host, which a replay would not. If the second replay is compared with a
        plain step, that shows whether a step reads an attribute that it replaces."""
        passing = () if verifies else self._state.passing_tensors()
        for name, memory in _memories(itertools.chain(self._state.lasting_tensors(), passing)):
            if memory._cdata in self._memory:
                continue
            if name in self._names:
                yield (
                    f"the step replaces {name} by another tensor, but a replay writes to the one that was captured; "
                    "keep one tensor, and write to it with copy_()"
                )
            else:
                yield (
                    f"the step makes {name} in the call that is captured, and a replay would make it again, forgetting "
                    "what it held; raise warmup, so that a plain call makes it"
                )
        now = dict(self._state.lasting_tensors())
        for name, contents in self._saved.contents():
            if name in now and not is_equal(now[name], contents):
                optimizer = self._state.optimizers().get(name.partition(".")[0])
                yield (
                    f"the step changes {name}, a tensor of the CPU, which a replay does not; "
                    + (step_count_remedy(optimizer) if optimizer is not None else "keep it on the device")
                )
        for place, value in group_numbers(self._state).items():
            if place in self._numbers and value != self._numbers[place]:
                yield (
                    f"the step changes the number {place} ({self._numbers[place]:.6g}, then {value:.6g}), which a "
                    f"replay does not; {rate_remedy()}"
                )
        for library in self._saved.random.changes():
            yield f"the step draws from {library}, and a replay would repeat the numbers; draw them before the step"


def _memories(tensors: Iterator[Any]) -> Iterator[tuple[str, torch.UntypedStorage]]:
    for name, tensor in tensors:
        if (memory := memory_of(tensor)) is not None:
            yield name, memory


def group_numbers(state: State) -> dict[str, float]:
    """Numbers in the parameter groups of optimizers, by their places."""
    return {
        f"{name}.param_groups[{index}]['{key}']": value
        for name, optimizer in state.optimizers().items()
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, int | float)
    }


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for the same bits, or NaN in the same places."""
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


class Outcome:
    """What a step left: its result and the state."""

    def __init__(self, results: list[Leaf], state: State) -> None:
        """Copy the state."""
        self._tensors = {f"the result{place}": value for place, value in results if isinstance(value, torch.Tensor)}
        self._constants = {place: value for place, value in results if not isinstance(value, torch.Tensor)}
        self.state = state.save()
        passing = {name for name, _ in state.passing_tensors()}
        self._tensors |= {name: copied for name, copied in self.state.contents() if name not in passing}

    def differences(self, other: Outcome) -> dict[str, float]:
        """Names of what differs, and by how much: the largest difference of two elements."""
        found = {}
        for place, value in self._constants.items():
            if value != other._constants.get(place):
                found[f"the result{place} ({value!r} and {other._constants.get(place)!r})"] = math.inf
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
        if not distance <= 4 * noise.get(name, 0.0):
            return name, distance
    return None
