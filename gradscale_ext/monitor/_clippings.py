"""The gradient clippings of one optimizer step, which may clip the same parameters several times."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..statistics.gradients import GradientStatistics
from ..statistics.shards import local_part

Clipped = tuple[int, torch.Tensor, "weakref.ref[torch.Tensor] | None", int]
"""Column in the statistics, parameter, its gradient, and the version of the gradient after clipping."""


def _clipped(column: int, parameter: torch.Tensor) -> Clipped:
    gradient = parameter.grad
    if gradient is None:
        return column, parameter, None, -1
    try:
        version = local_part(gradient)._version
    except RuntimeError:  # inference tensors have no version counter
        version = 0
    return column, parameter, weakref.ref(gradient), version


def _is_unchanged(clipped: Clipped) -> bool:
    column, parameter, gradient, version = clipped
    return parameter.grad is (gradient and gradient()) and _clipped(column, parameter)[3] == version


class Clipping:
    """One successful clipping."""

    def __init__(
        self, parameters: list[torch.Tensor], result: torch.Tensor, statistics: GradientStatistics | None
    ) -> None:
        """Store the result (as in `GradientStatistics.clipping`) and the statistics from before the clipping."""
        self.result, self.statistics = result, statistics
        self.clipped = {id(parameter): _clipped(column, parameter) for column, parameter in enumerate(parameters)}

    def accept_gradients(self) -> None:
        """Record the gradients' versions again: a later clipping increments a counter that views of a tensor share."""
        self.clipped = {key: _clipped(column, p) for key, (column, p, *_) in self.clipped.items()}


def still_valid(clippings: list[Clipping]) -> list[Clipping]:
    """Drop parameters whose gradients have changed since: their step was skipped, and another backward pass has run."""
    for clipping in clippings:
        clipping.clipped = {key: clipped for key, clipped in clipping.clipped.items() if _is_unchanged(clipped)}
    return [clipping for clipping in clippings if clipping.clipped]


def statistics_before(
    clippings: Sequence[Clipping], names: dict[int, str]
) -> list[tuple[dict[int, str], GradientStatistics]]:
    """For each clipping: columns and names of the parameters that it clipped first, and the statistics before it."""
    found, seen = [], set[int]()
    for clipping in clippings:
        first = {column: names.get(key, "") for key, (column, *_) in clipping.clipped.items() if key not in seen}
        seen.update(clipping.clipped)
        if first and clipping.statistics is not None:
            found.append((first, clipping.statistics))
    return found


def select_columns(names: dict[int, str], statistics: GradientStatistics) -> GradientStatistics:
    """Select columns of statistics on the host, and rename them."""
    if len(names) == len(statistics.names):
        return replace(statistics, names=list(names.values()))
    columns = list(names)
    return replace(
        statistics,
        names=list(names.values()),
        is_gradient=[True] * len(names),
        _values=statistics._values[:, columns],
        _counts=statistics._counts[:, columns],
        histogram=None if statistics.histogram is None else statistics.histogram[columns],
        _clipping=None,
    )
