"""The passes as registered operators, which torch.compile keeps in its graphs.

Functions have the names and arguments of the functions of `_C` and of `reference`, and give the bits of `_C`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _context, reference
from .. import _native as _native  # registers the operators

_CPU = torch.device("cpu")

Number = float | torch.Tensor


def _split(number: Number, device: torch.device = _CPU) -> tuple[float, torch.Tensor | None]:
    """The two arguments for a number that may vary: a constant of the graph, or a tensor on a device."""
    if isinstance(number, torch.Tensor):
        return 0.0, number
    if _context.varies(number):
        return 0.0, _context.as_tensor(number, device)
    return number, None


def tensor_statistics(
    gradients: Sequence[torch.Tensor | None],
    p: Number,
    weights: Sequence[torch.Tensor | None] | None = None,
    rows: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Statistics and, if there are weights, norms of units."""
    results = torch.ops.gradscale_ext.tensor_statistics(gradients, *_split(p), weights or [], rows)
    return tuple(results if weights else results[:2])


def clipping_of(
    values: torch.Tensor, counts: torch.Tensor, p: Number, max_norm: Number, skip_nonfinite: bool
) -> torch.Tensor:
    """Norm of all tensors together, factor, and 1 if the factor is not 1."""
    limit = _split(max_norm, values.device)
    return torch.ops.gradscale_ext.clipping_of(values, counts, *_split(p), *limit, skip_nonfinite)  # type: ignore[no-any-return]


def unit_factors(
    norms: torch.Tensor, clipping: torch.Tensor, adaptive: Number, eps: Number, skip_nonfinite: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of units on a CPU, and the result of the clipping."""
    numbers = (*_split(adaptive), *_split(eps))
    return torch.ops.gradscale_ext.unit_factors(norms, clipping, *numbers, skip_nonfinite)  # type: ignore[no-any-return]


def clip_units(tensors: Sequence[torch.Tensor], factors: torch.Tensor, rows: bool, skip_nonfinite: bool) -> None:
    """Multiply each unit by its factor, in place."""
    if any(tensor.is_complex() for tensor in tensors):  # Inductor cannot compile operators that write to them
        reference.clip_units(tensors, factors, rows, skip_nonfinite)
    else:
        torch.ops.gradscale_ext.clip_units(tensors, factors, rows, skip_nonfinite)
