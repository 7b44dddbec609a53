"""Statistics of gradients that are spread over processes: every element is counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import reference


def _is_distributed(tensor: torch.Tensor | None) -> bool:
    return dist.is_available() and isinstance(tensor, _dtensor())


def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor  # importing it takes a while

    return DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not _is_distributed(tensor):
        return tensor
    return tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def _sharded_over(gradient: torch.Tensor, index: int) -> dict[str, tuple[dist.ProcessGroup, bool]]:
    """Process groups of a DTensor by name, each with whether the DTensor is sharded, not replicated, over it."""
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


def merged_over_groups(
    statistics: reference.Statistics,
    gradients: Sequence[torch.Tensor | None],
    p: float,
    process_group: dist.ProcessGroup | None,
) -> reference.Statistics:
    """Statistics of whole gradients from those of each process's parts: one all-gather for each process group.

    `process_group` is that of plain tensors. Replicas are counted by the first process of their group.
    """
    plain: dict[str, tuple[dist.ProcessGroup, bool]] = {}
    if process_group is not None:
        plain[process_group.group_name] = (process_group, True)
    if not plain and all(type(gradient) in (torch.Tensor, type(None)) for gradient in gradients):
        return statistics
    by_gradient = [
        _sharded_over(gradient, index) if _is_distributed(gradient) else plain
        for index, gradient in enumerate(gradients)
        if gradient is not None
    ]
    groups = {name: group for of_gradient in [plain, *by_gradient] for name, (group, _) in of_gradient.items()}
    for name, group in groups.items():
        present = iter(by_gradient)
        mine = [
            gradient is None or next(present).get(name, (group, False))[1] or dist.get_rank(group) == 0
            for gradient in gradients
        ]
        statistics = _merged(_gathered(_counted(statistics, mine), group), p)
    return statistics


def _counted(statistics: reference.Statistics, mine: list[bool]) -> reference.Statistics:
    """The statistics with the columns of tensors that another process counts set to nothing."""
    if all(mine):
        return statistics
    values, counts, histogram = statistics
    kept = torch.tensor(mine, device=values.device)
    nothing = torch.zeros_like(counts)
    nothing[4] = 1
    return torch.where(kept, values, 0), torch.where(kept, counts, nothing), torch.where(kept[:, None], histogram, 0)


def _gathered(statistics: reference.Statistics, group: dist.ProcessGroup) -> reference.Statistics:
    """Statistics of all processes, along a new first dimension. Counts are exact in float64."""
    values, counts, histogram = statistics
    packed = torch.cat([values, counts.to(values.dtype), histogram.T.to(values.dtype)]).contiguous()
    processes = dist.get_world_size(group)
    everybody = packed.new_empty((processes * packed.shape[0], packed.shape[1]))
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from PyTorch 2.13 on
    all_gather(everybody, packed, group=group)
    everybody = everybody.view(processes, *packed.shape)
    bins = everybody[:, len(values) + len(counts) :].transpose(1, 2)
    return everybody[:, : len(values)], everybody[:, len(values) : -bins.shape[2]].long(), bins.long()


def _merged(statistics: reference.Statistics, p: float) -> reference.Statistics:
    values, counts, histogram = statistics
    norm, abs_max, mean = values.unbind(1)
    finite = counts[:, 0] - counts[:, 2] - counts[:, 3]
    mean = (mean * finite).sum(0) / finite.sum(0).clamp(min=1)
    merged = torch.cat([counts[:, :4].sum(0), counts[:, 4:].amin(0)])
    return torch.stack([reference.norm_of(norm, p), abs_max.amax(0), mean]), merged, histogram.sum(0)
