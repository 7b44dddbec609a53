"""Adaptive clipping: each unit of a gradient (a row, or the whole tensor) is clipped by the norm of its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import _context, reference
from .._distributed import is_distributed
from .passes import by_kernels, clipping_of, in_groups, keys_of, library_for, members_by, moved_to, on_one_device
from .shards import UnitNorms, groups_with_parts, local_part, merged_over_groups


def _check(name: str, parameter: torch.Tensor, gradient: torch.Tensor, rows: bool) -> None:
    placements = [getattr(tensor, "placements", None) for tensor in (gradient, parameter)]
    if placements[0] != placements[1]:
        raise ValueError(
            f"clip_gradients_: adaptive clipping needs a gradient that is sharded as its parameter is, but "
            f"{name} has placements {placements[1]}, and its gradient {placements[0]}; redistribute() one of them"
        )
    if rows and gradient.dim() > 1 and gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(
            f"clip_gradients_: unit='row' needs gradients that are dense or of layout torch.sparse_coo, but the "
            f"gradient of {name} is of layout {gradient.layout}; convert it with to_dense(), or use unit='tensor'"
        )


class AdaptiveClipping:
    """The units of some gradients: their statistics, norms and factors."""

    def __init__(
        self,
        named: list[tuple[str, torch.Tensor]],
        unit: str,
        process_group: torch.distributed.ProcessGroup | None,
    ) -> None:
        """Collect the gradients. A gradient that several parameters share is clipped once."""
        self._rows, self._process_group = unit == "row", process_group
        self._named = named
        self._gradients = [parameter.grad for _, parameter in named]
        self._clipped: list[bool] = []
        seen: set[object] = set()
        for gradient, key in zip(self._gradients, keys_of(self._gradients), strict=True):
            self._clipped.append(gradient is not None and key not in seen)
            seen.add(key)
        self._columns: dict[int, slice] = {}

    def statistics(self) -> reference.Statistics:
        """Statistics of the gradients; the same pass computes the norms of the units."""
        if self._process_group is None:
            self._parts, self._weights = self._gradients, [parameter for _, parameter in self._named]
            self._groups = [list(range(len(self._named)))]
            if found := self._by_kernels(self._groups[0]):
                self._units = UnitNorms(found[2], {})
                return found[:2]
        return self._in_groups()

    def _in_groups(self) -> reference.Statistics:
        """`statistics` for sharded gradients, and for gradients on several devices or of several layouts."""
        self._weights = [local_part(parameter.detach()) for _, parameter in self._named]
        self._parts = [None if gradient is None else local_part(gradient) for gradient in self._gradients]
        for (name, parameter), gradient in zip(self._named, self._gradients, strict=True):
            if gradient is not None:
                _check(name, parameter, gradient, self._rows)
        self._groups = members_by([self._kind(index) for index in range(len(self._named))])
        norms: list[torch.Tensor] = []

        def member_statistics(members: list[int]) -> reference.Statistics:
            values, counts, unit_norms = self._by_kernels(members) or self._by_reference(members)
            norms.append(unit_norms)
            return values, counts

        statistics = in_groups(self._groups, member_statistics)
        missing = [index for index, part in enumerate(self._parts) if part is None and self._is_part(index)]
        if missing:  # in this process, and not necessarily in others
            weight_norms = reference.unit_norms([self._weights[index] for index in missing], self._rows)
            norms.append(torch.stack([torch.zeros_like(weight_norms), weight_norms]))
        self._find_columns(missing)
        moved = [moved_to(statistics[0].device, part) for part in norms]
        self._units = UnitNorms(moved[0] if len(moved) == 1 else torch.cat(moved, 1), self._shared_columns())
        return merged_over_groups(statistics, self._gradients, 2.0, self._process_group, self._units)

    def _kind(self, index: int) -> tuple[torch.device, bool] | None:
        """Device, and True if the kernels accept the layouts; None if the gradient is missing."""
        part = self._parts[index]
        if part is None:
            return None
        return part.device, part.layout == torch.strided and self._weights[index].layout == torch.strided

    def _weights_of(self, members: list[int]) -> list[torch.Tensor | None]:
        """Weights of the members whose gradients are clipped; None for the other members."""
        return [self._weights[index] if self._clipped[index] else None for index in members]

    def _by_kernels(self, members: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        gradients = [self._parts[index] for index in members]
        return by_kernels(gradients, 2.0, self._weights_of(members), self._rows)  # type: ignore[no-any-return]

    def _by_reference(self, members: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradients, weights = [self._parts[index] for index in members], self._weights_of(members)
        values, counts = on_one_device(gradients, 2.0)
        pairs = [(g, w) for g, w in zip(gradients, weights, strict=True) if g is not None and w is not None]
        norms = [reference.unit_norms([pair[i] for pair in pairs], self._rows).to(values.device) for i in (0, 1)]
        return values, counts, torch.stack(norms)

    def _find_columns(self, missing: Sequence[int] = ()) -> None:
        """Find the columns, in the norms of all units, of each clipped gradient and of each parameter whose gradient is
        missing."""
        clipped = [index for members in self._groups for index in members if self._clipped[index]]
        begin = 0
        for index in [*clipped, *missing]:
            count = reference.units_of(self._weights[index], self._rows)
            self._columns[index] = slice(begin, begin + count)
            begin += count

    def _is_part(self, index: int) -> bool:
        """True if a plain parameter is this process's part of a unit that is split over the process group."""
        weight = self._weights[index]
        return self._process_group is not None and not (self._rows and weight.dim() > 1)

    def _shared_columns(self) -> dict[str, list[slice]]:
        """By process group: the columns of units that are split over it, in the order of the parameters."""
        columns: dict[str, list[slice]] = {}
        if self._process_group is None and not any(is_distributed(gradient) for gradient in self._gradients):
            return columns
        for index, own in sorted(self._columns.items()):
            gradient = self._gradients[index]
            tensor = self._weights[index] if gradient is None else gradient
            for name in groups_with_parts(tensor, self._process_group, self._rows and tensor.dim() > 1):
                columns.setdefault(name, []).append(own)
        return columns

    def clipping(
        self, statistics: reference.Statistics, adaptive: float | torch.Tensor, eps: float, skip: bool
    ) -> torch.Tensor:
        """Find the factors of all units. Returns `[3]`: the total norm, the smallest factor, and 1 if any factor
        is not 1, else 0."""
        norms, without_limit = self._units.norms, clipping_of(statistics, 2.0, math.inf, skip)
        library: Any = library_for([norms]) if norms.is_cpu and norms.is_contiguous() else reference
        self._clipping: torch.Tensor
        self._factors, self._clipping = library.unit_factors(norms, without_limit, adaptive, eps, skip)
        return self._clipping

    def nonfinite_weights(self) -> list[str]:
        """Names of parameters with a NaN limit, because their weights contain NaN. Waits for the device."""
        bad = self._factors.isnan()
        if not bad.any():
            return []
        self._find_columns()
        return [self._named[index][0] for index, columns in sorted(self._columns.items()) if bad[columns].any()]

    def clip(self, skip: bool) -> None:
        """Multiply each unit by its factor."""
        can_read = self._clipping.is_cpu and not _context.shows_operators() and _context.has_values(self._clipping)
        if can_read and self._clipping[2] == 0:
            return
        begin = 0
        for group in self._groups:
            parts = [self._parts[index] for index in group if self._clipped[index]]
            gradients = [part for part in parts if part is not None]
            if not gradients:
                continue
            end = begin + sum(reference.units_of(gradient, self._rows) for gradient in gradients)
            own = moved_to(gradients[0].device, self._factors[begin:end])
            begin = end
            is_strided = all(gradient.layout == torch.strided for gradient in gradients)
            library: Any = library_for(gradients) if is_strided else reference
            library.clip_units(gradients, own, self._rows, skip)
