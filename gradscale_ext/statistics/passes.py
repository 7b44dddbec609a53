"""The passes over many gradients, which may be on several devices and in several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .. import _context, reference
from .._native import _C, DEVICE_TYPES, is_ordinary
from .shards import local_part, merged_over_groups

Gradients = Sequence[torch.Tensor | None]

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def by_kernels(gradients: Gradients, p: float) -> reference.Statistics | None:
    """Statistics by the fused pass; None if it does not accept these tensors."""
    if not _context.is_eager():
        return None
    try:
        return _C.tensor_statistics(gradients, p)
    except TypeError:  # an entry is not a tensor
        return None


def has_kernels(tensors: Sequence[torch.Tensor]) -> bool:
    return (
        _context.is_eager()
        and is_ordinary()
        and _PLAIN.issuperset(map(type, tensors))
        and all(device.type in DEVICE_TYPES for device in {tensor.device for tensor in tensors})
    )


def on_one_device(gradients: Gradients, p: float) -> reference.Statistics:
    return by_kernels(gradients, p) or reference.tensor_statistics(gradients, p)


def statistics_of(
    gradients: Gradients, p: float, process_group: torch.distributed.ProcessGroup | None
) -> reference.Statistics:
    if process_group is None and (statistics := by_kernels(gradients, p)) is not None:
        return statistics
    parts = [gradient if gradient is None else local_part(gradient) for gradient in gradients]
    members = members_by(lambda index: _device_of(parts[index]), len(parts))
    statistics = in_groups(members, lambda group: on_one_device([parts[i] for i in group], p))
    return merged_over_groups(statistics, gradients, p, process_group)


def _device_of(part: torch.Tensor | None) -> torch.device | None:
    return None if part is None else part.device


def members_by(key: Callable[[int], object], count: int) -> list[list[int]]:
    """Indices below `count`, grouped by key. Indices whose key is None join the first group."""
    groups: dict[object, list[int]] = {}
    keys = [key(index) for index in range(count)]
    first = next((one for one in keys if one is not None), None)
    for index, one in enumerate(keys):
        groups.setdefault(first if one is None else one, []).append(index)
    return list(groups.values()) or [[]]


def in_groups(
    groups: list[list[int]], member_statistics: Callable[[list[int]], reference.Statistics]
) -> reference.Statistics:
    """Statistics in the order of the tensors, on the device of the first group. They are reordered without copying an
    index tensor from the host."""
    if len(groups) == 1:
        return member_statistics(groups[0])
    columns: dict[int, list[torch.Tensor]] = {}
    device: torch.device | None = None
    for members in groups:
        values, counts, histogram = member_statistics(members)
        device = device or values.device
        moved = [tensor.to(device, non_blocking=True) for tensor in (values.T, counts.T, histogram)]
        columns.update((i, list(column)) for i, *column in zip(members, *moved, strict=True))
    values, counts, histogram = (torch.stack(rows) for rows in zip(*(columns[i] for i in sorted(columns)), strict=True))
    return values.T.contiguous(), counts.T.contiguous(), histogram


def clipping_of(parts: reference.Statistics, p: float, max_norm: float, skip: bool) -> torch.Tensor:
    values, counts, _ = parts
    function = _C.clipping_of if has_kernels([values]) else reference.clipping_of
    return function(values, counts, p, max_norm, skip)


def clip(gradients: list[torch.Tensor], clipping: torch.Tensor, skip: bool) -> None:
    for device in dict.fromkeys(gradient.device for gradient in gradients):
        members = [gradient for gradient in gradients if gradient.device == device]
        clip_units = _C.clip_units if has_kernels(members) else reference.clip_units
        clip_units(members, clipping[1:2].to(device, non_blocking=True), False, skip)
