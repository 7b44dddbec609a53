"""When a graph is compared with a plain step, and what of the two is compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .arguments import Leaf
from .record import same_number
from .snapshot import is_equal, states_of_torch
from .state import Item, State, memory_of

_SMALL = 2**20
"""Bytes of a tensor that is copied also if no operator says that it writes to it."""


class GraphInfo(NamedTuple):
    """One graph of a `CapturedStep`."""

    signature: str
    """Shapes and dtypes of the arguments, and the constants."""
    launches: int | None
    """Number of kernels, copies and fills of a replay; None if it is not known."""
    memory: int
    """Bytes of the memory pool, which all graphs of the step share."""


class AuditInfo(NamedTuple):
    """One comparison of a graph with a plain step."""

    graph: int
    """Number of the graph, counted from 0 over all graphs of the step."""
    replay: int
    """Number of the replay, counted from 1."""
    largest_difference: float
    """Of the results and the state; 0.0 if they were equal bit by bit."""


def next_audit(replay: int, verify: int, audit: int) -> int:
    """The number of the next replay that is audited: the first `verify` ones, then 3, 5, 11, 23, 47, and so on.

    Primes do not fall into step with a program that repeats something every 2, 4, 8 or 16 calls.
    """
    if replay < verify:
        return replay + 1
    if not audit:
        return 0
    return _prime_from(max(3, replay + 1, min(2 * replay - 1, replay + audit)))


def _prime_from(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number


class Outcome:
    """What a step left: its result, the state that steps write to, and the random generators."""

    @torch.no_grad()
    def __init__(self, results: list[Leaf], state: State, is_written: Callable[[Item], bool]) -> None:
        """Hold the tensors themselves: `keep` copies them."""
        named = {f"the result{place}": value for place, value in results}
        self._tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        self._constants = {name: value for name, value in named.items() if name not in self._tensors}
        self._random = states_of_torch()
        for item in state.tensors():
            is_whole = not is_traceable_wrapper_subclass(item.value)  # a wrapper's parts are compared
            if item.role != "attribute" and is_whole and is_written(item):
                self._tensors[item.name] = item.value.detach()

    def keep(self) -> Outcome:
        """Copy the tensors, which later steps write to."""
        self._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        return self

    @torch.no_grad()
    def differences(self, other: Outcome) -> dict[str, float]:
        """Names of what differs, and by how much: the largest difference of two elements."""
        found = {}
        for name, value in self._constants.items():
            if not same_number(value, now := other._constants.get(name)):
                found[f"{name} ({value!r} and {now!r})"] = math.inf
        for name, state in self._random.items():
            if state != other._random.get(name):
                found[f"the state of {name}"] = math.inf
        for name in [*self._tensors, *(other._tensors.keys() - self._tensors.keys())]:
            one, two = self._tensors.get(name), other._tensors.get(name)
            if one is None or two is None or one.shape != two.shape:
                found[name] = math.inf
            elif not is_equal(one, two):
                found[name] = _distance(one, two)
        return found


def written_by_steps(written: set[int]) -> Callable[[Item], bool]:
    """Tells tensors that steps write to from others, such as a replay buffer, which are only read."""

    def is_written(item: Item) -> bool:
        if item.role in ("optimizer", "gradient", "updater", "attribute") or item.value.requires_grad:
            return True
        memory = memory_of(item.value)
        return memory is None or memory.nbytes() <= _SMALL or memory._cdata in written

    return is_written


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    distance = (one.to(wide) - other.to(wide)).abs()
    distance = torch.where((one == other) | ((one != one) & (other != other)), 0, distance)
    largest = distance.amax().item()
    return math.inf if math.isnan(largest) else largest


def beyond_noise(differences: dict[str, float], noise: dict[str, float]) -> tuple[str, float] | None:
    """The first difference that is more than what two replays differ by on a device that adds in no fixed order."""
    for name, distance in differences.items():
        if distance == math.inf or not distance <= 4 * noise.get(name, 0.0):
            return name, distance
    return None
