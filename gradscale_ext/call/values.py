"""Checks of argument values, for `multi_step_loss(..., check=True)`. Every check waits for the device."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from .. import _context
from ..heads import BinaryCrossEntropy, CategoricalKL, Head, SoftCrossEntropy
from .checks import is_mapping
from .options import Entries, Options
from .validate import Call, validate


def check_values(
    heads: Mapping[str, Head], predictions: Mapping[str, Entries], targets: Mapping[str, Entries], options: Options
) -> None:
    """Raise ValueError for the first value that cannot be intended."""
    _context.require_values("multi_step_loss", "the loss")
    call = validate(heads, predictions, targets, options)
    with torch.no_grad():
        for name, head in heads.items():
            entries = zip(call.predictions[name], call.targets[name], strict=True)
            for step, (prediction, target) in enumerate(entries, start=head.first_step):
                unmasked = call.weights.masks[name][:, step] if name in call.weights.masks else None
                _check_prediction(_Entry("prediction", name, step, unmasked, prediction.detach()), head)
                if target is not None:
                    _check_target(_Entry("target", name, step, unmasked, target), head, prediction.detach())
        _check_weights(call)


class _Entry:
    """A prediction or target at a step, with its mask `[B]`."""

    def __init__(self, what: str, head: str, step: int, unmasked: torch.Tensor | None, values: torch.Tensor) -> None:
        self.where = f"the {what} of head '{head}' at step {step}"
        self.unmasked = unmasked
        self.values = values

    def samples(self, wrong: torch.Tensor) -> torch.Tensor:
        """Reduce `[B, ...]` to `[B]`: True for unmasked samples with a wrong element."""
        found = wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong
        return found if self.unmasked is None else found & self.unmasked

    def reject(self, wrong: torch.Tensor, fault: str, instead: str) -> None:
        """Raise ValueError for the first unmasked sample with a wrong element."""
        found = self.samples(wrong).nonzero()
        if len(found) > 0:
            sample = int(found[0])
            raise ValueError(
                f"multi_step_loss: {self.where} {fault}: sample {sample} has {_shown(self.values[sample])}; {instead}"
            )


def _shown(values: torch.Tensor) -> str:
    numbers = [f"{number:.6g}" for number in values.flatten()[:8].tolist()]
    if values.dim() == 0:
        return numbers[0]
    return f"[{', '.join(numbers)}{', ...' if values.numel() > len(numbers) else ''}]"


def _check_prediction(entry: _Entry, head: Head) -> None:
    x = entry.values
    # Logits of -inf mean illegal actions.
    has_logits = head.decodes or isinstance(head, SoftCrossEntropy | CategoricalKL)
    wrong = _invalid_logits(x) if has_logits else ~x.isfinite()
    entry.reject(wrong, "is not finite", "find where it comes from, or mask it")
    if has_logits and x.shape[-1] > 1 and len(x) > 0:
        total = x.sum(-1, dtype=_context.widest(x.device))
        tolerance = 1e-3 if x.dtype in (torch.float32, torch.float64) else 2e-2
        are_logits = ((x < 0).any(-1) | ((total - 1).abs() > tolerance)).reshape(len(x), -1).any(1)
        unmasked = torch.ones_like(are_logits) if entry.unmasked is None else entry.unmasked
        if bool(unmasked.any()) and not bool((are_logits & unmasked).any()):
            entry.reject(
                ~are_logits,
                "looks like probabilities: all its rows are at least 0 and add up to 1",
                f"{type(head).__name__} expects logits: leave out the softmax",
            )


def _invalid_logits(x: torch.Tensor) -> torch.Tensor:
    """True where x is NaN or inf. -inf is valid: an illegal action, or a class with probability 0."""
    return x.isnan() | (x == torch.inf)


def _check_target(entry: _Entry, head: Head, prediction: torch.Tensor) -> None:
    t = entry.values
    if not t.is_floating_point():
        classes = prediction.shape[-1]
        wrong = (t < 0) | (t >= classes)
        entry.reject(wrong, f"must be classes from 0 to {classes - 1}", "mask entries without a class")
    elif head.decodes:  # infinite scalars fall into the end bins
        entry.reject(t.isnan(), "is NaN", "mask entries without a target")
    elif isinstance(head, SoftCrossEntropy):
        _check_distribution(entry, prediction)
    elif isinstance(head, CategoricalKL):
        entry.reject(_invalid_logits(t), "is not finite", "find where it comes from, or mask it")
    elif isinstance(head, BinaryCrossEntropy):
        entry.reject(~((t >= 0) & (t <= 1)), "must be in 0..1", "give probabilities, or 0 and 1")
    else:
        entry.reject(~t.isfinite(), "is not finite", "mask entries without a target")


def _check_distribution(entry: _Entry, prediction: torch.Tensor) -> None:
    t = entry.values
    tolerance = 1e-3 if t.dtype in (torch.float32, torch.float64) else 2e-2
    entry.reject(
        ~t.isfinite(), "is not finite", "mask entries without a target; visits / visits.sum(-1) of no visits is NaN"
    )
    entry.reject(t < 0, "has negative probabilities", "give probabilities, or visits / visits.sum(-1, keepdim=True)")
    # A weighted distribution may have any sum, but no entry above 1. Whole numbers are treated as visit counts.
    counts = ((t == t.round()).all(-1) & (t.sum(-1, dtype=_context.widest(t.device)) > 1)).unsqueeze(-1)
    entry.reject(
        counts | (t > 1 + tolerance),
        "is not a distribution",
        "give visits / visits.sum(-1, keepdim=True), and sample weights as importance_weights",
    )
    illegal = (t > 0) & (prediction == -torch.inf)
    entry.reject(
        illegal,
        "is positive where the logit is -inf, which makes the loss infinite",
        "give illegal actions the probability 0, or a finite logit",
    )


def _check_weights(call: Call) -> None:
    weights = call.weights
    # Only weights that some head reads are checked.
    everywhere = torch.ones(call.batch, call.steps, dtype=torch.bool)
    reads = {}
    for name, head in call.heads.items():
        reads[name] = weights.masks[name].cpu() if name in weights.masks else everywhere
        reads[name] = reads[name] & (torch.arange(call.steps) >= head.first_step)
    for argument, by_head in (
        ("importance_weights", weights.importance_weights),
        ("step_weights", weights.step_weights),
        ("step_gradient_scale", weights.step_gradient_scale),
        ("head_weights", weights.head_weights),
    ):
        differ = is_mapping(getattr(call.options, argument))
        for name, tensor in by_head.items():
            label = f"the {argument} of head '{name}'" if differ else argument
            read = reads[name] if differ else functools.reduce(torch.logical_or, reads.values())
            _check_weight(argument, label, tensor.detach().cpu(), read)


def _check_weight(argument: str, label: str, values: torch.Tensor, read: torch.Tensor) -> None:
    below = torch.zeros_like(values, dtype=torch.bool) if argument == "step_gradient_scale" else values < 0
    if argument == "head_weights":
        _reject_weight(argument, label, values, "", below)
    elif argument == "importance_weights":
        _reject_weight(argument, label, values, "sample {}", below, read.any(1))
    elif values.dim() == 1:
        _reject_weight(argument, label, values, "step {}", below, read.any(0))
    else:
        _reject_weight(argument, label, values, "sample {} at step {}", below, read)


def _reject_weight(
    argument: str,
    label: str,
    weights: torch.Tensor,
    place: str,
    negative: torch.Tensor,
    read: torch.Tensor | None = None,
) -> None:
    wrong = ~weights.isfinite() | negative
    found = (wrong if read is None else wrong & read).nonzero()
    if len(found) > 0:
        index = found[0].tolist()
        wanted = "finite" if argument == "step_gradient_scale" else "finite and at least 0"
        found_at = f"{place.format(*index)} has" if place else "it is"
        instead = "" if argument == "head_weights" else "; mask an entry to leave it out"
        raise ValueError(
            f"multi_step_loss: {label} must be {wanted}, but {found_at} {float(weights[tuple(index)]):.6g}{instead}"
        )
