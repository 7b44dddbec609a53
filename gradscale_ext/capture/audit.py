"""When a graph is compared with a plain step, and what of the two is compared."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from .arguments import named_leaves, result
from .contents import Contents, difference
from .record import same_number
from .state import Item, memory_of

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


def is_written(item: Item, written: Collection[int]) -> bool:
    """False for tensors that steps only read, such as a replay buffer. `written`: memory that operators wrote to."""
    tensor, memory = item.value, memory_of(item.value)
    has_gradient = tensor.requires_grad or (tensor.is_leaf and tensor.grad is not None)
    if has_gradient or item.role in ("optimizer", "updater") or memory is None:
        return True
    return memory.nbytes() <= _SMALL or memory._cdata in written


def compare(replayed: Any, returned: Any, contents: Contents) -> dict[str, float]:
    """What differs between a replay and a plain step: names of results and state, with the largest difference.

    `replayed` and `contents` are the results and the state after the replay."""
    found = {f"the state of {name}": math.inf for name in contents.generators.changed()}
    then, now = dict(named_leaves(replayed, result)), dict(named_leaves(returned, result))
    for place in then | now:
        one, other = then.get(place), now.get(place)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if distance := difference(one, other):
                found[f"the result{place}"] = distance
        elif not same_number(one, other):
            found[f"the result{place} ({one!r} and {other!r})"] = math.inf
    return found | dict(contents.differences())


def beyond_noise(differences: dict[str, float], noise: dict[str, float]) -> tuple[str, float] | None:
    """The first difference that is more than what two replays differ by on a device that adds in no fixed order."""
    for name, distance in differences.items():
        if distance == math.inf or not distance <= 4 * noise.get(name, 0.0):
            return name, distance
    return None
