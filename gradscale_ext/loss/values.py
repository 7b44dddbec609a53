"""Checks of the values of a multi-step loss's arguments, for `check=True`. Every check waits for the device."""

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
    """Raise ValueError for the first value that no user can mean."""
    if not _context.is_eager() or _context.is_transformed():
        raise NotImplementedError(
            "multi_step_loss: check=True looks at values, and torch.compile, torch.export and torch.func transforms "
            "have none while they trace; call the loss once outside of them with check=True, and leave it out inside"
        )
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

    def rows(self, of_elements: torch.Tensor) -> torch.Tensor:
        """Reduce `[B, ...]` to `[B]`: True for unmasked samples with a true element."""
        found = of_elements.flatten(1).any(1) if of_elements.dim() > 1 else of_elements
        return found if self.unmasked is None else found & self.unmasked

    def refuse(self, of_elements: torch.Tensor, fault: str, instead: str) -> None:
        """Raise ValueError for the first sample with a true element."""
        found = self.rows(of_elements).nonzero()
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
    wrong = _no_logits(x) if has_logits else ~x.isfinite()
    entry.refuse(wrong, "is not finite", "look for what made it so, or mask it")
    if has_logits and x.shape[-1] > 1 and len(x) > 0:
        total = x.sum(-1, dtype=_context.widest(x.device))
        tolerance = 1e-3 if x.dtype in (torch.float32, torch.float64) else 2e-2
        other = ((x < 0).any(-1) | ((total - 1).abs() > tolerance)).reshape(len(x), -1).any(1)
        unmasked = torch.ones_like(other) if entry.unmasked is None else entry.unmasked
        if bool(unmasked.any()) and not bool((other & unmasked).any()):
            entry.refuse(
                ~other,
                "looks like probabilities: all its rows are at least 0 and add up to 1",
                f"{type(head).__name__} takes logits: leave out the softmax",
            )


def _no_logits(x: torch.Tensor) -> torch.Tensor:
    """Where x is not finite, except for -inf: an illegal action, or a class that a distribution does not have."""
    return x.isnan() | (x == torch.inf)


def _check_target(entry: _Entry, head: Head, prediction: torch.Tensor) -> None:
    t = entry.values
    if not t.is_floating_point():
        classes = prediction.shape[-1]
        wrong = (t < 0) | (t >= classes)
        entry.refuse(wrong, f"must be classes from 0 to {classes - 1}", "mask what has no class")
    elif head.decodes:  # infinite scalars fall into the end bins
        entry.refuse(t.isnan(), "is NaN", "mask what has no target")
    elif isinstance(head, SoftCrossEntropy):
        _check_distribution(entry, prediction)
    elif isinstance(head, CategoricalKL):
        entry.refuse(_no_logits(t), "is not finite", "look for what made it so, or mask it")
    elif isinstance(head, BinaryCrossEntropy):
        entry.refuse(~((t >= 0) & (t <= 1)), "must be in 0..1", "give probabilities, or 0 and 1")
    else:
        entry.refuse(~t.isfinite(), "is not finite", "mask what has no target")


def _check_distribution(entry: _Entry, prediction: torch.Tensor) -> None:
    t = entry.values
    tolerance = 1e-3 if t.dtype in (torch.float32, torch.float64) else 2e-2
    entry.refuse(~t.isfinite(), "is not finite", "mask what has no target; visits / visits.sum(-1) of none is NaN")
    entry.refuse(t < 0, "has negative probabilities", "give probabilities, or visits / visits.sum(-1, keepdim=True)")
    # Weighted distributions may add up to any number, but have neither entries above 1 nor counts.
    counts = ((t == t.round()).all(-1) & (t.sum(-1, dtype=_context.widest(t.device)) > 1)).unsqueeze(-1)
    entry.refuse(
        counts | (t > 1 + tolerance),
        "is no distribution",
        "give visits / visits.sum(-1, keepdim=True), and weights of samples as importance_weights",
    )
    illegal = (t > 0) & (prediction == -torch.inf)
    entry.refuse(
        illegal,
        "has probability where the logit is -inf, whose loss is infinite",
        "give illegal actions the probability 0, or a finite logit",
    )


def _check_weights(call: Call) -> None:
    weights = call.weights
    # Weights that no head reads may be anything. Heads that share a tensor read it together.
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
        _refuse_weight(argument, label, values, "", below)
    elif argument == "importance_weights":
        _refuse_weight(argument, label, values, "sample {}", below)
    elif values.dim() == 1:
        _refuse_weight(argument, label, values, "step {}", below, read.any(0))
    else:
        _refuse_weight(argument, label, values, "sample {} at step {}", below, read)


def _refuse_weight(
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
        instead = "" if argument == "head_weights" else "; a mask leaves an entry out"
        raise ValueError(
            f"multi_step_loss: {label} must be {wanted}, but {found_at} {float(weights[tuple(index)]):.6g}{instead}"
        )
