"""Adaptive clipping: each unit of a gradient is clipped by the norm of its weights."""

from __future__ import annotations

import math

import torch

from .. import _context, reference
from .._distributed import is_distributed
from .._native import _C
from .passes import clipping_of, has_kernels, in_groups, members_by, on_one_device
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
            f"clip_gradients_: unit='row' needs gradients that are dense or of layout torch.sparse_coo, but that of "
            f"{name} is of layout {gradient.layout}; convert it with to_dense(), or use unit='tensor'"
        )


class AdaptiveClipping:
    """The units of some gradients, and what becomes of them."""

    def __init__(
        self,
        named: list[tuple[str, torch.Tensor]],
        unit: str,
        process_group: torch.distributed.ProcessGroup | None,
    ) -> None:
        """Check the gradients of named parameters, and find which of them the kernels take."""
        self._rows, self._process_group = unit == "row", process_group
        self._names = [name for name, _ in named]
        self._gradients = [parameter.grad for _, parameter in named]
        self._weights = [local_part(parameter.detach()) for _, parameter in named]
        self._parts = [None if gradient is None else local_part(gradient) for gradient in self._gradients]
        first = {id(gradient): index for index, gradient in reversed(list(enumerate(self._gradients)))}
        self._clipped = [first[id(g)] == index and g is not None for index, g in enumerate(self._gradients)]
        for (name, parameter), gradient in zip(named, self._gradients, strict=True):
            if gradient is not None:
                _check(name, parameter, gradient, self._rows)
        self._groups = members_by(self._kind, len(named))
        self._columns: dict[int, slice] = {}

    def _kind(self, index: int) -> tuple[torch.device, bool] | None:
        """Device, and True if the kernels take the layout."""
        part = self._parts[index]
        if part is None:
            return None
        return part.device, part.layout == torch.strided and self._weights[index].layout == torch.strided

    def statistics(self) -> reference.Statistics:
        """Statistics of the gradients; the same pass takes the norms of the units."""
        norms: list[torch.Tensor] = []

        def of_members(members: list[int]) -> reference.Statistics:
            values, counts, histogram, of_units = self._pass(members)
            norms.append(of_units)
            return values, counts, histogram

        statistics = in_groups(self._groups, of_members)
        clipped = [index for members in self._groups for index in members if self._clipped[index]]
        missing = [index for index, part in enumerate(self._parts) if part is None and self._is_part(index)]
        if missing:  # here, and not necessarily in other processes
            of_weights = reference.unit_norms([self._weights[index] for index in missing], self._rows)
            norms.append(torch.stack([torch.zeros_like(of_weights), of_weights]))
        begin = 0
        for index in clipped + missing:
            count = reference.units_of(self._weights[index], self._rows)
            self._columns[index] = slice(begin, begin + count)
            begin += count
        moved = [part.to(statistics[0].device, non_blocking=True) for part in norms]
        self._units = UnitNorms(moved[0] if len(moved) == 1 else torch.cat(moved, 1), self._shared_columns())
        return merged_over_groups(statistics, self._gradients, 2.0, self._process_group, self._units)

    def _pass(self, members: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Statistics of some gradients, and norms `[2, U]` of their units and of those of the weights."""
        gradients = [self._parts[index] for index in members]
        clipped = [self._clipped[index] for index in members]
        weights = [self._weights[i] if used else None for i, used in zip(members, clipped, strict=True)]
        if _context.is_eager() and (found := _C.unit_statistics(gradients, weights, self._rows)) is not None:
            return found
        statistics = on_one_device(gradients, 2.0)
        used = [g for g, is_used in zip(gradients, clipped, strict=True) if g is not None and is_used]
        pairs = (used, [weight for weight in weights if weight is not None])
        norms = [reference.unit_norms(tensors, self._rows).to(statistics[0].device) for tensors in pairs]
        return *statistics, torch.stack(norms)

    def _is_part(self, index: int) -> bool:
        """True if a plain parameter is a part of one unit in a process group."""
        weight = self._weights[index]
        return self._process_group is not None and not (self._rows and weight.dim() > 1)

    def _shared_columns(self) -> dict[str, list[slice]]:
        """Columns of units that several processes have parts of, in the order of the parameters, by process group."""
        columns: dict[str, list[slice]] = {}
        if self._process_group is None and not any(is_distributed(gradient) for gradient in self._gradients):
            return columns
        for index, own in sorted(self._columns.items()):
            gradient = self._gradients[index]
            tensor = self._weights[index] if gradient is None else gradient
            for name in groups_with_parts(tensor, self._process_group, self._rows and tensor.dim() > 1):
                columns.setdefault(name, []).append(own)
        return columns

    def clipping(self, statistics: reference.Statistics, adaptive: float, eps: float, skip: bool) -> torch.Tensor:
        """Find the factors of all units. Returns `[3]`: the total norm, the smallest factor, and whether any factor
        changes a gradient."""
        total, kept, _ = clipping_of(statistics, 2.0, math.inf, skip)
        factors = reference.unit_factors(self._units.norms, adaptive, eps)
        if skip:
            factors = torch.where((kept == 0) | factors.isnan().any(), 0, factors)
        self._factors = factors
        smallest = torch.cat([factors, factors.new_ones(1)]).amin()
        return torch.stack([total, smallest, (factors != 1).any().to(total.dtype)])

    def nonfinite_weights(self) -> list[str]:
        """Names of parameters with NaN in their weights, so that a limit is NaN. Waits for the device."""
        bad = self._factors.isnan()
        if not bad.any():
            return []
        return [self._names[index] for index, columns in sorted(self._columns.items()) if bad[columns].any()]

    def clip(self, skip: bool) -> None:
        """Multiply each unit by its factor."""
        for group in self._groups:
            members = [index for index in group if self._clipped[index]]
            if not members:
                continue
            gradients = [part for index in members if (part := self._parts[index]) is not None]
            own = self._factors[self._columns[members[0]].start : self._columns[members[-1]].stop]
            is_strided = all(gradient.layout == torch.strided for gradient in gradients)
            clip_units = _C.clip_units if is_strided and has_kernels(gradients) else reference.clip_units
            clip_units(gradients, own.to(gradients[0].device, non_blocking=True), self._rows, skip)
