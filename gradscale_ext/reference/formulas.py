"""The losses of the heads: `[B]` for a prediction and its target."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .. import _context
from ..call.entries import Fields
from ..heads import (
    BinaryCrossEntropy,
    CategoricalKL,
    Head,
    HLGauss,
    Huber,
    MeanSquaredError,
    NegativeCosine,
    PerStepLoss,
    QuantileHuber,
    SoftCrossEntropy,
    TwoHot,
)
from ..policy_heads import ClippedSquaredError, GaussianPolicyGradient, PolicyGradient, PolicyHead
from ..transforms import transform
from . import policies
from .supports import hl_gauss, two_hot


def head_loss(head: Head, prediction: Fields, target: Fields) -> torch.Tensor:
    """`[B]` losses of a head, from an encoded target."""
    return LOSSES[head.kind](head, plain(prediction), plain(target))


def plain(fields: Fields) -> Any:
    """The tensor of a prediction or target that is one tensor; None if there is none."""
    return fields.get("", fields or None)


def encoded(head: Head, field: str, target: torch.Tensor, prediction: Fields, dtype: torch.dtype) -> torch.Tensor:
    """What the loss of a head compares predictions with, in the dtype of the loss: distributions, or transformed
    scalars; the tensors of fields as they are. `prediction` is an entry of the head."""
    if field:
        return target.to(dtype) if target.is_floating_point() else target
    target = target.to(dtype) if target.is_floating_point() else _one_hot(target, prediction[""].shape[-1], dtype)
    if isinstance(head, TwoHot):
        return _smoothed(two_hot(target, head.support), head.label_smoothing)
    if isinstance(head, HLGauss):
        return hl_gauss(target, head.support, head.sigma_ratio)
    if isinstance(head, SoftCrossEntropy):
        return _smoothed(target, head.label_smoothing)
    if isinstance(head, MeanSquaredError | Huber):
        return transform(target, head.transform, 1e-3)
    return target


def _categorical_loss(head: TwoHot | HLGauss, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(logits, target, total=1)


def _soft_cross_entropy_loss(
    head: SoftCrossEntropy, logits: torch.Tensor, target: torch.Tensor | Fields
) -> torch.Tensor:
    classes = None
    if isinstance(target, dict):
        classes, target = target["classes"], target["probabilities"]
    loss = _cross_entropy(logits, target, total=target.sum(-1), classes=classes)
    if head.subtract_target_entropy:
        loss = loss + torch.special.xlogy(target, target).sum(-1)
    if head.entropy_weight != 0:
        loss = loss - head.entropy_weight * _entropy(logits)
    return loss


def _policy_gradient_loss(head: PolicyHead, prediction: torch.Tensor | Fields, target: Fields) -> torch.Tensor:
    entropy = entropy_of(head, prediction) if head.entropy_weight != 0 else None
    return policies.policy_loss(head, policies.log_prob(head, prediction, target), entropy, target)


def entropy_of(head: Any, prediction: torch.Tensor | Fields) -> torch.Tensor:
    """`[B]` entropies of a policy."""
    if isinstance(prediction, dict):
        return policies.gaussian_entropy(prediction["log_stds"])
    return torch.stack([_entropy(logits) for logits in policies.choices_of(head, prediction)]).sum(0)


def _mean_squared_error_loss(head: MeanSquaredError, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _mean_over_elements((prediction - target).square())


def _mean_over_elements(losses: torch.Tensor) -> torch.Tensor:
    """`[B]` means of `[B]` or `[B, D]` losses. Their sum may overflow where the mean does not."""
    return (losses / losses.shape[1]).sum(1) if losses.dim() == 2 else losses


def _huber_loss(head: Huber, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    delta = _context.operand(min(float(head.delta), torch.finfo(prediction.dtype).max), prediction)
    difference = prediction - target
    clipped = difference.clamp(-delta, delta)
    return _mean_over_elements(clipped * (difference - clipped / 2))


def _binary_cross_entropy_loss(head: BinaryCrossEntropy, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_sigmoid = torch.nn.functional.logsigmoid
    return -_product(target, log_sigmoid(logits)) - _product(1 - target, log_sigmoid(-logits))


def _negative_cosine_loss(head: NegativeCosine, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # In double precision, because the dtype of the loss may round `eps` to 0 or inf.
    x, t = (entry.to(_context.widest(entry.device)) for entry in (prediction, target))
    eps = _context.operand(head.eps, x)
    x, t = _normalized(x, eps), _normalized(t, eps)
    return -(x * t).sum(-1).to(prediction.dtype)


def _quantile_huber_loss(head: QuantileHuber, quantiles: torch.Tensor, target: Any) -> torch.Tensor:
    count = quantiles.shape[-1]
    if isinstance(target, dict):
        target, fractions = target["samples"], target["fractions"]
    else:
        fractions = (2 * torch.arange(count, device=quantiles.device, dtype=quantiles.dtype) + 1) / (2 * count)
    difference = target.unsqueeze(-2) - quantiles.unsqueeze(-1)  # [B, N, M]
    weights = torch.where(difference < 0, 1 - fractions.unsqueeze(-1), fractions.unsqueeze(-1))
    sign = torch.where(difference.isnan(), difference, difference.sign())  # sign() of NaN is 0
    size, kappa = difference * sign.detach(), float(head.kappa)
    if kappa >= torch.finfo(size.dtype).tiny:
        largest = min(kappa, torch.finfo(size.dtype).max)
        is_quadratic = size <= largest
        small = torch.where(is_quadratic, difference, 0.0)  # an infinite difference has no derivative
        # Scaled before it is squared, because the square of a difference may overflow or underflow.
        size = torch.where(is_quadratic, (small * math.sqrt(0.5 / kappa)).square(), size - largest / 2)
    divisor = target.shape[-1] * (1 if head.sum_over_quantiles else count)
    loss: torch.Tensor = (weights * (size / divisor)).sum((-2, -1))
    return loss


def _categorical_kl_loss(head: CategoricalKL, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_prediction, log_target = (_log_mixture(x, head.unimix) for x in (logits, target))
    log_p, log_q = (log_prediction, log_target) if head.prediction == "p" else (log_target, log_prediction)
    p = log_p.exp()
    # Where p is 0 its logarithm is -inf, whose gradient is NaN.
    divergence = _product(p, torch.where(p == 0, 0.0, log_p) - log_q).sum((-2, -1))
    free_nats = _context.operand(float(head.free_nats), divergence)
    return torch.where(divergence < free_nats, free_nats, divergence)


def _log_mixture(logits: torch.Tensor, unimix: float) -> torch.Tensor:
    """Logarithms of ``(1 - unimix) softmax + unimix / C``."""
    info, classes = torch.finfo(logits.dtype), logits.shape[-1]
    if unimix >= classes * info.tiny / info.eps:
        return (logits.softmax(-1) * (1 - unimix) + unimix / classes).log()
    log_softmax = logits.log_softmax(-1)
    if unimix == 0:
        return log_softmax
    # Next to so small a share, a softmax that was rounded to 0 would be missed: add from logarithms; 1 - unimix is 1.
    share, count = (_context.as_tensor(number, logits.device) for number in (unimix, classes))
    uniform = (share.log() - count.log()).to(logits.dtype)
    return torch.stack(torch.broadcast_tensors(log_softmax, uniform)).logsumexp(0)  # type: ignore[no-untyped-call]


def _per_step_loss(head: PerStepLoss, prediction: torch.Tensor, target: None) -> torch.Tensor:
    return prediction


LOSSES: dict[str, Callable[[Any, Any, Any], torch.Tensor]] = {
    TwoHot.kind: _categorical_loss,
    HLGauss.kind: _categorical_loss,
    SoftCrossEntropy.kind: _soft_cross_entropy_loss,
    MeanSquaredError.kind: _mean_squared_error_loss,
    Huber.kind: _huber_loss,
    BinaryCrossEntropy.kind: _binary_cross_entropy_loss,
    NegativeCosine.kind: _negative_cosine_loss,
    QuantileHuber.kind: _quantile_huber_loss,
    CategoricalKL.kind: _categorical_kl_loss,
    PerStepLoss.kind: _per_step_loss,
    PolicyGradient.kind: _policy_gradient_loss,
    GaussianPolicyGradient.kind: _policy_gradient_loss,
    ClippedSquaredError.kind: policies.clipped_squared_error_loss,
}


def entry_loss(head: Head, prediction: torch.Tensor | Fields, target: torch.Tensor | Fields | None) -> torch.Tensor:
    """`[B]` losses of one head at one step."""
    x, t = (fields if isinstance(fields, dict) else {"": fields} for fields in (prediction, target))  # type: ignore[dict-item]
    dtype = next(iter(x.values())).dtype
    wanted = {field: encoded(head, field, tensor, x, dtype) for field, tensor in t.items() if tensor is not None}
    return head_loss(head, x, wanted)


def _product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply, with 0 times infinity, or NaN, being 0: an illegal action, with a logit of -inf, costs nothing where
    the target is 0."""
    return weight * torch.where(weight == 0, 0.0, x)


def _cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, total: torch.Tensor | int, classes: torch.Tensor | None = None
) -> torch.Tensor:
    """``-sum_j t_j log p_j`` for targets with this sum, of all classes or of those that are given; NaN for a row
    without a softmax, or with a class out of range. The derivative of log_softmax would add up the gradients of a row,
    so that a compiler stored them; this one is computed element by element."""
    below_largest = logits - logits.detach().amax(-1, keepdim=True)
    normalizer = below_largest.exp().sum(-1).log()
    if classes is None:
        return total * normalizer - _product(target, below_largest).sum(-1)
    in_range = ((classes >= 0) & (classes < logits.shape[-1])).all(-1)
    chosen = below_largest.gather(-1, classes.clamp(0, logits.shape[-1] - 1))
    return policies.nan_unless(in_range, total * normalizer - _product(target, chosen).sum(-1))


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    log_probabilities = logits.log_softmax(-1)
    probabilities = log_probabilities.exp()
    return -_product(probabilities, log_probabilities).sum(-1)


def _smoothed(target: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    if label_smoothing == 0:
        return target
    return target * (1 - label_smoothing) + label_smoothing / target.shape[-1]


def _one_hot(classes: torch.Tensor, num_classes: int, dtype: torch.dtype) -> torch.Tensor:
    """One-hot rows; a class out of range gives a row of NaN."""
    actions = torch.arange(num_classes, device=classes.device)
    chosen = (actions == classes.unsqueeze(-1)).to(dtype)
    valid = ((classes >= 0) & (classes < num_classes)).unsqueeze(-1)
    return torch.where(valid, chosen, float("nan"))


def _normalized(x: torch.Tensor, eps: float | torch.Tensor) -> torch.Tensor:
    """x / max(|x|, eps) over the last dimension; the squares neither overflow nor underflow."""
    largest = x.detach().abs().amax(-1, keepdim=True).clamp(min=eps)
    scaled = x / largest
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    floor = eps / largest
    return scaled / torch.where(length < floor, floor, length)
