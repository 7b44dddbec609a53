"""The multi-step loss, head by head and step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from .. import _context
from .._distributed import by_whole, mapped, mesh_of
from ..call.checks import as_dict
from ..call.entries import Fields
from ..call.options import FieldEntries, Options, as_given
from ..call.output import MultiStepLossOutput
from ..call.ranks import for_all_ranks
from ..call.validate import Call, validate
from ..heads import Head
from ..policy_heads import PolicyHead
from . import policies
from .flow import scale_gradient
from .formulas import encoded, entropy_of, head_loss, plain
from .supports import Bins, decoded, expectation
from .tensors import norm_of


def multi_step_loss(
    heads: Mapping[str, Head],
    predictions: Mapping[str, FieldEntries],
    targets: Mapping[str, FieldEntries],
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
    prediction: Fields
    target: Fields
    wants_gradient: dict[str, bool]


def loss_of(call: Call) -> MultiStepLossOutput:
    """The loss of a call whose arguments were checked."""
    heads, options = call.heads, call.options
    blocks = {name: _blocks(name, call) for name in heads}
    with_logits = [name for name in heads if call.has_distribution(name) and heads[name].has_largest_logit]
    with_detail = [name for name in heads if call.has_distribution(name) and heads[name].detail]
    largest = {name: _largest_logit(name, call, blocks[name]) for name in with_logits}
    per_step = {name: _per_step(name, call, blocks[name]) for name in heads}
    details = {name: _detail(name, call, blocks[name]) for name in with_detail}
    log_probs = {
        name: _log_probs(head, call, blocks[name]) for name, head in heads.items() if isinstance(head, PolicyHead)
    }
    log_ratios = {
        name: _log_ratios(call, blocks[name], log_probs[name])
        for name in log_probs
        if "log_probs" in blocks[name][0].target
    }
    per_sample = _sum(_weighted(name, call, per_step[name]) for name in heads).detach()
    shares = _shares(call, blocks, per_step, per_sample)
    loss = _sum(shares.values())
    return MultiStepLossOutput(
        loss=loss if options.reduction == "none" else loss.sum(),
        per_sample=per_sample,
        per_step={name: as_given(losses.detach(), options) for name, losses in per_step.items()},
        expected={name: detail for name, detail in details.items() if heads[name].detail == "expected"},
        entropy={name: detail for name, detail in details.items() if heads[name].detail == "entropy"},
        head_means={name: per_step[name].detach().sum() / _num_unmasked(name, call) for name in heads},
        head_losses={name: share.detach().sum() for name, share in shares.items()},
        head_gradient_norms=_gradient_norms(call, blocks, per_sample),
        max_abs_logit=largest,
        num_nonfinite=(~per_sample.isfinite()).sum(),
        log_probs={name: as_given(log_prob, options) for name, log_prob in log_probs.items()},
        approx_kl={name: _mean(name, call, policies.k3(d)) for name, d in log_ratios.items()},
        clip_fraction={
            name: _mean(name, call, policies.outside_of_clip(heads[name], d.exp()).to(call.dtype))
            for name, d in log_ratios.items()
        },
    )


def _blocks(name: str, call: Call) -> list[_Block]:
    """The entries of a head. A block joins steps of one form, so that few operations compute all of them."""
    head, first = call.heads[name], call.heads[name].first_step
    runs: list[list[tuple[Fields, Fields]]] = []
    for entry in zip(call.predictions[name], call.targets[name], strict=True):
        if runs and _form(entry) == _form(runs[-1][0]):
            runs[-1].append(entry)
        else:
            runs.append([entry])
    blocks = []
    for run in runs:
        predictions, targets = zip(*run, strict=True)
        target = {
            field: encoded(head, field, torch.cat([entry[field] for entry in targets]), predictions[0], call.dtype)
            for field in targets[0]
        }
        wants_gradient = {field: tensor.requires_grad for field, tensor in predictions[0].items()}
        size = _steps_per_block(predictions[0], call)
        for step in range(0, len(run), size):
            joined = {
                field: torch.cat([entry[field] for entry in predictions[step : step + size]]).to(call.dtype)
                for field in predictions[0]
            }
            steps = slice(first + step, first + min(step + size, len(run)))
            own = {field: t[step * call.batch : (step + size) * call.batch] for field, t in target.items()}
            blocks.append(_Block(steps, joined, own, wants_gradient))
        first += len(run)
    return blocks


def _form(entry: tuple[Fields, Fields]) -> tuple[object, ...]:
    """What the entries of a block have in common, in addition to the shape of the predictions of a head."""
    prediction, target = entry
    own = [(tensor.is_floating_point(), *tensor.shape[1:]) for tensor in target.values()]
    return *[tensor.requires_grad for tensor in prediction.values()], *own


def _steps_per_block(prediction: Fields, call: Call) -> int:
    """As many as fit into a CPU's cache; all on other devices, and for sizes that vary under `torch.compile`."""
    elements = next(iter(prediction.values())).numel()
    if call.device.type != "cpu" or (not _context.is_eager() and _context.varies(elements)):
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
    entries = {
        name: [{field: _constant(tensor) for field, tensor in block.prediction.items()} for block in blocks[name]]
        for name in with_gradient
    }

    def loss(predictions: dict[str, list[Fields]]) -> torch.Tensor:
        own = {
            name: [block._replace(prediction=entry) for block, entry in zip(blocks[name], listed, strict=True)]
            for name, listed in predictions.items()
        }
        per_step = {name: _per_step(name, call, listed) for name, listed in own.items()}
        return _sum(_shares(call, own, per_step, per_sample).values()).sum()

    gradients = _gradient(loss, entries)
    return {name: _norm(_of_inputs(gradients[name], blocks[name], call.shared(name))) for name in with_gradient}


def _of_inputs(gradients: list[Fields], blocks: list[_Block], shared: list[str]) -> list[torch.Tensor]:
    """The gradients of the predictions that require grad. The gradient of a shared field is the sum over all rows."""
    found = []
    for field in gradients[0]:
        own = [g[field] for g, block in zip(gradients, blocks, strict=True) if block.wants_gradient[field]]
        found += [torch.cat(own).sum(0, keepdim=True)] if field in shared and own else own
    return found


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
    loss: Callable[[dict[str, list[Fields]]], torch.Tensor], entries: dict[str, list[Fields]]
) -> dict[str, list[Fields]]:
    """The gradient of a loss with respect to detached entries. It has no graph. The caller's saved-tensor hooks
    do not run."""
    if not _context.is_eager() or not _allows_hooks():
        with torch.no_grad():  # torch.func.grad computes the gradient nevertheless
            return torch.func.grad(loss)(entries)  # type: ignore[no-any-return]
    leaves = mapped(_leaf, entries)
    flat = [leaf for listed in leaves.values() for fields in listed for leaf in fields.values()]
    # torch.func.grad refuses to run under saved-tensor hooks, which activation checkpointing sets.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        found = iter(torch.autograd.grad(loss(leaves), flat, allow_unused=True, materialize_grads=True))
    return {name: [{field: next(found) for field in fields} for fields in listed] for name, listed in leaves.items()}


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
        magnitudes = block.prediction[""].detach().abs().flatten(1)
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
    return torch.ones(call.batch, call.steps, dtype=torch.bool, device=call.device)


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
            losses.append(head_loss(head, block.prediction, block.target))
            continue
        unmasked = _unmasked_rows(name, call, block)
        prediction, target = (
            {field: _where(unmasked, tensor) for field, tensor in fields.items()}
            for fields in (block.prediction, block.target)
        )
        losses.append(torch.where(unmasked, head_loss(head, prediction, target), 0.0))
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
    predictions = [{field: x.detach() for field, x in block.prediction.items()} for block in blocks]
    if head.detail == "expected":
        support: Bins = head.support  # type: ignore[attr-defined]
        expected = [expectation(prediction[""], support) for prediction in predictions]
        details = decoded(_by_step(call, blocks, expected), support)
    else:
        details = _by_step(call, blocks, [entropy_of(head, plain(prediction)) for prediction in predictions])
    return as_given(details, call.options).to(call.dtype)


def _log_probs(head: PolicyHead, call: Call, blocks: list[_Block]) -> torch.Tensor:
    """`[B, T_h]` log-probabilities of the actions of a policy."""
    found = []
    for block in blocks:
        prediction = {field: x.detach() for field, x in block.prediction.items()}
        found.append(policies.log_prob(head, plain(prediction), block.target))
    return _by_step(call, blocks, found)


def _log_ratios(call: Call, blocks: list[_Block], log_probs: torch.Tensor) -> torch.Tensor:
    """`[B, T_h]` logarithms of the ratio to the policy that acted."""
    return policies.log_ratio(log_probs, _by_step(call, blocks, [block.target["log_probs"] for block in blocks]))


def _mean(name: str, call: Call, values: torch.Tensor) -> torch.Tensor:
    """Mean of values `[B, T_h]` over the unmasked entries; 0 if there are none."""
    unmasked = _unmasked(name, call)[:, call.heads[name].first_step :]
    return torch.where(unmasked, values, 0.0).sum() / _num_unmasked(name, call)
