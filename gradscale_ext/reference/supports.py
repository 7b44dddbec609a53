"""Supports: encoding scalars as distributions over bins, and decoding them."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from .. import _context
from ..transforms import inverse_transform, transform


class Bins(Protocol):
    """The fields of a `Support`."""

    @property
    def minimum(self) -> float: ...
    @property
    def maximum(self) -> float: ...
    @property
    def num_bins(self) -> int: ...
    @property
    def transform(self) -> str: ...
    @property
    def eps(self) -> float: ...
    @property
    def space(self) -> str: ...


def centers(support: Bins, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """`[S]` centres in transformed coordinates; exactly antisymmetric for a symmetric support."""
    middle = 0.5 * (support.minimum + support.maximum)
    half_spacing = 0.5 * (support.maximum - support.minimum) / (support.num_bins - 1)
    odd = torch.arange(1 - support.num_bins, support.num_bins, 2, dtype=dtype, device=device)
    return middle + half_spacing * odd


def raw_centers(support: Bins, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """`[S]` centres transformed back."""
    wide = centers(support, _context.widest(device), device)
    return inverse_transform(wide, support.transform, support.eps).to(dtype)


def two_hot(x: torch.Tensor, support: Bins) -> torch.Tensor:
    """`[..., S]` distributions with mass on the two bins next to the scalars `[...]`."""
    bin, upper_weight = (found.unsqueeze(-1) for found in _two_bins(_widest(x), support))
    zeros = torch.zeros((*x.shape, support.num_bins), dtype=widened(x).dtype, device=x.device)
    weights = 1 - upper_weight, upper_weight
    lower, upper = (weight.to(zeros.dtype) for weight in weights)
    encoded = zeros.scatter(-1, bin, lower).scatter(-1, bin + 1, upper)
    # A NaN scalar gives a row of NaN: its two weights are NaN already, the other bins are set here.
    return torch.where(upper_weight.isnan(), float("nan"), encoded).to(x.dtype)


def project(probabilities: torch.Tensor, rewards: torch.Tensor, discounts: torch.Tensor, support: Bins) -> torch.Tensor:
    """`[..., S]` probabilities at rewards + discounts * raw centres, projected onto the support; no gradient."""
    p, reward, discount = (tensor.detach() for tensor in (probabilities, rewards, discounts))
    is_wide = any(tensor.dtype == torch.float64 for tensor in (p, reward, discount))
    dtype = torch.float64 if is_wide else torch.float32
    wide = _context.widest(p.device)
    atoms = reward.to(wide).unsqueeze(-1) + discount.to(wide).unsqueeze(-1) * raw_centers(support, wide, p.device)
    bin, upper_weight = _two_bins(atoms, support)
    mass = p.to(wide)
    projected = torch.zeros_like(atoms).scatter_add(-1, bin, mass * (1 - upper_weight))
    projected = projected.scatter_add(-1, bin + 1, mass * upper_weight)
    is_nan = (atoms.isnan() | ~mass.isfinite()).any(-1, keepdim=True)
    return torch.where(is_nan, float("nan"), projected).to(dtype)


def _two_bins(x: torch.Tensor, support: Bins) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower of the two bins next to each scalar, and the weight of the upper bin (NaN for a NaN scalar)."""
    raw = _clamped_to_finite(x)
    y = _transformed(x, support)
    last_bin = support.num_bins - 1
    position = ((y - support.minimum) * (last_bin / (support.maximum - support.minimum))).clamp(0, last_bin)
    lower = position.detach().nan_to_num(0).floor().clamp(max=last_bin - 1)
    bin = lower.long()
    if support.space == "raw":
        values = raw_centers(support, y.dtype, x.device)
        upper_weight = ((raw - values[bin]) / (values[bin + 1] - values[bin])).clamp(0, 1)
    else:
        upper_weight = position - lower
    return bin, upper_weight


def hl_gauss(x: torch.Tensor, support: Bins, sigma_ratio: float) -> torch.Tensor:
    """`[..., S]` histograms of normals around the transformed scalars `[...]`."""
    y = _transformed(_widest(x), support).clamp(support.minimum, support.maximum).unsqueeze(-1)
    width = (support.maximum - support.minimum) / (support.num_bins - 1)
    position = (y - support.minimum) / width
    # Beyond these limits the distribution is a point or uniform, and y's dtype may not represent the arguments of erf.
    most = 1e100 if y.dtype == torch.float64 else 1e30
    scale = min(max(1 / (math.sqrt(2) * sigma_ratio), 1 / most), most)
    edges = (torch.arange(support.num_bins + 1, dtype=y.dtype, device=x.device) - 0.5 - position) * scale
    total = _mass_between(edges[..., :1], edges[..., -1:])
    return (_mass_between(edges[..., :-1], edges[..., 1:]) / total).to(x.dtype)


def _mass_between(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Twice the mass of a normal distribution between two edges, in units of sqrt(2) standard deviations from the mean.
    Away from the mean it is a difference of tails, because a difference of erf would cancel."""
    inner, outer = torch.maximum(low, -high), torch.maximum(high, -low)
    return torch.where(inner > 0.5, torch.erfc(inner) - torch.erfc(outer), torch.erf(outer) - torch.erf(inner))


def decode(logits: torch.Tensor, support: Bins) -> torch.Tensor:
    """Scalars `[...]` that logits `[..., S]` predict: the expectation over the support, transformed back."""
    probabilities = widened(logits).softmax(-1)
    raw = support.space == "raw"
    values = (raw_centers if raw else centers)(support, probabilities.dtype, logits.device)
    # Bins at equal distance from the middle are added in pairs, p c + p' c' = (p - p') c + p' (c + c') for |c| <= |c'|:
    # a small centre is not lost next to a large one, and equal p over a symmetric support give exactly 0.
    pairs = support.num_bins // 2
    p, other = probabilities[..., :pairs], probabilities[..., -pairs:].flip(-1)
    center, opposite = values[:pairs], values[-pairs:].flip(-1)
    is_smaller = center.abs() <= opposite.abs()
    smaller = torch.where(is_smaller, center, opposite)
    difference = torch.where(is_smaller, p - other, other - p)
    larger_rest = torch.where(is_smaller, other, p)
    expected = (difference * smaller + larger_rest * (center + opposite)).sum(-1)
    if support.num_bins % 2:
        expected = expected + probabilities[..., pairs] * values[pairs]
    return expected if raw else inverse_transform(expected, support.transform, support.eps)


def widened(x: torch.Tensor) -> torch.Tensor:
    """Widen half types to float32."""
    return x if x.dtype == torch.float64 else x.float()


def _widest(x: torch.Tensor) -> torch.Tensor:
    """Widen to the widest dtype of the device, in which the kernels place scalars among the bins, too."""
    return x.to(_context.widest(x.device))


def _transformed(x: torch.Tensor, support: Bins) -> torch.Tensor:
    """Transformed scalars. An infinite scalar gives an end of the support, even if the dtype's largest number is inside
    the support."""
    y = transform(_clamped_to_finite(x), support.transform, support.eps)
    return torch.where(x == math.inf, support.maximum, torch.where(x == -math.inf, support.minimum, y))


def _clamped_to_finite(x: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(x.dtype).max
    return x.clamp(-limit, limit)
