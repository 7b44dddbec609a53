"""Everything in plain PyTorch, one operation after the other.

The truth for tests, and the path for every context that the fused kernels do not take: transforms, compilation, tensor
subclasses, other devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from ._validate import Call, Entries, StepNumbers, validate
from .heads import Head, MeanSquaredError, SoftCrossEntropy, TwoHot
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


def two_hot(x: torch.Tensor, support: Support) -> torch.Tensor:
    """`[..., S]` distributions with mass on the two bins next to the transformed scalars `[...]`."""
    y = x if x.dtype == torch.float64 else x.float()
    limit = torch.finfo(y.dtype).max
    y = transform(y.clamp(-limit, limit), support.transform, support.eps)
    last_bin = support.num_bins - 1
    position = ((y - support.minimum) * (last_bin / (support.maximum - support.minimum))).clamp(0, last_bin)
    lower = position.detach().nan_to_num(0).floor().clamp(max=last_bin - 1).unsqueeze(-1)
    upper_weight = position.unsqueeze(-1) - lower
    zeros = torch.zeros((*x.shape, support.num_bins), dtype=y.dtype, device=x.device)
    encoded = zeros.scatter(-1, lower.long(), 1 - upper_weight).scatter(-1, lower.long() + 1, upper_weight)
    # A row of NaN for a NaN scalar: its two weights already are, the other bins follow.
    return torch.where(position.isnan().unsqueeze(-1), float("nan"), encoded).to(x.dtype)


def decode(logits: torch.Tensor, support: Support) -> torch.Tensor:
    """Scalars `[...]` that logits `[..., S]` predict: the inverse transform of the expectation over the support."""
    probabilities = _widened(logits).softmax(-1)
    odd = centers(support, probabilities.dtype, logits.device) - 0.5 * (support.minimum + support.maximum)
    # odd is antisymmetric: sum_j p_j odd_j in this form is exactly 0 for uniform logits.
    expected = 0.5 * ((probabilities - probabilities.flip(-1)) * odd).sum(-1)
    return inverse_transform(expected + 0.5 * (support.minimum + support.maximum), support.transform, support.eps)


def l2_loss(parameters: Iterable[torch.Tensor], weight: float) -> torch.Tensor:
    """``weight * sum of |p|^2 / 2`` over tensors."""
    squares = [_widened(parameter).square().sum() for parameter in parameters]
    return (0.5 * weight * torch.stack(squares)).sum() if squares else torch.zeros(())


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
        per_step={name: losses.detach() for name, losses in per_step.items()},
        expected={
            name: torch.stack([decode(entry.detach(), head.support) for entry in call.predictions[name]], 1).to(
                call.dtype
            )
            for name, head in heads.items()
            if isinstance(head, TwoHot)
        },
        head_means={name: per_step[name].detach().sum() / _kept_entries(name, heads[name], call) for name in heads},
        num_nonfinite=(~per_sample.isfinite()).sum(),
    )


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


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
    """`[B, T_h]` losses without weights. A masked entry is replaced by zeros before, so that neither its value nor its
    gradient can come through."""
    losses = []
    mask = call.masks.get(name)
    for t, (prediction, target) in enumerate(zip(call.predictions[name], call.targets[name], strict=True)):
        prediction, target = prediction.to(call.dtype), target.to(call.dtype)
        if mask is None:
            losses.append(entry_loss(head, prediction, target))
            continue
        kept = mask[:, head.first_step + t]
        prediction, target = (
            torch.where(kept.unsqueeze(-1) if entry.dim() == 2 else kept, entry, 0.0) for entry in (prediction, target)
        )
        losses.append(torch.where(kept, entry_loss(head, prediction, target), 0.0))
    return torch.stack(losses, 1)


def entry_loss(head: Head, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`[B]` losses of one head at one step."""
    if isinstance(head, TwoHot):
        return _cross_entropy(prediction, two_hot(target, head.support))
    if isinstance(head, SoftCrossEntropy):
        return _cross_entropy(prediction, target)
    assert isinstance(head, MeanSquaredError)
    squares = (prediction - transform(target, head.transform, 1e-3)).square()
    return squares.mean(-1) if squares.dim() == 2 else squares


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # 0 * log 0 is 0: an illegal action, with a logit of -inf, costs nothing when the target has nothing there.
    log_probabilities = torch.where(target == 0, 0.0, logits.log_softmax(-1))
    return -(target * log_probabilities).sum(-1)


def _with_scaled_gradient(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    value = x.detach()
    return torch.where(value.isfinite(), value + scale * (x - value), x)


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
            losses = _with_scaled_gradient(losses, call.step_gradient_scale[..., head.first_step :])
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
