"""The multi-step loss, head by head and step by step."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import _context
from .._distributed import by_whole, mesh_of
from ..call.checks import as_dict
from ..call.options import Entries, Options, maybe_transposed
from ..call.output import MultiStepLossOutput
from ..call.ranks import for_all_ranks
from ..call.validate import Call, validate
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
from ..transforms import transform
from .flow import scale_gradient
from .supports import decode, hl_gauss, two_hot
from .tensors import norm_of


def multi_step_loss(
    heads: Mapping[str, Head],
    predictions: Mapping[str, Entries],
    targets: Mapping[str, Entries],
    *,
    process_group: torch.distributed.ProcessGroup | None = None,
    normalize_importance_weights: bool = False,
    **options: Any,
) -> MultiStepLossOutput:
    """The loss of `gradscale_ext.multi_step_loss`, with the same options."""
    unknown = options.keys() - set(Options._fields)
    if unknown:
        raise TypeError(
            f"multi_step_loss: there is no option {' and '.join(map(repr, sorted(unknown)))}; the options are "
            f"{', '.join(Options._fields)}"
        )
    if mesh_of(predictions, targets, options) is not None:

        def call_with(predictions: Any, targets: Any, options: Any) -> MultiStepLossOutput:
            group, normalize = process_group, normalize_importance_weights
            return multi_step_loss(
                heads, predictions, targets, process_group=group, normalize_importance_weights=normalize, **options
            )

        # On each rank, the loss of the whole tensors.
        return by_whole(call_with, predictions, targets, options)  # type: ignore[no-any-return]
    call = validate(as_dict("heads", heads), predictions, targets, Options(**options))
    return loss_of(for_all_ranks(call, process_group, normalize_importance_weights))


def loss_of(call: Call) -> MultiStepLossOutput:
    """The loss of a call whose arguments were checked."""
    heads, options = call.heads, call.options
    per_step = {name: _per_step(name, call) for name in heads}
    per_sample = _sum(_weighted(name, call, per_step[name]) for name in heads).detach()
    shares = _shares(call, per_step, per_sample)
    loss = _sum(shares.values())
    return MultiStepLossOutput(
        loss=loss if options.reduction == "none" else loss.sum(),
        per_sample=per_sample,
        per_step={name: maybe_transposed(losses.detach(), options.batch_first) for name, losses in per_step.items()},
        expected={name: _detail(name, call) for name, head in heads.items() if head.detail == "expected"},
        entropy={name: _detail(name, call) for name, head in heads.items() if head.detail == "entropy"},
        head_means={name: per_step[name].detach().sum() / _num_unmasked(name, call) for name in heads},
        head_losses={name: share.detach().sum() for name, share in shares.items()},
        head_gradient_norms=_gradient_norms(call, per_sample),
        max_abs_logit={name: _largest_logit(name, call) for name, head in heads.items() if head.has_largest_logit},
        num_nonfinite=(~per_sample.isfinite()).sum(),
    )


def _shares(call: Call, per_step: dict[str, torch.Tensor], per_sample: torch.Tensor) -> dict[str, torch.Tensor]:
    """By head, `[B]`: the head's share of the loss of each sample, after all weights and the reduction."""
    remaining, contributing = call, per_step
    if call.options.nonfinite == "skip":
        # A skipped sample is masked, so that neither a NaN loss nor a NaN weight reaches loss and gradients.
        finite = per_sample.isfinite().unsqueeze(1)
        masks = {name: finite & _unmasked(name, call) for name in per_step}
        remaining = replace(call, weights=replace(call.weights, masks=masks))
        contributing = {name: _per_step(name, remaining) for name in per_step}
    shares = {name: _weighted(name, remaining, losses) / _divisor(name, call) for name, losses in contributing.items()}
    for name in per_step.keys() & call.weights.importance_weights.keys():
        weights = call.weights.importance_weights[name]
        shares[name] = _by_sample(name, remaining, weights.to(call.dtype)) * shares[name]
    return shares


def _gradient_norms(call: Call, per_sample: torch.Tensor) -> dict[str, torch.Tensor]:
    """By head: the norm of the gradient of the loss with respect to the predictions that require grad, in the dtype of
    the loss."""
    with_gradient = call.heads_with_gradient()
    is_wanted = {name: [entry.requires_grad for entry in call.predictions[name]] for name in with_gradient}
    entries = {name: [_constant(entry).to(call.dtype) for entry in call.predictions[name]] for name in with_gradient}

    def loss(predictions: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        own = replace(call, predictions={**call.predictions, **predictions})
        shares = _shares(own, {name: _per_step(name, own) for name in with_gradient}, per_sample)
        return _sum(shares.values()).sum()

    if not with_gradient:
        return {}
    gradients = _gradient(loss, entries)
    return {name: _norm(list(itertools.compress(gradients[name], is_wanted[name]))) for name in with_gradient}


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all tensors as one vector. Squares of float32 do not overflow in float64."""
    dtype, widest = tensors[0].dtype, _context.widest(tensors[0].device)
    if dtype == widest:
        return norm_of(torch.cat([tensor.flatten() for tensor in tensors]).abs(), 2.0)
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=widest) for tensor in tensors])
    norm: torch.Tensor = torch.linalg.vector_norm(norms)
    return norm.to(dtype)


def _allows_hooks() -> bool:
    """Return False where saved-tensor hooks must not be used, as in most torch.func transforms."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def _gradient(
    loss: Callable[[dict[str, list[torch.Tensor]]], torch.Tensor], entries: dict[str, list[torch.Tensor]]
) -> dict[str, list[torch.Tensor]]:
    """The gradient of a loss with respect to detached entries. It has no graph. The caller's saved-tensor hooks
    do not run."""
    if not _context.is_eager() or not _allows_hooks():
        with torch.no_grad():  # torch.func.grad computes the gradient nevertheless
            return torch.func.grad(loss)(entries)  # type: ignore[no-any-return]
    leaves = {name: [_leaf(entry) for entry in listed] for name, listed in entries.items()}
    flat = [leaf for listed in leaves.values() for leaf in listed]
    # torch.func.grad refuses to run under saved-tensor hooks, which activation checkpointing sets.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        found = iter(torch.autograd.grad(loss(leaves), flat, allow_unused=True, materialize_grads=True))
    return {name: [next(found) for _ in listed] for name, listed in leaves.items()}


def _leaf(entry: torch.Tensor) -> torch.Tensor:
    return (entry.clone() if entry.is_inference() else entry.detach()).requires_grad_()


def _constant(entry: torch.Tensor) -> torch.Tensor:
    """Detach, and drop the tangent of forward mode, because not every gradient has a forward-mode derivative."""
    if forward_ad._current_level >= 0:
        entry = forward_ad.unpack_dual(entry).primal  # type: ignore[no-untyped-call]
    return entry.detach()


def _largest_logit(name: str, call: Call) -> torch.Tensor:
    """The largest magnitude of finite logits among unmasked entries."""
    largest = []
    for step, entry in enumerate(call.predictions[name], call.heads[name].first_step):
        entry = entry.detach().to(call.dtype).flatten(1)
        magnitudes = torch.where(entry.isfinite() & _unmasked(name, call)[:, step : step + 1], entry.abs(), 0.0)
        largest.append(magnitudes.amax(1))
    return torch.cat([*largest, largest[0].new_zeros(1)]).amax()  # a batch may be empty


def _sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, tensors)


def _unmasked(name: str, call: Call) -> torch.Tensor:
    """Bool `[B, T]`."""
    if name in call.weights.masks:
        return call.weights.masks[name]
    device = call.predictions[name][0].device
    return torch.ones(call.batch, call.steps, dtype=torch.bool, device=device)


def _num_unmasked(name: str, call: Call) -> torch.Tensor:
    """Number of unmasked entries of a head, at least 1."""
    return _unmasked(name, call)[:, call.heads[name].first_step :].sum().clamp(min=1)


def _divisor(name: str, call: Call) -> torch.Tensor | float:
    """The divisor of the sum of a head."""
    if name in call.weights.num_entries:
        count = call.weights.num_entries[name]
        return torch.where(count == 0, 1, count).to(call.dtype)
    if call.options.reduction == "mean":
        return float(max(call.batch, 1))
    if call.options.reduction == "valid_mean":
        return _num_unmasked(name, call).to(call.dtype)
    return 1.0


def _per_step(name: str, call: Call) -> torch.Tensor:
    """`[B, T_h]` losses without weights. A masked entry is replaced by ones (a class by 0) before its loss is
    computed, so that neither its value nor its gradient can propagate."""
    losses = []
    head, mask = call.heads[name], call.weights.masks.get(name)
    for t, (prediction, target) in enumerate(zip(call.predictions[name], call.targets[name], strict=True)):
        prediction = prediction.to(call.dtype)
        if target is not None and target.is_floating_point():
            target = target.to(call.dtype)
        if mask is None:
            losses.append(entry_loss(head, prediction, target))
            continue
        unmasked = mask[:, head.first_step + t]
        loss = entry_loss(head, _where(unmasked, prediction), None if target is None else _where(unmasked, target))
        losses.append(torch.where(unmasked, loss, 0.0))
    return torch.stack(losses, 1)


def _where(unmasked: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    ones = torch.ones((), dtype=entry.dtype, device=entry.device)
    if not entry.is_floating_point():
        ones = ones - 1  # the first class
    return torch.where(unmasked.reshape(-1, *[1] * (entry.dim() - 1)), entry, ones)


def _weighted(name: str, call: Call, losses: torch.Tensor) -> torch.Tensor:
    """`[B]` sum of the losses of a head over its steps, with the weights of the steps and of the head."""
    head, weights_by_head = call.heads[name], call.weights
    if name in weights_by_head.step_gradient_scale:
        losses = scale_gradient(losses, weights_by_head.step_gradient_scale[name][..., head.first_step :])
    if name in weights_by_head.step_weights:
        # A masked loss is 0, and stays so whatever its weight.
        weights = weights_by_head.step_weights[name][..., head.first_step :]
        if name in weights_by_head.masks:
            weights = torch.where(weights_by_head.masks[name][:, head.first_step :], weights, 0.0)
        losses = weights * losses
    total = head.weight * losses.sum(1)
    if name in weights_by_head.head_weights:
        total = _by_sample(name, call, weights_by_head.head_weights[name]) * total
    return total


def _by_sample(name: str, call: Call, weights: torch.Tensor) -> torch.Tensor:
    """Weights `[B]` or a scalar; 0 for samples in which a head has no unmasked entry, because their weights may be NaN
    or inf."""
    if name not in call.weights.masks:
        return weights
    return torch.where(_unmasked(name, call)[:, call.heads[name].first_step :].any(1), weights, 0.0)


def _detail(name: str, call: Call) -> torch.Tensor:
    """`[B, T_h]` in the caller's dimension order: decoded predictions of a head with a support, or entropies."""
    head = call.heads[name]
    entries = [entry.detach() for entry in call.predictions[name]]
    if head.detail == "expected":
        details = [decode(entry, head.support) for entry in entries]  # type: ignore[attr-defined]
    else:
        log_probabilities = [entry.to(call.dtype).log_softmax(-1) for entry in entries]
        details = [_cross_entropy(log_p, log_p.exp()) for log_p in log_probabilities]
    return torch.stack(details, 1 if call.options.batch_first else 0).to(call.dtype)


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
    return _mean_over_elements((prediction - transform(target, head.transform, 1e-3)).square())


def _mean_over_elements(losses: torch.Tensor) -> torch.Tensor:
    """`[B]` means of `[B]` or `[B, D]` losses. Their sum may overflow where the mean does not."""
    return (losses / losses.shape[1]).sum(1) if losses.dim() == 2 else losses


def _huber_loss(head: Huber, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target = transform(target, head.transform, 1e-3)
    delta = min(float(head.delta), torch.finfo(prediction.dtype).max)
    return _mean_over_elements(torch.nn.functional.huber_loss(prediction, target, reduction="none", delta=delta))


def _binary_cross_entropy_loss(head: BinaryCrossEntropy, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_sigmoid = torch.nn.functional.logsigmoid
    return -_product(target, log_sigmoid(logits)) - _product(1 - target, log_sigmoid(-logits))


def _negative_cosine_loss(head: NegativeCosine, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # In double precision, because the dtype of the loss may round `eps` to 0 or inf.
    x, t = (_normalized(entry.to(_context.widest(entry.device)), head.eps) for entry in (prediction, target))
    return -(x * t).sum(-1).to(prediction.dtype)


def _quantile_huber_loss(head: QuantileHuber, quantiles: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    count = quantiles.shape[-1]
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
    return (weights * (size / divisor)).sum((-2, -1))


def _categorical_kl_loss(head: CategoricalKL, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_prediction, log_target = (_log_mixture(x, head.unimix) for x in (logits, target))
    log_p, log_q = (log_prediction, log_target) if head.prediction == "p" else (log_target, log_prediction)
    p = log_p.exp()
    # Where p is 0 its logarithm is -inf, whose gradient is NaN.
    divergence = _product(p, torch.where(p == 0, 0.0, log_p) - log_q).sum((-2, -1))
    return torch.where(divergence < head.free_nats, float(head.free_nats), divergence)


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


_LOSSES: dict[str, Callable[[Any, torch.Tensor, Any], torch.Tensor]] = {
    TwoHot.kind: _two_hot_loss,
    HLGauss.kind: _hl_gauss_loss,
    SoftCrossEntropy.kind: _soft_cross_entropy_loss,
    MeanSquaredError.kind: _mean_squared_error_loss,
    Huber.kind: _huber_loss,
    BinaryCrossEntropy.kind: _binary_cross_entropy_loss,
    NegativeCosine.kind: _negative_cosine_loss,
    QuantileHuber.kind: _quantile_huber_loss,
    CategoricalKL.kind: _categorical_kl_loss,
    PerStepLoss.kind: _per_step_loss,
}


def entry_loss(head: Head, prediction: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """`[B]` losses of one head at one step."""
    return _LOSSES[head.kind](head, prediction, target)


def _product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply, with 0 times infinity being 0: an illegal action, with a logit of -inf, costs nothing where the target
    is 0."""
    return weight * torch.where((weight == 0) & ~x.isnan(), 0.0, x)


def _cross_entropy(log_probabilities: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -_product(target, log_probabilities).sum(-1)


def _smoothed(target: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    if label_smoothing == 0:
        return target
    return target * (1 - label_smoothing) + label_smoothing / target.shape[-1]


def _one_hot(classes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """One-hot rows in the shape and dtype of `logits`; a class out of range gives a row of NaN."""
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
