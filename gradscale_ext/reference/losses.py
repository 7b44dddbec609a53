"""The multi-step loss, head by head and step by step."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

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
from .supports import Bins, decoded, expectation, hl_gauss, two_hot
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


#: Elements of a block on a CPU, a megabyte of float32: it stays in the cache from one operation to the next.
_BLOCK_ELEMENTS = 2**18


class _Block(NamedTuple):
    """The entries of n absolute steps of a head as one batch `[n * B, ...]`, step after step; targets are encoded."""

    steps: slice
    prediction: torch.Tensor
    target: torch.Tensor | None
    wants_gradient: bool


def loss_of(call: Call) -> MultiStepLossOutput:
    """The loss of a call whose arguments were checked."""
    heads, options = call.heads, call.options
    blocks = {name: _blocks(name, call) for name in heads}
    largest = {name: _largest_logit(name, call, blocks[name]) for name, head in heads.items() if head.has_largest_logit}
    per_step = {name: _per_step(name, call, blocks[name]) for name in heads}
    details = {name: _detail(name, call, blocks[name]) for name, head in heads.items() if head.detail}
    per_sample = _sum(_weighted(name, call, per_step[name]) for name in heads).detach()
    shares = _shares(call, blocks, per_step, per_sample)
    loss = _sum(shares.values())
    return MultiStepLossOutput(
        loss=loss if options.reduction == "none" else loss.sum(),
        per_sample=per_sample,
        per_step={name: maybe_transposed(losses.detach(), options.batch_first) for name, losses in per_step.items()},
        expected={name: detail for name, detail in details.items() if heads[name].detail == "expected"},
        entropy={name: detail for name, detail in details.items() if heads[name].detail == "entropy"},
        head_means={name: per_step[name].detach().sum() / _num_unmasked(name, call) for name in heads},
        head_losses={name: share.detach().sum() for name, share in shares.items()},
        head_gradient_norms=_gradient_norms(call, blocks, per_sample),
        max_abs_logit=largest,
        num_nonfinite=(~per_sample.isfinite()).sum(),
    )


def _blocks(name: str, call: Call) -> list[_Block]:
    """The entries of a head. A block joins steps of one form, so that few operations compute all of them."""
    head, first = call.heads[name], call.heads[name].first_step
    runs: list[list[tuple[torch.Tensor, torch.Tensor | None]]] = []
    for entry in zip(call.predictions[name], call.targets[name], strict=True):
        if runs and _form(entry) == _form(runs[-1][0]):
            runs[-1].append(entry)
        else:
            runs.append([entry])
    blocks = []
    for run in runs:
        predictions, targets = zip(*run, strict=True)
        target = None if targets[0] is None else _encoded(head, torch.cat(targets), predictions[0], call.dtype)
        size = _steps_per_block(predictions[0], call)
        for step in range(0, len(run), size):
            joined = torch.cat(predictions[step : step + size]).to(call.dtype)
            steps = slice(first + step, first + min(step + size, len(run)))
            own = None if target is None else target[step * call.batch : (step + size) * call.batch]
            blocks.append(_Block(steps, joined, own, predictions[0].requires_grad))
        first += len(run)
    return blocks


def _form(entry: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[object, ...]:
    """What the entries of a block have in common, in addition to the shape of the predictions of a head."""
    prediction, target = entry
    own = () if target is None else (target.is_floating_point(), *target.shape[1:])
    return prediction.requires_grad, *own


def _steps_per_block(prediction: torch.Tensor, call: Call) -> int:
    """As many as fit into a CPU's cache; all on other devices, and for sizes that vary under `torch.compile`."""
    elements = prediction.numel()
    if prediction.device.type != "cpu" or (not _context.is_eager() and _context.varies(elements)):
        return call.steps
    return max(_BLOCK_ELEMENTS // max(elements, 1), 1)


def _by_step(call: Call, blocks: list[_Block], results: list[torch.Tensor]) -> torch.Tensor:
    """`[B, T_h]` from a result `[n * B]` of each block of a head."""
    sizes = [(block.steps.stop - block.steps.start, call.batch) for block in blocks]
    by_block = [result.reshape(size).unbind(0) for result, size in zip(results, sizes, strict=True)]
    return torch.stack([result for results in by_block for result in results], 1)


def _shares(
    call: Call, blocks: dict[str, list[_Block]], per_step: dict[str, torch.Tensor], per_sample: torch.Tensor
) -> dict[str, torch.Tensor]:
    """By head, `[B]`: the head's share of the loss of each sample, after all weights and the reduction."""
    remaining, contributing = call, per_step
    if call.options.nonfinite == "skip":
        # A skipped sample is masked, so that neither a NaN loss nor a NaN weight reaches loss and gradients.
        finite = per_sample.isfinite().unsqueeze(1)
        masks = {name: finite & _unmasked(name, call) for name in per_step}
        remaining = replace(call, weights=replace(call.weights, masks=masks))
        contributing = {name: _per_step(name, remaining, blocks[name]) for name in per_step}
    shares = {name: _weighted(name, remaining, losses) / _divisor(name, call) for name, losses in contributing.items()}
    for name in per_step.keys() & call.weights.importance_weights.keys():
        weights = call.weights.importance_weights[name]
        shares[name] = _by_sample(name, remaining, weights.to(call.dtype)) * shares[name]
    return shares


def _gradient_norms(call: Call, blocks: dict[str, list[_Block]], per_sample: torch.Tensor) -> dict[str, torch.Tensor]:
    """By head: the norm of the gradient of the loss with respect to the predictions that require grad, in the dtype of
    the loss."""
    with_gradient = call.heads_with_gradient()
    if not with_gradient:
        return {}
    entries = {name: [_constant(block.prediction) for block in blocks[name]] for name in with_gradient}

    def loss(predictions: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        own = {
            name: [block._replace(prediction=entry) for block, entry in zip(blocks[name], listed, strict=True)]
            for name, listed in predictions.items()
        }
        per_step = {name: _per_step(name, call, listed) for name, listed in own.items()}
        return _sum(_shares(call, own, per_step, per_sample).values()).sum()

    gradients = _gradient(loss, entries)
    return {
        name: _norm(list(itertools.compress(gradients[name], [block.wants_gradient for block in blocks[name]])))
        for name in with_gradient
    }


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all tensors as one vector. Squares of float32 do not overflow in float64."""
    dtype, widest = tensors[0].dtype, _context.widest(tensors[0].device)
    if dtype == widest:
        return norm_of(torch.cat([tensor.flatten() for tensor in tensors]).abs(), 2.0)
    # First by row: a compiler adds the squares of a row where it computes the row.
    rows = [torch.linalg.vector_norm(tensor.unsqueeze(-1).flatten(1), dim=1, dtype=widest) for tensor in tensors]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(rows))
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


def _largest_logit(name: str, call: Call, blocks: list[_Block]) -> torch.Tensor:
    """The largest magnitude of finite logits among unmasked entries."""
    largest = []
    for block in blocks:
        magnitudes = block.prediction.detach().abs().flatten(1)
        counts = magnitudes < torch.inf  # False for NaN
        if name in call.weights.masks:
            counts = counts & _unmasked_rows(name, call, block).unsqueeze(1)
        largest.append(torch.where(counts, magnitudes, 0.0).amax(1))
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
    if (count := call.weights.num_entries.get(name)) is not None:
        return torch.where(count == 0, 1, count).to(call.dtype)
    if call.options.reduction == "mean":
        return float(max(call.batch, 1))
    if call.options.reduction == "valid_mean":
        return _num_unmasked(name, call).to(call.dtype)
    return 1.0


def _per_step(name: str, call: Call, blocks: list[_Block]) -> torch.Tensor:
    """`[B, T_h]` losses without weights. A masked entry is replaced by ones before its loss is computed, so that
    neither its value nor its gradient can propagate."""
    head, losses = call.heads[name], []
    for block in blocks:
        if name not in call.weights.masks:
            losses.append(_LOSSES[head.kind](head, block.prediction, block.target))
            continue
        unmasked = _unmasked_rows(name, call, block)
        target = None if block.target is None else _where(unmasked, block.target)
        loss = _LOSSES[head.kind](head, _where(unmasked, block.prediction), target)
        losses.append(torch.where(unmasked, loss, 0.0))
    return _by_step(call, blocks, losses)


def _unmasked_rows(name: str, call: Call, block: _Block) -> torch.Tensor:
    """Bool `[n * B]`, of a head with a mask."""
    return torch.cat(call.weights.masks[name][:, block.steps].unbind(1))


def _where(unmasked: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    ones = torch.ones((), dtype=entry.dtype, device=entry.device)
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


def _detail(name: str, call: Call, blocks: list[_Block]) -> torch.Tensor:
    """`[B, T_h]` in the caller's dimension order: decoded predictions of a head with a support, or entropies."""
    head = call.heads[name]
    predictions = [block.prediction.detach() for block in blocks]
    if head.detail == "expected":
        support: Bins = head.support  # type: ignore[attr-defined]
        details = decoded(_by_step(call, blocks, [expectation(logits, support) for logits in predictions]), support)
    else:
        details = _by_step(call, blocks, [_entropy(logits) for logits in predictions])
    return maybe_transposed(details, call.options.batch_first).to(call.dtype)


# ---- The losses of the heads: [B] for one step ----------------------------------------------------------------------


def _encoded(head: Head, target: torch.Tensor, prediction: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the loss of a head compares predictions with, in the dtype of the loss: distributions, or transformed
    scalars. `prediction` is an entry of the head."""
    target = target.to(dtype) if target.is_floating_point() else _one_hot(target, prediction.shape[-1], dtype)
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


def _soft_cross_entropy_loss(head: SoftCrossEntropy, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = _cross_entropy(logits, target, total=target.sum(-1))
    if head.subtract_target_entropy:
        loss = loss + torch.special.xlogy(target, target).sum(-1)
    if head.entropy_weight != 0:
        loss = loss - head.entropy_weight * _entropy(logits)
    return loss


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


_LOSSES: dict[str, Callable[[Any, torch.Tensor, Any], torch.Tensor]] = {
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
}


def entry_loss(head: Head, prediction: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """`[B]` losses of one head at one step."""
    if target is not None:
        target = _encoded(head, target, prediction, prediction.dtype)
    return _LOSSES[head.kind](head, prediction, target)


def _product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply, with 0 times infinity, or NaN, being 0: an illegal action, with a logit of -inf, costs nothing where
    the target is 0."""
    return weight * torch.where(weight == 0, 0.0, x)


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor, total: torch.Tensor | int) -> torch.Tensor:
    """``-sum_j t_j log p_j`` for targets with this sum; NaN for a row without a softmax. The derivative of log_softmax
    would add up the gradients of a row, so that a compiler stored them; this one is computed element by element."""
    below_largest = logits - logits.detach().amax(-1, keepdim=True)
    return total * below_largest.exp().sum(-1).log() - _product(target, below_largest).sum(-1)


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
