"""The multi-step loss as one operator, which torch.compile and torch.export keep in their graphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _context
from .._native import _C  # registers the operator
from ..call.options import Entries, Options, maybe_transposed
from ..call.output import MultiStepLossOutput
from ..call.validate import Call
from ..heads import DETAILS, record_of

#: A count is the number of tensors in a head's list; these stand for one stacked tensor, and for no tensor.
_STACKED, _NONE = 0, -1
#: Results of the operator, in its order: names, and True for a list by head.
_OUTPUTS = _C.outputs()


def call_operator(
    call: Call, predictions: Mapping[str, Entries], targets: Mapping[str, Entries]
) -> MultiStepLossOutput:
    """Compute the loss of a call whose arguments were checked."""
    heads = call.heads

    def by_head(given: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """An option as the operator accepts it: in the order of the heads, or empty if it is not given."""
        turned = {name: maybe_transposed(tensor, call.options.batch_first) for name, tensor in given.items()}
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
    predicted = [_listed(predictions[name]) for name in heads]
    wanted = [_listed(targets[name]) if head.has_target else ([], _NONE) for name, head in heads.items()]
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
        *call.options[len(lists) : 9],
    ]
    operator = torch.ops.gradscale_ext.multi_step_loss
    results = operator.varying(*arguments, varying) if varying else operator.default(*arguments)
    left = iter(results)
    names_of = {
        "per_step": list(heads),
        "details": [name for name, head in heads.items() if head.detail],
        "shares": list(weights.head_weights),
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
    outputs["max_abs_logit"] = {name: outputs["max_abs_logit"][name] for name in heads if heads[name].has_largest_logit}
    for detail in ("expected", "entropy"):
        outputs[detail] = {name: tensor for name, tensor in details.items() if heads[name].detail == detail}
    return MultiStepLossOutput(**outputs)


def _listed(entries: Entries) -> tuple[Sequence[torch.Tensor], int]:
    return ([entries], _STACKED) if isinstance(entries, torch.Tensor) else (entries, len(entries))


@torch.library.register_fake("gradscale_ext::multi_step_loss.varying")  # type: ignore[misc]
@torch.library.register_fake("gradscale_ext::multi_step_loss")  # type: ignore[misc]
def _shapes(
    predictions: list[torch.Tensor],
    targets: list[torch.Tensor],
    prediction_counts: list[int],
    target_counts: list[int],
    names: list[str],
    numbers: list[float],
    wants: list[int],
    *given: Any,
) -> list[torch.Tensor]:
    """The tensors that the operator returns, without values, for tracers."""
    options, device = Options(*given[: len(Options._fields)]), predictions[0].device
    is_double = any(prediction.dtype == torch.float64 for prediction in predictions)
    sum_options: dict[str, Any] = {"device": device, "dtype": torch.float64 if is_double else torch.float32}
    step_dim = 1 if options.batch_first else 0
    batch = predictions[0].shape[1 - step_dim if prediction_counts[0] == _STACKED else 0]
    head_details = [DETAILS[int(number)] for name, number in zip(names, numbers, strict=True) if name == "detail"]
    per_step, details = [], []
    first = 0
    for count, detail in zip(prediction_counts, head_details, strict=True):
        steps = count or predictions[first].shape[step_dim]
        size, stride = ((batch, steps), (steps, 1)) if options.batch_first else ((steps, batch), (1, steps))
        per_step.append(torch.empty_strided(size, stride, **sum_options))
        if detail:
            details.append(torch.empty_strided(size, stride, **sum_options))
        first += max(count, 1)
    loss_size = (batch,) if options.reduction == "none" else ()
    outputs: dict[str, Any] = {
        "loss": [torch.empty(loss_size, **sum_options)],
        "per_sample": [torch.empty((batch,), **sum_options)],
        "head_means": [torch.empty((len(per_step),), **sum_options)],
        "head_losses": [torch.empty((len(per_step),), **sum_options)],
        "head_gradient_norms": [torch.empty((len(per_step),), **sum_options)],
        "max_abs_logit": [torch.empty((len(per_step),), **sum_options)],
        "num_nonfinite": [torch.empty((), device=device, dtype=torch.int64)],
        "per_step": per_step,
        "details": details,
        "shares": [
            torch.empty(loss_size, **sum_options) for weight in options.head_weights or () if weight is not None
        ],
    }
    sizes: dict[torch.dtype, int] = {}
    for i in sorted(set(wants)):
        sizes[predictions[i].dtype] = sizes.get(predictions[i].dtype, 0) + predictions[i].numel()
    gradients = [torch.empty((size,), device=device, dtype=_gradient_dtype(dtype)) for dtype, size in sizes.items()]
    return [tensor for name in _OUTPUTS for tensor in outputs[name]] + gradients


def _gradient_dtype(prediction: torch.dtype) -> torch.dtype:
    """Type of a gradient before it is multiplied: half types are rounded afterwards."""
    return torch.float64 if prediction == torch.float64 else torch.float32
