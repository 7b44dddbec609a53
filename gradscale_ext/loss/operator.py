"""The multi-step loss as one operator, which torch.compile and torch.export keep in their graphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _context
from .._native import _C  # registers the operator
from ..call.options import Entries, FieldEntries, as_given
from ..call.output import MultiStepLossOutput
from ..call.validate import Call
from ..heads import record_of

#: A count is the number of tensors in the list of a field; these stand for one stacked tensor, for no tensor, and for a
#: tensor for all samples and steps, which may be expanded.
_STACKED, _NONE, _SHARED = 0, -1, -2
#: Results of the operator, in its order: names, and True for a list by head.
_OUTPUTS = _C.outputs()
#: By kind of head, the names of the fields of predictions and of targets. A tensor without a name is the first field.
_FIELDS = _C.fields()


def call_operator(
    call: Call, predictions: Mapping[str, FieldEntries], targets: Mapping[str, FieldEntries]
) -> MultiStepLossOutput:
    """Compute the loss of a call whose arguments were checked."""
    heads = call.heads

    def by_head(given: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """An option as the operator accepts it: in the order of the heads, or empty if it is not given."""
        turned = {name: as_given(x, call.options) if x.dim() == 2 else x for name, x in given.items()}
        return [turned.get(name) for name in heads] if turned else []

    weights = call.weights
    lists = [  # in the order of Options
        by_head(weights.step_weights),
        by_head(weights.step_gradient_scale),
        by_head(weights.importance_weights),
        by_head(weights.masks),
        by_head(weights.head_weights),
        by_head(weights.num_entries),
    ]
    predicted, wanted = [], []
    for name, head in heads.items():
        of_prediction, of_target = _FIELDS[head.kind]
        predicted += _listed(_expanded(call, name, predictions[name]), of_prediction, call.shared(name))
        wanted += _listed(targets.get(name), of_target)
    differentiable = call.heads_with_gradient()
    listed = itertools.chain.from_iterable(tensors for tensors, _ in predicted)
    # Autograd adds these too, but a compiler skips autograd if no output of its graph needs a gradient.
    wants = [i for i, tensor in enumerate(listed) if tensor.requires_grad] if differentiable else []
    names, numbers = record_of(heads.values())
    varies = [_context.varies(number) for number in numbers]
    cpu = torch.device("cpu")
    varying = [_context.as_tensor(number, cpu) for number in itertools.compress(numbers, varies)]
    arguments = [
        [tensor for tensors, _ in predicted for tensor in tensors],
        [tensor for tensors, _ in wanted for tensor in tensors],
        [count for _, count in predicted],
        [count for _, count in wanted],
        names,
        [math.nan if replaced else number for number, replaced in zip(numbers, varies, strict=True)],
        wants,
        *lists,
        *call.options[len(lists) :],
    ]
    operator = torch.ops.gradscale_ext.multi_step_loss
    results = operator.varying(*arguments, varying) if varying else operator.default(*arguments)
    return _output_of(results, call, differentiable)


def _output_of(results: Sequence[Any], call: Call, differentiable: Sequence[str]) -> MultiStepLossOutput:
    """The results of the operator by name. `differentiable`: the heads that have a gradient."""
    heads, left = call.heads, iter(results)
    with_log_probs = [name for name, head in heads.items() if head.kind in _POLICIES]
    with_old_policy = [name for name in with_log_probs if "log_probs" in call.targets[name][0]]
    names_of = {
        "per_step": list(heads),
        "details": [name for name, head in heads.items() if head.detail and call.has_distribution(name)],
        "log_probs": with_log_probs,
        "approx_kl": with_old_policy,
        "clip_fraction": with_old_policy,
        "shares": list(call.weights.head_weights),
    }
    outputs: dict[str, Any] = {
        name: {head: next(left) for head in names_of[name]} if by_head else next(left)
        for name, by_head in _OUTPUTS.items()
    }
    outputs.pop("shares")  # gradients of the head weights, for the backward pass
    details = outputs.pop("details")
    for name in ("head_means", "head_losses", "head_gradient_norms", "max_abs_logit"):
        outputs[name] = dict(zip(heads, outputs[name].unbind(), strict=True))
    outputs["head_gradient_norms"] = {name: outputs["head_gradient_norms"][name] for name in differentiable}
    outputs["max_abs_logit"] = {
        name: outputs["max_abs_logit"][name]
        for name, head in heads.items()
        if head.has_largest_logit and call.has_distribution(name)
    }
    for detail in ("expected", "entropy"):
        outputs[detail] = {name: tensor for name, tensor in details.items() if heads[name].detail == detail}
    return MultiStepLossOutput(**outputs)


#: Kinds of heads that have the log-probability of an action.
_POLICIES = ("policy_gradient", "gaussian_policy_gradient")


def _expanded(call: Call, head: str, entries: FieldEntries) -> FieldEntries:
    """The prediction of a head. If there is a loss, and so a factor, for each sample, fields that all samples and
    steps share get dimensions for them."""
    shared = call.shared(head)
    if not shared or not isinstance(entries, Mapping) or call.options.reduction != "none":
        return entries
    steps = call.steps - call.heads[head].first_step
    leading: tuple[int, ...] = (call.batch, steps) if call.options.batch_first else (steps, call.batch)
    leading = leading if call.options.steps else (call.batch,)
    return {
        name: tensor.expand(*leading, -1) if name in shared else tensor  # type: ignore[union-attr]
        for name, tensor in entries.items()
    }


def _listed(
    entries: FieldEntries | None, names: Sequence[str], shared: Sequence[str] = ()
) -> list[tuple[Sequence[torch.Tensor], int]]:
    """For each field, its tensors and their count."""
    if not isinstance(entries, Mapping):
        alone = ([], _NONE) if entries is None else _counted(entries)
        return [alone, *[([], _NONE)] * (len(names) - 1)]
    listed: list[tuple[Sequence[torch.Tensor], int]] = []
    for name in names:
        tensors, count = _counted(entries[name]) if name in entries else ([], _NONE)
        listed.append((tensors, _SHARED if name in shared else count))
    return listed


def _counted(entries: Entries) -> tuple[Sequence[torch.Tensor], int]:
    return ([entries], _STACKED) if isinstance(entries, torch.Tensor) else (entries, len(entries))
