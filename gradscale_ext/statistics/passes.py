"""The passes over many gradients, which may be on several devices and in several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import _context, reference
from .._native import _C, DEVICE_TYPES, is_ordinary, warn_of_reference
from . import operators
from .shards import added_over_groups, local_part, merged_over_groups

Gradients = Sequence[torch.Tensor | None]

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def are_plain(tensors: Sequence[object]) -> bool:
    """Return True for tensors of PyTorch's own classes. The question takes far less time than one for each tensor."""
    return _PLAIN.issuperset(map(type, tensors))


def by_kernels(gradients: Gradients, p: float, weights: Gradients | None = None, rows: bool = False) -> Any:
    """Statistics by the fused pass and, if there are weights, norms `[2, U]` of the units of gradients and weights.
    None or a false `Refusal` if the pass does not accept these tensors."""
    if not _context.shows_operators():
        try:
            return _C.tensor_statistics(gradients, p, weights, rows)
        except TypeError:  # an entry is not a tensor
            return None
    tensors = [tensor for tensor in (*gradients, *(weights or ())) if tensor is not None]
    accepts = (
        library_for(tensors) is operators
        and len({tensor.device for tensor in tensors}) == 1
        and all((t.is_floating_point() or t.is_complex()) and t.layout == torch.strided for t in tensors)
    )
    return operators.tensor_statistics(gradients, p, weights, rows) if accepts else None


def library_for(tensors: Sequence[torch.Tensor]) -> Any:
    """The module whose passes accept these tensors: the extension, its operators while torch.compile traces or
    where dispatch modes are to see them, or the reference."""
    is_accepted = are_plain(tensors) and all(
        device.type in DEVICE_TYPES for device in {tensor.device for tensor in tensors}
    )
    if not is_accepted:
        return reference
    if not _context.shows_operators():
        return _C if is_ordinary() else reference
    return reference if _context.is_transformed() else operators


def keys_of(tensors: Sequence[object]) -> Sequence[object]:
    """Keys by which tensors are told apart: their ids, or, while torch.compile traces, the tensors themselves, because
    it would compile again for each id."""
    return list(map(id, tensors)) if _context.is_eager() else tensors


def listed(function: str, argument: str, tensors: Iterable[Any]) -> list[Any]:
    """The elements as a list. Refuses mappings and groups of an optimizer, and warns of an iterator without elements,
    which has probably been used before."""
    if isinstance(tensors, Mapping):
        raise TypeError(
            f"{function}: {argument} must be a module or tensors, but it is a mapping of type "
            f"{type(tensors).__name__}; write {argument}.values()"
        )
    elements = list(tensors)
    if elements and isinstance(elements[0], Mapping) and "params" in elements[0]:
        raise TypeError(
            f"{function}: {argument} must be a module or tensors, but {argument}[0] is a group of an optimizer; write "
            '[parameter for group in optimizer.param_groups for parameter in group["params"]]'
        )
    if not elements and isinstance(tensors, Iterator):
        _context.warn(
            f"{function}: {argument} is an iterator without elements, so there is nothing to do. It may have been used "
            "up before, as model.parameters() is by an optimizer; pass the model or a list"
        )
    return elements


def on_one_device(gradients: Gradients, p: float) -> reference.Statistics:
    found = by_kernels(gradients, p)
    if not found:
        warn_of_reference("gradient_statistics", found)
        return reference.tensor_statistics(gradients, p)
    return found  # type: ignore[no-any-return]


def statistics_of(
    gradients: Gradients, p: float, process_group: torch.distributed.ProcessGroup | None
) -> reference.Statistics:
    if process_group is None and (statistics := by_kernels(gradients, p)):
        return statistics  # type: ignore[no-any-return]
    parts = [gradient if gradient is None else local_part(gradient) for gradient in gradients]
    members = members_by([None if part is None else part.device for part in parts])
    statistics = in_groups(members, lambda group: on_one_device([parts[i] for i in group], p))
    return merged_over_groups(statistics, gradients, p, process_group)


def members_by(keys: Sequence[object]) -> list[list[int]]:
    """Indices grouped by key. Indices whose key is None join the first group."""
    groups: dict[object, list[int]] = {}
    first = next((one for one in keys if one is not None), None)
    for index, one in enumerate(keys):
        groups.setdefault(first if one is None else one, []).append(index)
    return list(groups.values()) or [[]]


def moved_to(device: torch.device, result: torch.Tensor) -> torch.Tensor:
    """Copy results of gradients on another device. The host waits for results that it reads."""
    if result.is_cpu and _context.is_captured(device):
        raise ValueError(
            f"gradscale_ext: all gradients must be on {device} while a CUDA graph is captured, but some are on cpu: a "
            "replay would not compute their norms again; call the function for the gradients of each device"
        )
    return result.to(device, non_blocking=device.type != "cpu")


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
        values, counts = member_statistics(members)
        device = device or values.device
        moved = [moved_to(device, tensor.T) for tensor in (values, counts)]
        columns.update((i, list(column)) for i, *column in zip(members, *moved, strict=True))
    values, counts = (torch.stack(rows, 1) for rows in zip(*(columns[i] for i in sorted(columns)), strict=True))
    return values, counts


def histograms_of(gradients: Gradients, counts: torch.Tensor) -> torch.Tensor:
    """Histograms `[N, bins]` of whole gradients that have these counts, on the device of the counts."""
    parts = [gradient if gradient is None else local_part(gradient) for gradient in gradients]
    octaves = [moved_to(counts.device, reference.octaves_of(part, counts.device)) for part in parts]
    if not octaves:
        return counts.new_zeros((0, reference.HISTOGRAM_BINS))
    return reference.histograms_from(added_over_groups(torch.stack(octaves), gradients), counts)


def clipping_of(parts: reference.Statistics, p: float, max_norm: float | torch.Tensor, skip: bool) -> torch.Tensor:
    values, counts = parts
    return library_for([values]).clipping_of(values, counts, p, max_norm, skip)  # type: ignore[no-any-return]


def clip(gradients: list[torch.Tensor], clipping: torch.Tensor, skip: bool) -> None:
    devices = dict.fromkeys([gradient.device for gradient in gradients])
    for device in devices:
        members = gradients if len(devices) == 1 else [gradient for gradient in gradients if gradient.device == device]
        library_for(members).clip_units(members, moved_to(device, clipping[1:2]), False, skip)
