"""Passes over many tensors: `l2_loss`, statistics, clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .. import _context
from .._distributed import is_distributed, whole, with_whole_gradient
from .supports import widened


def l2_loss(parameters: Iterable[torch.Tensor], weight: float | torch.Tensor) -> torch.Tensor:
    """``weight * sum of |p|^2 / 2`` over tensors. DTensors give a plain scalar too, which can be added to
    a plain loss, as with FSDP2, and to a loss that is a DTensor, as with tensor parallelism."""
    squares = [widened(parameter).square().sum() for parameter in parameters]
    sharded = [square for square in squares if is_distributed(square)]
    if not sharded:
        return (0.5 * weight * torch.stack(squares)).sum() if squares else torch.zeros(())
    plain = [square for square in squares if not is_distributed(square)]
    squares = [*plain, whole(torch.stack(sharded).sum())]
    return with_whole_gradient((0.5 * whole(weight) * torch.stack(squares)).sum())


HISTOGRAM_BINS, HISTOGRAM_FIRST_EDGE = 64, -40
"""The number of bins of log2 |g|, and the lower edge of the second bin."""

Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Values `[3, N]` (norm, largest magnitude, mean), counts `[5, N]` (elements, zeros, NaN, inf, 1 for a missing
tensor), and histogram `[N, bins]`."""


def tensor_statistics(tensors: Iterable[torch.Tensor | None], p: float) -> Statistics:
    """Statistics of tensors on one device. Complex elements are replaced by their moduli."""
    tensors = list(tensors)
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    columns = [_statistics_of(tensor, p, device) for tensor in tensors]
    if not columns:
        return (
            torch.empty((3, 0), dtype=_context.widest()),
            torch.empty((5, 0), dtype=torch.int64),
            torch.empty((0, HISTOGRAM_BINS), dtype=torch.int64),
        )
    values, counts, histograms = zip(*columns, strict=True)
    return torch.stack(values, 1), torch.stack(counts, 1), torch.stack(histograms)


def _statistics_of(tensor: torch.Tensor | None, p: float, device: torch.device) -> Statistics:
    precise = _context.widest(device)
    elements = torch.empty(0, device=device) if tensor is None else tensor.detach()
    numel = elements.numel()
    if elements.layout != torch.strided:
        elements = (elements.coalesce() if elements.layout == torch.sparse_coo else elements).values()
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj()).to(precise)
        elements = torch.hypot(elements[..., 0], elements[..., 1])
    elements = elements.to(precise).flatten()
    finite = torch.where(elements.isfinite(), elements, 0)
    magnitudes = finite.abs()
    nans, infs = elements.isnan().sum(), elements.isinf().sum()
    zeros = (elements == 0).sum() + (numel - elements.numel())
    bins = (_exponents(magnitudes) - (HISTOGRAM_FIRST_EDGE - 1)).clamp(0, HISTOGRAM_BINS - 1).long()
    histogram = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device)
    histogram = histogram.scatter_add(0, bins, (magnitudes > 0).long())
    count = numel - nans - infs
    values = [norm_of(magnitudes, p), _largest(magnitudes), finite.sum() / count.clamp(min=1)]
    counts = [torch.full_like(nans, numel), zeros, nans, infs, torch.full_like(nans, int(tensor is None))]
    return torch.stack(values), torch.stack(counts), histogram


def _exponents(magnitudes: torch.Tensor) -> torch.Tensor:
    """floor(log2(x)). While torch.compile traces, from the bits of x: Inductor of PyTorch 2.13 writes invalid C++ for
    frexp of float64. Subnormal numbers and 0 then have the smallest exponent."""
    if _context.is_eager():
        return torch.frexp(magnitudes).exponent - 1
    is_double = magnitudes.dtype == torch.float64
    fraction_bits, bias = (52, 1023) if is_double else (23, 127)
    return (magnitudes.view(torch.int64 if is_double else torch.int32) >> fraction_bits) - bias


def _largest(magnitudes: torch.Tensor) -> torch.Tensor:
    return magnitudes.amax() if magnitudes.numel() else magnitudes.sum()


def norm_of(magnitudes: torch.Tensor, p: float, dim: int = 0) -> torch.Tensor:
    """Norm of non-negative numbers along a dimension, scaled so that no power overflows or underflows."""
    if not magnitudes.shape[dim]:
        return magnitudes.sum(dim)
    largest = magnitudes.amax(dim)
    divisor = torch.where((largest > 0) & largest.isfinite(), largest, 1).unsqueeze(dim)
    return largest if math.isinf(p) else divisor.squeeze(dim) * (magnitudes / divisor).pow(p).sum(dim).pow(1 / p)


def clipping_of(
    values: torch.Tensor, counts: torch.Tensor, p: float, max_norm: float | torch.Tensor, skip_nonfinite: bool
) -> torch.Tensor:
    """`[3]`: the norm of all tensors together, the factor that clips it, and 1 if the factor is not 1, else 0. A tensor
    `max_norm` that is negative or NaN gives a factor of NaN."""
    total = norm_of(values[0], p)
    total = torch.where(counts[3].sum() > 0, math.inf, total)
    total = torch.where(counts[2].sum() > 0, math.nan, total)
    factor = (max_norm / (total + 1e-6)).clamp(max=1)
    if isinstance(max_norm, torch.Tensor):
        factor = torch.where(max_norm >= 0, factor, math.nan)
    if skip_nonfinite:
        factor = torch.where(total.isfinite(), factor, 0)
    return torch.stack([total, factor, (factor != 1).to(total.dtype)])


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The stored elements. A sparse tensor may store several for one index."""
    if tensor.layout == torch.strided:
        return tensor
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


def _multiply(elements: torch.Tensor, factor: torch.Tensor, skip_nonfinite: bool) -> None:
    wide = elements * factor
    if skip_nonfinite:
        wide = torch.where(factor == 0, 0, wide)
    elements.copy_(torch.where(factor == 1, elements, wide))


# ---- Units: rows, which are the slices of the first dimension, or whole tensors --------------------------------------


def units_of(tensor: torch.Tensor, rows: bool) -> int:
    """The number of units; a tensor of fewer than two dimensions is one unit."""
    return tensor.shape[0] if rows and tensor.dim() > 1 else 1


def unit_norms(tensors: Iterable[torch.Tensor], rows: bool) -> torch.Tensor:
    """2-norms `[U]` of the units of all tensors on one device; NaN or inf if an element is."""
    norms = [_unit_norms(tensor, rows) for tensor in tensors]
    return torch.cat(norms) if norms else torch.empty(0, dtype=_context.widest())


def _unit_norms(tensor: torch.Tensor, rows: bool) -> torch.Tensor:
    precise = _context.widest(tensor.device)
    elements = tensor.detach()
    elements = elements if elements.layout == torch.strided else elements.to_dense()
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj()).to(precise)
        elements = torch.hypot(elements[..., 0], elements[..., 1])
    elements = elements.to(precise)
    elements = elements.flatten(1) if rows and elements.dim() > 1 else elements.reshape(1, -1)
    return norm_of(elements.abs(), 2.0, dim=1)


def unit_factors(
    norms: torch.Tensor, clipping: torch.Tensor, adaptive: float, eps: float, skip_nonfinite: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors ``min(1, adaptive * max(weight norm, eps) / gradient norm)`` from `[2, U]` norms of gradients and of
    weights; and `[3]`: the norm of all tensors together, the smallest factor, and 1 if any factor is not 1, else 0.

    `clipping` is the result of `clipping_of` with ``max_norm=inf``. With `skip_nonfinite`, all factors are 0 if the
    factor of `clipping` is 0 or any factor would be NaN.
    """
    gradient, weight = norms
    weight = weight.clamp(min=eps)
    limit = torch.where(weight == 0, 0, adaptive * weight)
    factors = torch.where(gradient <= limit, 1, limit / gradient)
    if skip_nonfinite:
        factors = torch.where((clipping[1] == 0) | factors.isnan().any(), 0, factors)
    smallest = torch.cat([factors, factors.new_ones(1)]).amin()
    return factors, torch.stack([clipping[0], smallest, (factors != 1).any().to(factors.dtype)])


def clip_units(tensors: Iterable[torch.Tensor], factors: torch.Tensor, rows: bool, skip_nonfinite: bool) -> None:
    """Multiply each unit by its factor, in place. There may be one factor for all. With `skip_nonfinite`, 0 times NaN
    or inf is 0."""
    tensors = list(tensors)
    counts = [units_of(tensor, rows) for tensor in tensors]
    for tensor, factor in zip(tensors, torch.split(factors.expand(sum(counts)), counts), strict=True):
        elements = _stored(tensor.detach())
        if rows and tensor.dim() > 1:
            if tensor.layout == torch.sparse_coo:
                factor = factor[tensor._indices()[0]]
            factor = factor.view(-1, *[1] * (elements.dim() - 1))
        else:
            factor = factor[0]
        _multiply(elements, factor, skip_nonfinite)
