"""The clippings of one step. The same parameters may be clipped several times."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..statistics.gradients import GradientStatistics
from ..statistics.shards import local_part

Clipped = tuple[int, torch.Tensor, "weakref.ref[torch.Tensor] | None", int]
"""Column in the statistics, parameter, its gradient tensor, and that tensor's version counter."""


def _clipped(column: int, parameter: torch.Tensor) -> Clipped:
    gradient = parameter.grad
    if gradient is None:
        return column, parameter, None, -1
    try:
        writes = local_part(gradient)._version
    except RuntimeError:  # inference tensors have no version counter
        writes = 0
    return column, parameter, weakref.ref(gradient), writes


def _is_unchanged(clipped: Clipped) -> bool:
    column, parameter, gradient, writes = clipped
    return parameter.grad is (gradient and gradient()) and _clipped(column, parameter)[3] == writes


class Clipping:
    """One successful clipping."""

    def __init__(
        self, parameters: list[torch.Tensor], result: torch.Tensor, statistics: GradientStatistics | None
    ) -> None:
        """Store its result, as in `GradientStatistics.clipping`, and the statistics measured before it."""
        self.result, self.statistics = result, statistics
        self.clipped = {id(parameter): _clipped(column, parameter) for column, parameter in enumerate(parameters)}

    def accept_gradients(self) -> None:
        """Record the gradients again after a later clipping. Gradients may be views that share one version counter."""
        self.clipped = {key: _clipped(column, p) for key, (column, p, *_) in self.clipped.items()}


def still_valid(clippings: list[Clipping]) -> list[Clipping]:
    """Drop parameters whose gradients changed since: the step was skipped, and another backward pass has run."""
    for clipping in clippings:
        clipping.clipped = {key: clipped for key, clipped in clipping.clipped.items() if _is_unchanged(clipped)}
    return [clipping for clipping in clippings if clipping.clipped]


def statistics_before(
    clippings: Sequence[Clipping], names: dict[int, str]
) -> list[tuple[dict[int, str], GradientStatistics]]:
    """The statistics before each clipping, with columns and names of the parameters that it was the first to clip."""
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
        histogram=statistics.histogram[columns],
        _clipping=None,
    )
