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


Statistics = tuple[torch.Tensor, torch.Tensor]
"""Values `[3, N]` (norm, largest magnitude, mean), and counts `[5, N]` (elements, zeros, NaN, inf, 1 for a missing
tensor)."""


def tensor_statistics(tensors: Iterable[torch.Tensor | None], p: float) -> Statistics:
    """Statistics of tensors on one device. Complex elements are replaced by their moduli."""
    tensors = list(tensors)
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    columns = [_statistics_of(tensor, p, device) for tensor in tensors]
    if not columns:
        return torch.empty((3, 0), dtype=_context.widest()), torch.empty((5, 0), dtype=torch.int64)
    values, counts = zip(*columns, strict=True)
    return torch.stack(values, 1), torch.stack(counts, 1)


def _statistics_of(tensor: torch.Tensor | None, p: float, device: torch.device) -> Statistics:
    elements = torch.empty(0, device=device) if tensor is None else _real_elements(tensor)
    numel = 0 if tensor is None else tensor.numel()
    elements = elements.to(_context.widest(device)).flatten()
    finite = torch.where(elements.isfinite(), elements, 0)
    magnitudes = finite.abs()
    nans, infs = elements.isnan().sum(), elements.isinf().sum()
    zeros = (elements == 0).sum() + (numel - elements.numel())
    count = numel - nans - infs
    values = [norm_of(magnitudes, p), _largest(magnitudes), finite.sum() / count.clamp(min=1)]
    counts = [torch.full_like(nans, numel), zeros, nans, infs, torch.full_like(nans, int(tensor is None))]
    return torch.stack(values), torch.stack(counts)


def _real_elements(tensor: torch.Tensor) -> torch.Tensor:
    """The stored elements, those with the same index added up; the moduli of complex ones."""
    elements = tensor.detach()
    if elements.layout != torch.strided:
        elements = (elements.coalesce() if elements.layout == torch.sparse_coo else elements).values()
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj()).to(_context.widest(tensor.device))
        elements = torch.hypot(elements[..., 0], elements[..., 1])
    return elements


def _largest(magnitudes: torch.Tensor) -> torch.Tensor:
    return magnitudes.amax() if magnitudes.numel() else magnitudes.sum()


def norm_of(magnitudes: torch.Tensor, p: float, dim: int = 0) -> torch.Tensor:
    """Norm of non-negative numbers along a dimension, scaled so that no power overflows or underflows."""
    if not magnitudes.shape[dim]:
        return magnitudes.sum(dim)
    largest = magnitudes.amax(dim)
    divisor = torch.where((largest > 0) & largest.isfinite(), largest, 1).unsqueeze(dim)
    return largest if math.isinf(p) else divisor.squeeze(dim) * (magnitudes / divisor).pow(p).sum(dim).pow(1 / p)


# ---- Histograms ------------------------------------------------------------------------------------------------------

HISTOGRAM_BINS, HISTOGRAM_FIRST_EDGE = 64, -40
"""The number of bins of log2 |g|, one octave each, and the lower edge of the second bin. The first bin also counts
everything smaller, and the last one everything larger."""


def histograms(tensors: Iterable[torch.Tensor | None], counts: torch.Tensor) -> torch.Tensor:
    """`[N, bins]` int64: the number of finite nonzero elements by ``log2 |g|``. The tensors are on the device of their
    counts, which `tensor_statistics` returns."""
    octaves = [octaves_of(tensor, counts.device) for tensor in tensors]
    return histograms_from(torch.stack(octaves), counts) if octaves else counts.new_zeros((0, HISTOGRAM_BINS))


def octaves_of(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """`[bins]` int64: the number of all elements by ``log2 |g|``, zeros in the first bin, NaN and inf in the last.

    The exponent is read from the bits of an element. Temporary memory is two integers of the element's size.
    """
    if tensor is None:
        return torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device)
    elements = _real_elements(tensor).resolve_neg()
    octaves = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=elements.device)
    if tensor.layout != torch.strided:
        octaves[0] = tensor.numel() - elements.numel()
    if elements.dtype == torch.float64:
        integers, fraction_bits, bias = torch.int64, 52, 1023
    else:
        elements, integers, fraction_bits, bias = elements.float(), torch.int32, 23, 127
    elements = elements.flatten()
    if _context.is_eager() and _context.is_transformed():  # vmap of PyTorch 2.11 cannot view bits
        exponents = torch.where(elements.isfinite(), torch.frexp(elements).exponent - 1, bias + 1)
        bins = torch.where(elements == 0, -bias, exponents) - (HISTOGRAM_FIRST_EDGE - 1)
    else:
        exponents = (elements.view(integers) >> fraction_bits).bitwise_and_(2 * bias + 1)
        bins = exponents.sub_(bias + HISTOGRAM_FIRST_EDGE - 1)
    bins = bins.clamp(0, HISTOGRAM_BINS - 1)
    return octaves.index_add(0, bins, torch.ones_like(octaves[:1]).expand(bins.shape))


def histograms_from(octaves: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Histograms of the finite nonzero elements from the `[N, bins]` octaves of all elements, and their counts."""
    _, zeros, nans, infs, _ = counts.unsqueeze(-1)
    return torch.cat([octaves[:, :1] - zeros, octaves[:, 1:-1], octaves[:, -1:] - (nans + infs)], 1)


# ---- Clipping --------------------------------------------------------------------------------------------------------


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
    elements = _real_elements(tensor if tensor.layout == torch.strided else tensor.detach().to_dense())
    elements = elements.to(_context.widest(tensor.device))
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
