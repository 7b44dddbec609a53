"""Checks of argument values, for `multi_step_loss(..., check=True)`. Every check waits for the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from .. import _context, _remedies
from ..heads import BinaryCrossEntropy, CategoricalKL, Head, HLGauss, SoftCrossEntropy, TwoHot
from ..policy_heads import ClippedSquaredError, PolicyHead
from ..transforms import transform
from .checks import is_mapping
from .entries import Fields
from .options import FieldEntries, Options
from .validate import Call, validate

if TYPE_CHECKING:
    from ..support import Support


def check_values(
    heads: Mapping[str, Head],
    predictions: Mapping[str, FieldEntries],
    targets: Mapping[str, FieldEntries],
    options: Options,
) -> None:
    """Raise ValueError for the first value that cannot be intended."""
    _context.require_values("multi_step_loss", "the loss")
    call = validate(heads, predictions, targets, options)
    with torch.no_grad():
        for name, head in heads.items():
            entries = zip(call.predictions[name], call.targets[name], strict=True)
            for step, (prediction, target) in enumerate(entries, start=head.first_step):
                unmasked = call.weights.masks[name][:, step] if name in call.weights.masks else None
                prediction = {field: x.detach() for field, x in prediction.items()}
                at = "" if not options.steps else f" at step {step}"
                for field, x in prediction.items():
                    entry = _Entry(_words("prediction", field, name) + at, unmasked, x)
                    _check_prediction(entry, head, head.has_largest_logit and call.has_distribution(name))
                for field, t in target.items():
                    entry = _Entry(_words("target", field, name) + at, unmasked, t)
                    _check_target(entry, field, head, prediction, target)
            if isinstance(head, TwoHot | HLGauss):
                _warn_of_scalars_beyond(head.support, name, call)
        _check_weights(call)


class _Entry:
    """A tensor of a prediction or target at a step, with its mask `[B]`."""

    def __init__(self, where: str, unmasked: torch.Tensor | None, values: torch.Tensor) -> None:
        self.where = where
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


def _words(what: str, field: str, head: str) -> str:
    owner = f"the {what} of head '{head}'"
    return f"the field '{field}' in {owner}" if field else owner


def _shown(values: torch.Tensor) -> str:
    numbers = [f"{number:.6g}" for number in values.flatten()[:8].tolist()]
    if values.dim() == 0:
        return numbers[0]
    return f"[{', '.join(numbers)}{', ...' if values.numel() > len(numbers) else ''}]"


def _check_prediction(entry: _Entry, head: Head, has_logits: bool) -> None:
    x = entry.values
    # Logits of -inf mean illegal actions.
    wrong = _invalid_logits(x) if has_logits else ~x.isfinite()
    entry.reject(wrong, "is not finite", "find where it comes from, or mask it")
    if has_logits:
        choices = _choices(head, x)
        entry.reject(
            functools.reduce(torch.logical_or, [(logits == -torch.inf).all(-1) for logits in choices]),
            "has only logits of -inf, whose softmax is NaN",
            "leave at least one logit finite, or mask the entry",
        )
    if has_logits and x.shape[-1] > 1 and len(x) > 0:
        are_logits = ~_remedies.look_like_probabilities(x).reshape(len(x), -1).all(1)
        unmasked = torch.ones_like(are_logits) if entry.unmasked is None else entry.unmasked
        if bool(unmasked.any()) and not bool((are_logits & unmasked).any()):
            entry.reject(
                ~are_logits,
                "looks like probabilities: all its rows are at least 0 and add up to 1",
                f"{type(head).__name__} expects logits: leave out the softmax",
            )


def _choices(head: Head, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The logits of each of the independent choices of a head."""
    sizes = getattr(head, "choices", None) or (logits.shape[-1],)
    return torch.split(logits, list(sizes), -1)


def _invalid_logits(x: torch.Tensor) -> torch.Tensor:
    """True where x is NaN or inf. -inf is valid: an illegal action, or a class with probability 0."""
    return x.isnan() | (x == torch.inf)


def _check_target(entry: _Entry, field: str, head: Head, prediction: Fields, target: Fields) -> None:
    if isinstance(head, PolicyHead):
        _check_policy_field(entry, field, head, prediction)
        return
    if isinstance(head, ClippedSquaredError) and field == "values" and head.clip is None:
        return  # not read
    _check_values(entry, field, head, prediction[""])
    if field in ("", "probabilities") and head.has_largest_logit:
        _check_illegal_logits(entry, head, prediction[""], target.get("classes"))


def _check_policy_field(entry: _Entry, field: str, head: PolicyHead, prediction: Fields) -> None:
    """Check a field of a policy gradient."""
    t = entry.values
    if field != "actions" or t.is_floating_point():
        # An action that the other policy cannot take has a log-probability of -inf.
        wrong = ~t.isfinite() if field in ("actions", "advantages") else _invalid_logits(t)
        entry.reject(wrong, "is not finite", "find where it comes from, or mask it")
        if field in ("log_probs", "reference_log_probs") and "" in prediction and prediction[""].dim() > 1:
            entry.reject(t > 0, "is above 0", "give logarithms of probabilities: log_softmax, not softmax")
        return
    actions = t.unbind(-1) if t.dim() > 1 else (t,)
    for choice, action in zip(_choices(head, prediction[""]), actions, strict=True):
        size = choice.shape[-1]
        wrong = (action < 0) | (action >= size)
        entry.reject(wrong, f"must be actions from 0 to {size - 1}", "mask entries without an action")
        # Actions of masked entries may be out of range.
        taken = choice.gather(-1, action.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1)
        entry.reject(
            taken == -torch.inf,
            "is an illegal action: its logit is -inf",
            "give the logits the mask of legal actions with which the action was chosen",
        )


def _check_values(entry: _Entry, field: str, head: Head, prediction: torch.Tensor) -> None:
    t = entry.values
    if not t.is_floating_point():
        classes = prediction.shape[-1]
        wrong = (t < 0) | (t >= classes)
        entry.reject(wrong, f"must be classes from 0 to {classes - 1}", "mask entries without a class")
    elif field == "fractions":
        entry.reject(~((t >= 0) & (t <= 1)), "must be in 0..1", "give the fractions of the quantiles")
    elif head.decodes:  # infinite scalars fall into the end bins
        entry.reject(t.isnan(), "is NaN", "mask entries without a target")
    elif isinstance(head, SoftCrossEntropy):
        _check_distribution(entry)
    elif isinstance(head, CategoricalKL):
        entry.reject(_invalid_logits(t), "is not finite", "find where it comes from, or mask it")
    elif isinstance(head, BinaryCrossEntropy):
        entry.reject(~((t >= 0) & (t <= 1)), "must be in 0..1", "give probabilities, or 0 and 1")
    else:
        entry.reject(~t.isfinite(), "is not finite", "mask entries without a target")


def _check_illegal_logits(entry: _Entry, head: Head, prediction: torch.Tensor, classes: torch.Tensor | None) -> None:
    """Reject positive probabilities of the target where the logit is -inf. `classes` have the probabilities."""
    t, logits = entry.values, prediction
    if classes is not None:
        logits = logits.gather(-1, classes.clamp(0, logits.shape[-1] - 1))
    instead = "give illegal actions the probability 0, or a finite logit"
    if isinstance(head, CategoricalKL):
        if head.unimix > 0:
            return  # no probability is 0
        t, logits = (t.softmax(-1), logits) if head.prediction == "q" else (logits.softmax(-1), t)
        instead = "write unimix=0.01, or give finite logits"
    elif isinstance(head, HLGauss):
        t = head.support.hl_gauss(t.to(_context.widest(t.device)), head.sigma_ratio)
    elif isinstance(head, TwoHot):
        t = head.support.two_hot(t.to(_context.widest(t.device)))
    elif not t.is_floating_point():
        t = torch.nn.functional.one_hot(t.clamp(0, logits.shape[-1] - 1), logits.shape[-1])
    illegal = logits == -torch.inf
    entry.reject(illegal & (t > 0), "is positive where the logit is -inf, which makes the loss infinite", instead)
    smoothing = getattr(head, "label_smoothing", 0.0)
    if smoothing > 0:
        entry.reject(
            illegal,
            f"is positive where the logit is -inf after label_smoothing = {smoothing}, which makes the loss infinite",
            "write label_smoothing=0.0 for a head with illegal actions, or give them a finite logit",
        )


def _check_distribution(entry: _Entry) -> None:
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
        "write visits / visits.sum(-1, keepdim=True), and give sample weights as importance_weights",
    )


def _warn_of_scalars_beyond(support: Support, name: str, call: Call) -> None:
    """Warn if finite targets of a head are beyond its support. Infinite targets are treated as intended."""
    targets = torch.stack([target[""] for target in call.targets[name]], 1)
    transformed = transform(targets.to(_context.widest(targets.device)), support.transform, support.eps)
    counts = transformed.isfinite()
    if name in call.weights.masks:
        counts &= call.weights.masks[name][:, call.heads[name].first_step :]
    found = transformed[counts]
    rounding = 1e-6 * (support.maximum - support.minimum)  # of a target that is equal to an end
    beyond = (found < support.minimum - rounding) | (found > support.maximum + rounding)
    if not beyond.any():
        return
    low = float(math.floor(min(found.min().item(), support.minimum)))
    high = float(math.ceil(max(found.max().item(), support.maximum)))
    if support.minimum == -support.maximum:
        low, high = min(low, -high), max(-low, high)
    numbers = asdict(support) | {"minimum": low, "maximum": high}
    wider = ", ".join(f"{field}={value!r}" for field, value in numbers.items())
    _context.warn(
        f"multi_step_loss: {float(beyond.sum()) / len(beyond):.2%} of the targets of head '{name}' are beyond its "
        f"support and are encoded as its ends; Support({wider}) holds them, with wider bins"
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
        ("num_entries", weights.num_entries),
    ):
        differ = is_mapping(getattr(call.options, argument))
        for name, tensor in by_head.items():
            label = f"the {argument} of head '{name}'" if differ else argument
            read = reads[name] if differ else functools.reduce(torch.logical_or, reads.values())
            _check_weight(argument, label, tensor.detach().cpu(), read)


def _check_weight(argument: str, label: str, values: torch.Tensor, read: torch.Tensor) -> None:
    below = torch.zeros_like(values, dtype=torch.bool) if argument == "step_gradient_scale" else values < 0
    if values.dim() == 0:
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
        instead = "; mask an entry to leave it out" if place else ""
        raise ValueError(
            f"multi_step_loss: {label} must be {wanted}, but {found_at} {float(weights[tuple(index)]):.6g}{instead}"
        )
