"""Statistics of gradients that are spread over processes: every element is counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import reference
from .._distributed import is_distributed
from .._ranks import waiting


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not is_distributed(tensor):
        return tensor
    return tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def _sharded_over(gradient: torch.Tensor, index: int) -> dict[str, tuple[dist.ProcessGroup, bool]]:
    """Process groups of a DTensor by name, each with True if the DTensor is sharded over it, False if replicated."""
    groups = {}
    for dim, placement in enumerate(gradient.placements):  # type: ignore[attr-defined]
        if placement.is_partial():
            raise ValueError(
                f"the gradient with the number {index} is a DTensor with partial sums ({placement}); "
                "redistribute() it to shards or replicas"
            )
        group = gradient.device_mesh.get_group(dim)  # type: ignore[attr-defined]
        groups[group.group_name] = (group, not placement.is_replicate())
    return groups


def groups_with_parts(tensor: torch.Tensor, process_group: dist.ProcessGroup | None, by_row: bool) -> list[str]:
    """Names of the process groups over which a tensor is split; with `by_row`, over which its rows (slices of the first
    dimension) are split. With a `process_group`, a plain tensor is split over it along the first dimension."""
    if not is_distributed(tensor):
        return [] if process_group is None or by_row else [process_group.group_name]
    return [
        tensor.device_mesh.get_group(dim).group_name  # type: ignore[attr-defined]
        for dim, placement in enumerate(tensor.placements)  # type: ignore[attr-defined]
        if not placement.is_replicate() and not (by_row and getattr(placement, "dim", None) == 0)
    ]


@dataclass
class UnitNorms:
    """Norms of the units (rows, or whole tensors) of gradients and of their weights, and which units are split over
    processes."""

    norms: torch.Tensor
    """`[2, U]`"""
    columns: dict[str, list[slice]]
    """By the name of a process group: the units that are split over its processes."""

    def in_group(self, name: str) -> torch.Tensor:
        """`[2, n]`: the norms of the parts that this process has."""
        return torch.cat([self.norms[:, :0], *(self.norms[:, columns] for columns in self.columns.get(name, []))], 1)

    def replace(self, name: str, norms: torch.Tensor) -> None:
        """Store the norms of whole units."""
        first = 0
        for columns in self.columns.get(name, []):
            size = columns.stop - columns.start
            self.norms[:, columns] = norms[:, first : first + size]
            first += size


def merged_over_groups(
    statistics: reference.Statistics,
    gradients: Sequence[torch.Tensor | None],
    p: float,
    process_group: dist.ProcessGroup | None,
    units: UnitNorms | None = None,
) -> reference.Statistics:
    """Statistics of whole gradients from the statistics of each process's parts: one all-reduce for each process group.

    `process_group` is for plain tensors. Replicas are counted by the first process of their group. In `units`, the
    norms of parts become the norms of whole units, in the same all-reduce.
    """
    for group, mine in _groups(gradients, process_group):
        own = None if units is None else units.in_group(group.group_name)
        statistics, norms = _merged(_counted(statistics, mine), own, group, p)
        if units is not None:
            units.replace(group.group_name, norms)
    return statistics


def added_over_groups(octaves: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Octaves `[N, bins]` of whole gradients from the octaves of each process's parts, as in `merged_over_groups`."""
    for group, mine in _groups(gradients, None):
        octaves = torch.where(torch.tensor(mine, device=octaves.device)[:, None], octaves, 0)
        with waiting("gradient statistics"):
            dist.all_reduce(octaves, group=group)
    return octaves


def _groups(
    gradients: Sequence[torch.Tensor | None], process_group: dist.ProcessGroup | None
) -> list[tuple[dist.ProcessGroup, list[bool]]]:
    """The process groups over which gradients are spread, each with a list: for each gradient, True if this process
    counts its part in the group."""
    plain: dict[str, tuple[dist.ProcessGroup, bool]] = {}
    if process_group is not None:
        plain[process_group.group_name] = (process_group, True)
    if not plain and all(type(gradient) in (torch.Tensor, type(None)) for gradient in gradients):
        return []
    by_gradient = [
        {} if gradient is None else _sharded_over(gradient, index) if is_distributed(gradient) else plain
        for index, gradient in enumerate(gradients)
    ]
    groups = {name: group for members in [plain, *by_gradient] for name, (group, _) in members.items()}
    return [
        (
            group,
            [
                gradient is None or own.get(name, (group, False))[1] or dist.get_rank(group) == 0
                for gradient, own in zip(gradients, by_gradient, strict=True)
            ],
        )
        for name, group in groups.items()
    ]


def _counted(statistics: reference.Statistics, mine: list[bool]) -> reference.Statistics:
    """The statistics, in which tensors that another process counts (`mine` is False) are marked as missing."""
    if all(mine):
        return statistics
    values, counts = statistics
    kept = torch.tensor(mine, device=values.device)
    nothing = torch.zeros_like(counts)
    nothing[4] = 1
    return torch.where(kept, values, 0), torch.where(kept, counts, nothing)


def _merged(
    statistics: reference.Statistics, units: torch.Tensor | None, group: dist.ProcessGroup, p: float
) -> tuple[reference.Statistics, torch.Tensor]:
    """Merge the statistics, and the 2-norms of units, of all processes. One all-reduce adds the counts, and gathers the
    values that cannot be added: each process has a row, to which the other processes add zeros. Counts are exact in
    float64."""
    values, counts = statistics
    finite = (counts[0] - counts[2] - counts[3]).to(values.dtype)
    own = torch.cat([values.flatten(), finite, *([] if units is None else [units.flatten()])])
    processes = dist.get_world_size(group)
    places = own.new_zeros((processes, len(own)))
    places[dist.get_rank(group)] = own
    packed = torch.cat([places.flatten(), counts.to(own.dtype).flatten()])
    with waiting("gradient statistics"):
        dist.all_reduce(packed, group=group)
    places = packed[: places.numel()].view_as(places)
    counts = packed[places.numel() :].view_as(counts)
    tensor_places, unit_places = places[:, : 4 * values.shape[1]], places[:, 4 * values.shape[1] :]
    norm, abs_max, mean, finite = tensor_places.view(processes, 4, -1).unbind(1)
    mean = (mean * finite).sum(0) / finite.sum(0).clamp(min=1)
    counts[4] = counts[4] == processes  # missing in all processes
    merged = torch.stack([reference.norm_of(norm, p), abs_max.amax(0), mean])
    return (merged, counts.long()), reference.norm_of(unit_places, 2.0).view(2, -1)
