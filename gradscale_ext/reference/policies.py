"""The losses of policies and of clipped values."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import _context
from ..policy_heads import ClippedSquaredError, PolicyHead

Fields = dict[str, torch.Tensor]


def log_prob(head: Any, prediction: Any, target: Fields) -> torch.Tensor:
    """`[B]` log-probabilities of the actions; NaN for an action out of range. Where it is NaN, everything that it was
    computed from gets a gradient of NaN."""
    found = _log_prob(head, prediction, target)
    return nan_unless(~found.isnan(), found)


def _log_prob(head: Any, prediction: Any, target: Fields) -> torch.Tensor:
    if isinstance(prediction, dict):
        means, log_stds, actions = prediction["means"], prediction["log_stds"], target["actions"]
        impossible = _gaussian_log_prob(means.detach(), log_stds.detach(), actions) == -math.inf
        if head.surrogate != "ppo":
            impossible = impossible & (target["advantages"] == 0)
        # These rows have no gradient, but 0 times the derivative of log_prob, which may be infinite, is NaN.
        impossible = impossible.unsqueeze(-1)
        means = torch.where(impossible, means.detach(), means)
        return _gaussian_log_prob(means, torch.where(impossible, log_stds.detach(), log_stds), actions)
    if prediction.dim() == 1:
        return prediction  # type: ignore[no-any-return]
    actions = target["actions"] if head.choices else target["actions"].unsqueeze(-1)
    groups = zip(choices_of(head, prediction), actions.unbind(-1), strict=True)
    return torch.stack([_chosen_log_softmax(logits, action) for logits, action in groups]).sum(0)


def _gaussian_log_prob(means: torch.Tensor, log_stds: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    z = (actions - means) * (-log_stds).exp()
    log_prob: torch.Tensor = (-0.5 * z.square() - log_stds - 0.5 * math.log(2 * math.pi)).sum(-1)
    return log_prob


def choices_of(head: Any, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The logits of each choice of a head; all logits if it has no choices."""
    choices = getattr(head, "choices", None)
    return torch.split(logits, list(choices), -1) if choices else (logits,)


def _chosen_log_softmax(logits: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """``log softmax(x)[a]``; NaN for an action out of range, and for logits without a softmax. Near 0 it keeps its
    digits, because the largest exponential, 1, is not added."""
    top = logits.detach().argmax(-1, keepdim=True)
    largest = logits.gather(-1, top)
    below = logits - largest
    others = torch.arange(logits.shape[-1], device=logits.device) != top
    total = torch.where(others, below.exp(), 0.0).sum(-1)
    chosen = below.gather(-1, action.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    valid = (action >= 0) & (action < logits.shape[-1]) & (largest.squeeze(-1) < math.inf)
    return nan_unless(valid, chosen - total.log1p())


def nan_unless(valid: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x where valid; elsewhere NaN, with a gradient of NaN."""
    return x * torch.where(valid, 1.0, math.nan).to(x.dtype)


def gaussian_entropy(log_stds: torch.Tensor) -> torch.Tensor:
    """`[B]` entropies of independent normal distributions."""
    return (log_stds + (0.5 + 0.5 * math.log(2 * math.pi))).sum(-1)


def policy_loss(head: PolicyHead, log_prob: torch.Tensor, entropy: torch.Tensor | None, target: Fields) -> torch.Tensor:
    """`[B]` losses. `entropy` is None for log-probabilities, which have none."""
    advantage = target["advantages"]
    if head.surrogate == "ppo":
        loss = -_clipped(head, log_prob, target) * advantage
    elif head.surrogate == "log":
        loss = -_unless_zero(advantage, log_prob)
    else:
        ratio = _log_ratio_of_loss(log_prob.detach(), target).exp()
        loss = -_unless_zero(_clamped(head, ratio) * advantage, log_prob)
    if head.entropy_weight != 0 and entropy is not None:
        loss = loss - head.entropy_weight * entropy
    if head.kl_weight != 0:
        loss = loss + head.kl_weight * _k3_of_reference(target["reference_log_probs"], log_prob)
    return loss


def log_ratio(log_prob: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """``log_prob - old``; -inf if both are -inf, because an illegal action has ratio 0."""
    return log_prob - torch.where(_both_infinite(log_prob, old), 0.0, old)


def _log_ratio_of_loss(log_prob: torch.Tensor, target: Fields) -> torch.Tensor:
    """The log-ratio, but log_prob where the advantage is 0: there inf - inf has no effect, and NaN still has."""
    old = target["log_probs"]
    return log_ratio(log_prob, torch.where((target["advantages"] == 0) & ~old.isnan(), 0.0, old))


def k3(d: torch.Tensor) -> torch.Tensor:
    """``exp(d) - 1 - d``."""
    return d.expm1() - torch.where(d == math.inf, 0.0, d)


def outside_of_clip(head: Any, ratio: torch.Tensor) -> torch.Tensor:
    """True where a ratio is outside of the clip."""
    if head.bounds is None:
        return torch.zeros_like(ratio, dtype=torch.bool)
    low, high = head.bounds
    outside: torch.Tensor = (ratio < _context.operand(1 - low, ratio)) | (ratio > _context.operand(1 + high, ratio))
    return outside


def _k3_of_reference(reference: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
    """0 if both are -inf."""
    both = _both_infinite(log_prob, reference)
    return k3(torch.where(both, 0.0, reference) - torch.where(both, 0.0, log_prob))


def _both_infinite(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x == -math.inf) & (y == -math.inf)


def _clamped(head: PolicyHead, ratio: torch.Tensor) -> torch.Tensor:
    low, high = head.bounds  # type: ignore[misc]
    clamped: torch.Tensor = ratio.clamp(_context.operand(1 - low, ratio), _context.operand(1 + high, ratio))
    return clamped


def _unless_zero(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply, with 0 times infinity being 0 and 0 times NaN being NaN."""
    return weight * torch.where((weight == 0) & ~x.isnan(), 0.0, x)


def _clipped(head: PolicyHead, log_prob: torch.Tensor, target: Fields) -> torch.Tensor:
    """The ratio that the advantage is multiplied by. It has a gradient where it is neither clipped nor without effect.
    Comparisons are False for NaN, which so stays."""
    d, advantage = _log_ratio_of_loss(log_prob, target), target["advantages"]
    ratio = d.detach().exp()
    constant = torch.zeros_like(ratio)
    is_constant = (advantage == 0) & ~ratio.isnan()
    if head.bounds is not None:
        clamped = _clamped(head, ratio)
        binds = clamped * advantage < ratio * advantage
        is_constant, constant = is_constant | binds, torch.where(binds, clamped, constant)
    if head.dual_clip is not None:
        dual_clip = _context.operand(float(head.dual_clip), ratio)
        binds = (advantage < 0) & (ratio * advantage < dual_clip * advantage)
        is_constant, constant = is_constant | binds, torch.where(binds, dual_clip, constant)
    return torch.where(is_constant, constant, torch.where(is_constant, 0.0, d).exp())


def clipped_squared_error_loss(head: ClippedSquaredError, value: torch.Tensor, target: Fields) -> torch.Tensor:
    """`[B]` losses."""
    error = value - target["returns"]
    if head.clip is None:
        return error.square()
    old = target["values"]
    change, clip = (value - old).detach(), _context.operand(float(head.clip), value)
    clipped = (old + change.clamp(-clip, clip) - target["returns"]).square()
    loss = nan_unless(~clipped.isnan(), error).square()
    return torch.where((change.abs() > clip) & (clipped > loss), clipped, loss)
