"""Clippings before a step, which may clip the same parameters several times."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch

from ._shards import local_part
from .statistics import GradientStatistics

Clipped = tuple[int, torch.Tensor, "weakref.ref[torch.Tensor] | None", int]
"""Column of the statistics, parameter, which tensor its gradient is, and how often that has been written to."""


def _clipped(column: int, parameter: torch.Tensor) -> Clipped:
    gradient = parameter.grad
    if gradient is None:
        return column, parameter, None, -1
    try:
        writes = local_part(gradient)._version
    except RuntimeError:  # tensors of torch.inference_mode do not count
        writes = 0
    return column, parameter, weakref.ref(gradient), writes


def _is_as_left(clipped: Clipped) -> bool:
    column, parameter, left, writes = clipped
    return parameter.grad is (left and left()) and _clipped(column, parameter)[3] == writes


class Clipping:
    """A clipping that has succeeded."""

    def __init__(
        self, parameters: list[torch.Tensor], result: torch.Tensor, statistics: GradientStatistics | None
    ) -> None:
        """Keep what came of it, as in `GradientStatistics.clipping`, and the statistics from before it."""
        self.result, self.statistics = result, statistics
        self.clipped = {id(parameter): _clipped(column, parameter) for column, parameter in enumerate(parameters)}

    def accept_gradients(self) -> None:
        """Take the gradients as a later clipping left them, which may be views of one tensor that counts the writes."""
        self.clipped = {key: _clipped(column, p) for key, (column, p, *_) in self.clipped.items()}


def still_valid(clippings: list[Clipping]) -> list[Clipping]:
    """Drop parameters whose gradients were written to: a step was given up, and a backward pass came after it."""
    for clipping in clippings:
        clipping.clipped = {key: clipped for key, clipped in clipping.clipped.items() if _is_as_left(clipped)}
    return [clipping for clipping in clippings if clipping.clipped]


def statistics_before(
    clippings: Sequence[Clipping], names: dict[int, str]
) -> list[tuple[dict[int, str], GradientStatistics]]:
    """Statistics from before clippings, each with the columns and names of the parameters that it clipped first."""
    found, seen = [], set[int]()
    for clipping in clippings:
        first = {column: names.get(key, "") for key, (column, *_) in clipping.clipped.items() if key not in seen}
        seen.update(clipping.clipped)
        if first and clipping.statistics is not None:
            found.append((first, clipping.statistics))
    return found


def of_columns(names: dict[int, str], statistics: GradientStatistics) -> GradientStatistics:
    """Statistics, on the host, of some columns, which get these names."""
    if len(names) == len(statistics.names):
        return replace(statistics, names=list(names.values()))
    columns = list(names)
    return replace(
        statistics,
        names=list(names.values()),
        is_gradient=[True] * len(names),
        _values=statistics._values[:, columns],
        _counts=statistics._counts[:, columns],
        histogram=statistics.histogram[columns],
        _clipping=None,
    )
