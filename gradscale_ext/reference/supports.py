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
    lower, upper_weight = _two_bins(_widest(x), support)
    # Inductor stores what it stacks or concatenates, and would compute anything else again in the loop over bins.
    dtype = widened(x).dtype if support.num_bins <= 2**24 else lower.dtype  # float32 counts to 2**24
    stored = torch.stack([lower, 1 - upper_weight, upper_weight], -1).to(dtype).unsqueeze(-2)
    lower, lower_weight, upper_weight = stored.unbind(-1)
    bins = _stored(torch.arange(support.num_bins, dtype=dtype, device=x.device))
    others = upper_weight - upper_weight  # 0, or NaN for a NaN scalar
    encoded = torch.where(bins == lower, lower_weight, torch.where(bins == lower + 1, upper_weight, others))
    return encoded.to(x.dtype)


def project(probabilities: torch.Tensor, rewards: torch.Tensor, discounts: torch.Tensor, support: Bins) -> torch.Tensor:
    """`[..., S]` probabilities at rewards + discounts * raw centres, projected onto the support; no gradient."""
    p, reward, discount = (tensor.detach() for tensor in (probabilities, rewards, discounts))
    is_wide = any(tensor.dtype == torch.float64 for tensor in (p, reward, discount))
    dtype = torch.float64 if is_wide else torch.float32
    wide = _context.widest(p.device)
    atoms = reward.to(wide).unsqueeze(-1) + discount.to(wide).unsqueeze(-1) * raw_centers(support, wide, p.device)
    lower, upper_weight = _two_bins(atoms, support)
    bin = lower.long()
    mass = p.to(wide)
    projected = torch.zeros_like(atoms).scatter_add(-1, bin, mass * (1 - upper_weight))
    projected = projected.scatter_add(-1, bin + 1, mass * upper_weight)
    is_nan = (atoms.isnan() | ~mass.isfinite()).any(-1, keepdim=True)
    return torch.where(is_nan, float("nan"), projected).to(dtype)


def _two_bins(x: torch.Tensor, support: Bins) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of the lower of the two bins next to each scalar, in the dtype of `x`, and the weight of the upper bin
    (NaN for a NaN scalar)."""
    raw = _clamped_to_finite(x)
    y = _transformed(x, support)
    last_bin = support.num_bins - 1
    position = ((y - support.minimum) * (last_bin / (support.maximum - support.minimum))).clamp(0, last_bin)
    lower = position.detach().nan_to_num(0).floor().clamp(max=last_bin - 1)
    if support.space == "raw":
        bin, values = lower.long(), raw_centers(support, y.dtype, x.device)
        upper_weight = ((raw - values[bin]) / (values[bin + 1] - values[bin])).clamp(0, 1)
    else:
        upper_weight = position - lower
    return lower, upper_weight


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
    return decoded(expectation(logits, support), support)


def expectation(logits: torch.Tensor, support: Bins) -> torch.Tensor:
    """Expectations `[...]` over the support, in the coordinates of its `space`."""
    x, of = widened(logits), raw_centers if support.space == "raw" else centers
    # A power of two keeps sums of the largest centres finite.
    factor = 0.5 ** support.num_bins.bit_length()
    values = _stored(of(support, x.dtype, logits.device) * factor)
    weights = (x - x.detach().amax(-1, keepdim=True)).exp()
    least = weights.detach().amin(-1, keepdim=True)
    # The least weight is the same for all bins, so that its share of a symmetric support is exactly 0.
    share = least.squeeze(-1) * (values + values.flip(-1)).sum() / 2
    return (((weights - least) * values).sum(-1) + share) / weights.sum(-1) / factor


def decoded(expected: torch.Tensor, support: Bins) -> torch.Tensor:
    """The raw values of expectations."""
    return expected if support.space == "raw" else inverse_transform(expected, support.transform, support.eps)


def _stored(values: torch.Tensor) -> torch.Tensor:
    """The same values, as a tensor that Inductor stores: see `two_hot`."""
    return torch.cat([values[:1], values[1:]])


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
