"""Statistics of gradients that are spread over processes: every element is counted once."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Statistics of whole gradients from the statistics of each process's parts: one all-reduce for each process group.

    `process_group` is for plain tensors. Replicas are counted by the first process of their group.
    """
    plain: dict[str, tuple[dist.ProcessGroup, bool]] = {}
    if process_group is not None:
        plain[process_group.group_name] = (process_group, True)
    if not plain and all(type(gradient) in (torch.Tensor, type(None)) for gradient in gradients):
        return statistics
    by_gradient = [
        _sharded_over(gradient, index) if is_distributed(gradient) else plain
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
        statistics = _merged(_counted(statistics, mine), group, p)
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


def _merged(statistics: reference.Statistics, group: dist.ProcessGroup, p: float) -> reference.Statistics:
    """Statistics of all processes from their own. One all-reduce adds the counts, and gathers what cannot be added:
    each process has its place, where the others add zeros. Counts are exact in float64."""
    values, counts, histogram = statistics
    own = torch.cat([values, (counts[0] - counts[2] - counts[3]).to(values.dtype)[None]])
    processes = dist.get_world_size(group)
    places = own.new_zeros((processes, *own.shape))
    places[dist.get_rank(group)] = own
    packed = torch.cat([places.flatten(0, 1), counts.to(own.dtype), histogram.T.to(own.dtype)])
    with waiting("gradient statistics"):
        dist.all_reduce(packed, group=group)
    of_processes, counts, histogram = torch.split(packed, [processes * len(own), len(counts), histogram.shape[1]])
    norm, abs_max, mean, finite = of_processes.view_as(places).unbind(1)
    mean = (mean * finite).sum(0) / finite.sum(0).clamp(min=1)
    counts[4] = counts[4] == processes  # missing on all of them
    return torch.stack([reference.norm_of(norm, p), abs_max.amax(0), mean]), counts.long(), histogram.T.long()
