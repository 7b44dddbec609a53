"""Everything in plain PyTorch, one operation after the other.

The truth for tests, and the path for every context that the fused kernels do not take: transforms, compilation, tensor
subclasses, other devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ._validate import Call, Entries, StepNumbers, as_dict, turned_around, validate
from .flow import scale_gradient
from .heads import (
    BinaryCrossEntropy,
    Head,
    HLGauss,
    MeanSquaredError,
    NegativeCosine,
    PerStepLoss,
    SoftCrossEntropy,
    TwoHot,
)
from .output import MultiStepLossOutput
from .transforms import signed_hyperbolic, signed_parabolic, symexp, symlog

if TYPE_CHECKING:
    from .support import Support


def transform(x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
    """Apply the value transform called `name`."""
    if name == "signed_hyperbolic":
        return signed_hyperbolic(x, eps)
    return symlog(x) if name == "symlog" else x


def inverse_transform(x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
    """Apply the inverse of the value transform called `name`."""
    if name == "signed_hyperbolic":
        return signed_parabolic(x, eps)
    return symexp(x) if name == "symlog" else x


def centers(support: Support, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """`[S]` centres in transformed coordinates; exactly antisymmetric for a symmetric support."""
    middle = 0.5 * (support.minimum + support.maximum)
    half_spacing = 0.5 * (support.maximum - support.minimum) / (support.num_bins - 1)
    odd = torch.arange(1 - support.num_bins, support.num_bins, 2, dtype=dtype, device=device)
    return middle + half_spacing * odd


def raw_centers(support: Support, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """`[S]` centres transformed back."""
    return inverse_transform(centers(support, torch.float64, device), support.transform, support.eps).to(dtype)


def two_hot(x: torch.Tensor, support: Support) -> torch.Tensor:
    """`[..., S]` distributions with mass on the two bins next to the scalars `[...]`."""
    raw = _clamped_to_finite(_widened(x))
    y = transform(raw, support.transform, support.eps)
    last_bin = support.num_bins - 1
    position = ((y - support.minimum) * (last_bin / (support.maximum - support.minimum))).clamp(0, last_bin)
    lower = position.detach().nan_to_num(0).floor().clamp(max=last_bin - 1)
    bin = lower.long()
    if support.space == "raw":
        values = raw_centers(support, y.dtype, x.device)
        upper_weight = ((raw - values[bin]) / (values[bin + 1] - values[bin])).clamp(0, 1)
    else:
        upper_weight = position - lower
    bin, upper_weight = bin.unsqueeze(-1), upper_weight.unsqueeze(-1)
    zeros = torch.zeros((*x.shape, support.num_bins), dtype=y.dtype, device=x.device)
    encoded = zeros.scatter(-1, bin, 1 - upper_weight).scatter(-1, bin + 1, upper_weight)
    # A row of NaN for a NaN scalar: its two weights already are, the other bins follow.
    return torch.where(position.isnan().unsqueeze(-1), float("nan"), encoded).to(x.dtype)


def hl_gauss(x: torch.Tensor, support: Support, sigma_ratio: float) -> torch.Tensor:
    """`[..., S]` histograms of normals around the transformed scalars `[...]`."""
    y = transform(_clamped_to_finite(_widened(x)), support.transform, support.eps)
    y = y.clamp(support.minimum, support.maximum).unsqueeze(-1)
    width = (support.maximum - support.minimum) / (support.num_bins - 1)
    edges = torch.arange(support.num_bins + 1, dtype=y.dtype, device=x.device) * width + (support.minimum - width / 2)
    # Phi is erf / 2 + 1/2: the constants go away with the division by the total.
    below = torch.erf((edges - y) / (math.sqrt(2) * sigma_ratio * width))
    total = below[..., -1:] - below[..., :1]
    return ((below[..., 1:] - below[..., :-1]) / total).to(x.dtype)


def decode(logits: torch.Tensor, support: Support) -> torch.Tensor:
    """Scalars `[...]` that logits `[..., S]` predict: the expectation over the support, transformed back."""
    probabilities = _widened(logits).softmax(-1)
    raw = support.space == "raw"
    values = (raw_centers if raw else centers)(support, probabilities.dtype, logits.device)
    # Bins at equal distance from the middle are taken together, p c + p' c' = (p - p') c + p' (c + c') for |c| <= |c'|:
    # a small centre is not lost beside a large one, and equal p over a symmetric support give exactly 0.
    other, opposite = probabilities.flip(-1), values.flip(-1)
    is_smaller = values.abs() <= opposite.abs()
    smaller = torch.where(is_smaller, values, opposite)
    difference = torch.where(is_smaller, probabilities - other, other - probabilities)
    of_larger = torch.where(is_smaller, other, probabilities)
    expected = 0.5 * (difference * smaller + of_larger * (values + opposite)).sum(-1)
    return expected if raw else inverse_transform(expected, support.transform, support.eps)


def l2_loss(parameters: Iterable[torch.Tensor], weight: float | torch.Tensor) -> torch.Tensor:
    """``weight * sum of |p|^2 / 2`` over tensors."""
    squares = [_widened(parameter).square().sum() for parameter in parameters]
    return (0.5 * weight * torch.stack(squares)).sum() if squares else torch.zeros(())


HISTOGRAM_BINS, HISTOGRAM_FIRST_EDGE = 64, -40
"""Bins of log2 |g|; where the second one begins."""

Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Values `[3, N]` (norm, largest magnitude, mean), counts `[5, N]` (elements, zeros, NaN, inf, whether there is no
tensor), and histogram `[N, bins]`."""


def tensor_statistics(tensors: Iterable[torch.Tensor | None], p: float) -> Statistics:
    """Statistics of tensors of one device; of complex ones those of their moduli."""
    tensors = list(tensors)
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    columns = [_statistics_of(tensor, p, device) for tensor in tensors]
    if not columns:
        return (
            torch.empty((3, 0), dtype=torch.float64),
            torch.empty((5, 0), dtype=torch.int64),
            torch.empty((0, HISTOGRAM_BINS), dtype=torch.int64),
        )
    values, counts, histograms = zip(*columns, strict=True)
    return torch.stack(values, 1), torch.stack(counts, 1), torch.stack(histograms)


def _statistics_of(tensor: torch.Tensor | None, p: float, device: torch.device) -> Statistics:
    precise = torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have
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
    exponents = torch.frexp(magnitudes).exponent - 1  # floor of log2
    bins = (exponents - (HISTOGRAM_FIRST_EDGE - 1)).clamp(0, HISTOGRAM_BINS - 1).long()
    histogram = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device)
    histogram = histogram.scatter_add(0, bins, (magnitudes > 0).long())
    count = numel - nans - infs
    values = [norm_of(magnitudes, p), _largest(magnitudes), finite.sum() / count.clamp(min=1)]
    counts = [torch.full_like(nans, numel), zeros, nans, infs, torch.full_like(nans, int(tensor is None))]
    return torch.stack(values), torch.stack(counts), histogram


def _largest(magnitudes: torch.Tensor) -> torch.Tensor:
    return magnitudes.amax() if magnitudes.numel() else magnitudes.sum()


def norm_of(magnitudes: torch.Tensor, p: float, dim: int = 0) -> torch.Tensor:
    """Norm of non-negative numbers along a dimension, which neither overflows nor vanishes on the way."""
    if not magnitudes.shape[dim]:
        return magnitudes.sum(dim)
    largest = magnitudes.amax(dim)
    divisor = torch.where((largest > 0) & largest.isfinite(), largest, 1).unsqueeze(dim)
    return largest if math.isinf(p) else divisor.squeeze(dim) * (magnitudes / divisor).pow(p).sum(dim).pow(1 / p)


def clipping_of(
    values: torch.Tensor, counts: torch.Tensor, p: float, max_norm: float, skip_nonfinite: bool
) -> torch.Tensor:
    """`[3]`: the norm of all tensors together, the factor that clips it, and whether that changes anything."""
    total = norm_of(values[0], p)
    total = torch.where(counts[3].sum() > 0, math.inf, total)
    total = torch.where(counts[2].sum() > 0, math.nan, total)
    factor = (max_norm / (total + 1e-6)).clamp(max=1)
    if skip_nonfinite:
        factor = torch.where(total.isfinite(), factor, 0)
    return torch.stack([total, factor, (factor != 1).to(total.dtype)])


def clip_tensors(tensors: Iterable[torch.Tensor], clipping: torch.Tensor, skip_nonfinite: bool) -> None:
    """Multiply tensors by the factor, in place; a factor of 0 leaves zeros where `skip_nonfinite`."""
    factor = clipping[1]
    for tensor in tensors:
        elements = tensor.detach()
        if elements.layout != torch.strided:
            elements = elements._values() if elements.layout == torch.sparse_coo else elements.values()
        wide = elements * factor.to(elements.device)
        if skip_nonfinite:
            wide = torch.where(factor.to(elements.device) == 0, 0, wide)
        elements.copy_(wide)


def multi_step_loss(
    heads: Mapping[str, Head],
    predictions: Mapping[str, Entries],
    targets: Mapping[str, Entries],
    *,
    step_weights: StepNumbers = None,
    step_gradient_scale: StepNumbers | str = None,
    importance_weights: torch.Tensor | None = None,
    mask: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
    reduction: str = "mean",
    nonfinite: str = "propagate",
    batch_first: bool = True,
) -> MultiStepLossOutput:
    """The loss of `gradscale_ext.multi_step_loss`, computed head by head and step by step."""
    heads = as_dict("heads", heads)
    call = validate(
        heads,
        predictions,
        targets,
        step_weights=step_weights,
        step_gradient_scale=step_gradient_scale,
        importance_weights=importance_weights,
        mask=mask,
        reduction=reduction,
        nonfinite=nonfinite,
        batch_first=batch_first,
    )
    per_step = {name: _per_step(name, head, call) for name, head in heads.items()}
    per_sample = _per_sample(heads, call, {name: losses.detach() for name, losses in per_step.items()})
    if nonfinite == "skip":
        # Leaving a sample out as a mask does keeps its NaN out of the gradients too.
        finite = per_sample.isfinite().unsqueeze(1)
        kept = {name: finite & _mask_of(name, call) for name in heads}
        remaining = Call(**{**vars(call), "masks": kept})
        contributing = {name: _per_step(name, head, remaining) for name, head in heads.items()}
    else:
        contributing = per_step
    factors = {name: _reduction_factor(name, heads[name], call, reduction) for name in heads}
    weighted = _per_sample(heads, call, contributing, factors)
    if importance_weights is not None:
        weighted = importance_weights.to(call.dtype) * weighted
    return MultiStepLossOutput(
        loss=weighted if reduction == "none" else weighted.sum(),
        per_sample=per_sample,
        per_step={name: turned_around(losses.detach(), batch_first) for name, losses in per_step.items()},
        expected={
            name: torch.stack(
                [decode(entry.detach(), head.support) for entry in call.predictions[name]], 1 if batch_first else 0
            ).to(call.dtype)
            for name, head in heads.items()
            if isinstance(head, TwoHot | HLGauss)
        },
        head_means={name: per_step[name].detach().sum() / _kept_entries(name, heads[name], call) for name in heads},
        num_nonfinite=(~per_sample.isfinite()).sum(),
    )


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _clamped_to_finite(x: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(x.dtype).max
    return x.clamp(-limit, limit)


def _mask_of(name: str, call: Call) -> torch.Tensor:
    """Bool `[B, T]`."""
    if name in call.masks:
        return call.masks[name]
    device = call.predictions[name][0].device
    return torch.ones(call.batch, call.steps, dtype=torch.bool, device=device)


def _kept_entries(name: str, head: Head, call: Call) -> torch.Tensor:
    return _mask_of(name, call)[:, head.first_step :].sum().clamp(min=1)


def _reduction_factor(name: str, head: Head, call: Call, reduction: str) -> torch.Tensor | float:
    if reduction == "mean":
        return 1.0 / max(call.batch, 1)
    if reduction == "valid_mean":
        return 1.0 / _kept_entries(name, head, call).to(call.dtype)
    return 1.0


def _per_step(name: str, head: Head, call: Call) -> torch.Tensor:
    """`[B, T_h]` losses without weights. A masked entry is replaced by ones before, so that neither its value nor its
    gradient can come through."""
    losses = []
    mask = call.masks.get(name)
    for t, (prediction, target) in enumerate(zip(call.predictions[name], call.targets[name], strict=True)):
        prediction = prediction.to(call.dtype)
        if target is not None and target.is_floating_point():
            target = target.to(call.dtype)
        if mask is None:
            losses.append(entry_loss(head, prediction, target))
            continue
        kept = mask[:, head.first_step + t]
        loss = entry_loss(head, _where(kept, prediction), None if target is None else _where(kept, target))
        losses.append(torch.where(kept, loss, 0.0))
    return torch.stack(losses, 1)


def _where(kept: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    ones = torch.ones((), dtype=entry.dtype, device=entry.device)
    if not entry.is_floating_point():
        ones = ones - 1  # the first class
    return torch.where(kept.unsqueeze(-1) if entry.dim() == 2 else kept, entry, ones)


# ---- The losses of the heads: [B] for one step ----------------------------------------------------------------------


def _two_hot_loss(head: TwoHot, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(logits.log_softmax(-1), _smoothed(two_hot(target, head.support), head.label_smoothing))


def _hl_gauss_loss(head: HLGauss, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(logits.log_softmax(-1), hl_gauss(target, head.support, head.sigma_ratio))


def _soft_cross_entropy_loss(head: SoftCrossEntropy, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_probabilities = logits.log_softmax(-1)
    if not target.is_floating_point():
        target = _one_hot(target, logits)
    target = _smoothed(target, head.label_smoothing)
    loss = _cross_entropy(log_probabilities, target)
    if head.subtract_target_entropy:
        loss = loss + torch.special.xlogy(target, target).sum(-1)
    if head.entropy_weight != 0:
        probabilities = log_probabilities.exp()
        loss = loss - head.entropy_weight * _cross_entropy(log_probabilities, probabilities)
    return loss


def _mean_squared_error_loss(head: MeanSquaredError, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    squares = (prediction - transform(target, head.transform, 1e-3)).square()
    return squares.mean(-1) if squares.dim() == 2 else squares


def _binary_cross_entropy_loss(head: BinaryCrossEntropy, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_sigmoid = torch.nn.functional.logsigmoid
    return -_product(target, log_sigmoid(logits)) - _product(1 - target, log_sigmoid(-logits))


def _negative_cosine_loss(head: NegativeCosine, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -(_normalized(prediction, head.eps) * _normalized(target, head.eps)).sum(-1)


def _per_step_loss(head: PerStepLoss, prediction: torch.Tensor, target: None) -> torch.Tensor:
    return prediction


_LOSSES: dict[type[Head], Callable[[Any, torch.Tensor, Any], torch.Tensor]] = {
    TwoHot: _two_hot_loss,
    HLGauss: _hl_gauss_loss,
    SoftCrossEntropy: _soft_cross_entropy_loss,
    MeanSquaredError: _mean_squared_error_loss,
    BinaryCrossEntropy: _binary_cross_entropy_loss,
    NegativeCosine: _negative_cosine_loss,
    PerStepLoss: _per_step_loss,
}


def entry_loss(head: Head, prediction: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """`[B]` losses of one head at one step."""
    loss = next(function for kind, function in _LOSSES.items() if isinstance(head, kind))
    return loss(head, prediction, target)


def _product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weight x, where 0 times anything is 0: an illegal action, with a logit of -inf, costs nothing when the target has
    nothing there."""
    return weight * torch.where(weight == 0, 0.0, x)


def _cross_entropy(log_probabilities: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -_product(target, log_probabilities).sum(-1)


def _smoothed(target: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    if label_smoothing == 0:
        return target
    return target * (1 - label_smoothing) + label_smoothing / target.shape[-1]


def _one_hot(classes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Like `logits`; a row of NaN for a class that is none."""
    actions = torch.arange(logits.shape[-1], device=logits.device)
    chosen = (actions == classes.unsqueeze(-1)).to(logits.dtype)
    valid = ((classes >= 0) & (classes < logits.shape[-1])).unsqueeze(-1)
    return torch.where(valid, chosen, float("nan"))


def _normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / max(|x|, eps) over the last dimension; the squares neither overflow nor underflow."""
    largest = x.detach().abs().amax(-1, keepdim=True).clamp(min=eps)
    scaled = x / largest
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    floor = eps / largest
    return scaled / torch.where(length < floor, floor, length)


def _per_sample(
    heads: Mapping[str, Head],
    call: Call,
    per_step: Mapping[str, torch.Tensor],
    factors: Mapping[str, torch.Tensor | float] | None = None,
) -> torch.Tensor:
    """`[B]` sum over heads and steps with their weights, each head times its factor."""
    total = torch.zeros(call.batch, dtype=call.dtype, device=next(iter(per_step.values())).device)
    for name, head in heads.items():
        losses = per_step[name]
        if call.step_gradient_scale is not None:
            losses = scale_gradient(losses, call.step_gradient_scale[..., head.first_step :])
        if call.step_weights is not None:
            # A masked loss is 0, and stays so whatever its weight.
            weights = call.step_weights[..., head.first_step :]
            mask = call.masks.get(name)
            if mask is not None:
                weights = torch.where(mask[:, head.first_step :], weights, 0.0)
            losses = weights * losses
        factor = 1.0 if factors is None else factors[name]
        total = total + head.weight * factor * losses.sum(1)
    return total
