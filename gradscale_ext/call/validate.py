"""The rules for the arguments of a multi-step loss, and their error messages."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _context, _numbers, _remedies
from .._distributed import mapped
from ..heads import Form, Head
from .checks import as_dict, check_choice, check_device, check_dtype, check_kind, written
from .options import NONFINITES, REDUCTIONS, Entries, Options
from .weights import Rules, Weights


@dataclass(frozen=True)
class Call:
    """The arguments of one call, checked and brought into one form."""

    heads: Mapping[str, Head]
    predictions: dict[str, list[torch.Tensor]]
    """One tensor `[B, ...]` per step, by head."""
    targets: dict[str, list[torch.Tensor | None]]
    """One tensor per step, by head; None for a head without a target."""
    weights: Weights
    """Weights and masks, `[B, ...]`."""
    options: Options
    """The options as they were given."""
    batch: int
    steps: int
    dtype: torch.dtype
    """Type of the loss: float32, or float64 when a prediction is float64."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors."""
        for by_head in (self.predictions, self.targets):
            for entries in by_head.values():
                yield from (entry for entry in entries if entry is not None)
        for weights in vars(self.weights).values():
            yield from weights.values()

    def heads_with_gradient(self) -> list[str]:
        """Names of the heads of which a prediction gets a gradient."""
        if not torch.is_grad_enabled():
            return []
        return [name for name, entries in self.predictions.items() if any(entry.requires_grad for entry in entries)]


def validate(
    heads: Mapping[str, Head], predictions: Mapping[str, Entries], targets: Mapping[str, Entries], options: Options
) -> Call:
    """Check the arguments, and return them in one form."""
    check_heads(heads)
    check_choice("reduction", options.reduction, REDUCTIONS)
    check_choice("nonfinite", options.nonfinite, NONFINITES)
    batch_first = options.batch_first
    _numbers.check_flag("multi_step_loss: batch_first", batch_first)
    predictions, targets = as_dict("predictions", predictions), as_dict("targets", targets)
    _check_names("predictions", predictions, heads, heads)
    _check_names("targets", targets, heads, [name for name, head in heads.items() if head.has_target])
    if _context.is_eager():
        predicted, wanted, steps = _by_step_or_other_order(heads, predictions, targets, batch_first)
    else:
        predicted, wanted, steps = _by_step(heads, predictions, targets, batch_first)
    first = next(iter(predicted.values()))[0]
    batch = first.shape[0]
    is_double = any(tensor.dtype == torch.float64 for tensors in predicted.values() for tensor in tensors)
    dtype = torch.float64 if is_double else torch.float32
    weights = Rules(heads, batch, steps, batch_first, first.device, dtype).check(options)
    predicted, wanted, weights = all_saveable((predicted, wanted, weights))
    return Call(heads, predicted, wanted, weights, options, batch, steps, dtype)


_ByStep = tuple[dict[str, list[torch.Tensor]], dict[str, list[torch.Tensor | None]], int]


def _by_step(
    heads: Mapping[str, Head], predictions: Mapping[str, Entries], targets: Mapping[str, Entries], batch_first: bool
) -> _ByStep:
    """Predictions and targets by head, one tensor `[B, ...]` per step, and T."""
    predicted = {
        name: _entries("prediction", name, head, predictions[name], batch_first) for name, head in heads.items()
    }
    wanted = {
        name: _targets(name, head, targets.get(name), len(predicted[name]), batch_first) for name, head in heads.items()
    }
    first = next(iter(predicted.values()))[0]
    if first.dim() == 0:
        raise ValueError(f"multi_step_loss: {_at(next(iter(heads)), 0, 'prediction')} has no batch dimension")
    steps = _count_steps(heads, predicted, wanted, first.shape[0], batch_first)
    for name, head in heads.items():
        _check_head(name, head, predicted[name], wanted[name], first.shape[0], first.device)
    return predicted, wanted, steps


def _by_step_or_other_order(
    heads: Mapping[str, Head], predictions: Mapping[str, Entries], targets: Mapping[str, Entries], batch_first: bool
) -> _ByStep:
    """The same. If all tensors fit the other order of dimensions, the error says so."""
    try:
        return _by_step(heads, predictions, targets, batch_first)
    except ValueError as error:
        try:
            _by_step(heads, predictions, targets, not batch_first)
        except (TypeError, ValueError):
            raise error from None
        given, other = ("[B, T]", "[T, B]") if batch_first else ("[T, B]", "[B, T]")
        remedy = f"write batch_first={not batch_first}"
        for what, by_head in (("prediction", predictions), ("target", targets)):
            if not all(isinstance(entries, torch.Tensor) for entries in by_head.values()):
                stacked = f"torch.stack({what}{'' if batch_first else ', 1'})"
                remedy += f" if lists have an entry for each step, or {stacked} for a list by sample"
                break
        raise ValueError(
            f"multi_step_loss: predictions and targets must have the order {given}, because batch_first={batch_first}, "
            f"but all of them fit {other}; {remedy}"
        ) from error


def all_saveable(tensors: Any) -> Any:
    """The same structure, with tensors that autograd can save."""
    is_recorded = _context.is_eager() and torch.is_grad_enabled()
    return mapped(_context.saveable, tensors) if is_recorded else tensors


def _count_steps(
    heads: Mapping[str, Head],
    predicted: Mapping[str, list[torch.Tensor]],
    wanted: Mapping[str, list[torch.Tensor | None]],
    batch: int,
    batch_first: bool,
) -> int:
    """T, which all heads must agree on."""
    steps, longest = 0, ""
    for name, head in heads.items():
        if head.first_step + len(predicted[name]) > steps:
            steps, longest = head.first_step + len(predicted[name]), name
    surplus = {len(wanted[name]) - len(predicted[name]) for name, head in heads.items() if head.has_target}
    for name, head in heads.items():
        count = steps - head.first_step
        for what, entries in (("prediction", predicted[name]), ("target", wanted[name])):
            if len(entries) != count:
                raise ValueError(
                    f"multi_step_loss: the {what} of head '{name}' must have {count} entries "
                    f"(first_step = {head.first_step}; T = {steps} steps, those of head '{longest}' with first_step = "
                    f"{heads[longest].first_step} and {len(predicted[longest])} predictions), but it has {len(entries)}"
                    + _remedies.remedy_for_count(
                        what,
                        entries,
                        count,
                        batch,
                        head.first_step,
                        longest,
                        heads[longest].first_step,
                        surplus.pop() if len(surplus) == 1 else None,
                        batch_first,
                    )
                )
    return steps


def check_heads(heads: Mapping[str, Head]) -> None:
    """Raise when `heads` is not a mapping of names to heads."""
    if not isinstance(heads, Mapping) or not heads:
        raise ValueError(f"multi_step_loss: heads must be a mapping with at least one head, but it is {heads!r}")
    for name, head in heads.items():
        if not isinstance(name, str):
            raise TypeError(
                f"multi_step_loss: names of heads must be strings, but {name!r} is of type {type(name).__name__}"
            )
        if not isinstance(head, Head) or not head.kind:
            raise TypeError(
                f"multi_step_loss: head '{name}' must be one of the head dataclasses (TwoHot, ...), "
                f"but it is of type {type(head).__name__}{_remedy_for_class(head)}"
            )


def _remedy_for_class(head: object) -> str:
    """Remedy for a class of heads in place of a head."""
    return f"; write {head.__name__}(...)" if isinstance(head, type) and issubclass(head, Head) else ""


def _steps(head: Head, count: int) -> range:
    """The steps of a head's entries. A range makes `first_step` a constant under torch.compile(dynamic=True)."""
    return range(head.first_step, head.first_step + count)


def _at(head: str, step: int, what: str) -> str:
    return f"the {what} of head '{head}' at step {step}"


def _check_names(argument: str, given: Mapping[str, Entries], heads: Mapping[str, Head], needed: Iterable[str]) -> None:
    missing = [name for name in needed if name not in given]
    unknown = [name for name in given if name not in heads]
    if missing or unknown:
        problems = []
        if missing:
            problems.append(f"has nothing for {', '.join(map(repr, missing))}")
        if unknown:
            problems.append(f"names {', '.join(map(repr, unknown))}, which is not a head")
        raise ValueError(f"multi_step_loss: {argument} {' and '.join(problems)}; the heads are {', '.join(heads)}")


def _entries(what: str, name: str, head: Head, entries: Entries, batch_first: bool) -> list[torch.Tensor]:
    """One tensor per step."""
    if isinstance(entries, torch.Tensor):
        check_kind(f"the stacked {what} of head '{name}'", entries)
        _check_stacked(what, name, head, entries, batch_first)
        entries = list(entries.unbind(1 if batch_first else 0))
    elif not isinstance(entries, list | tuple):
        raise TypeError(
            f"multi_step_loss: the {what} of head '{name}' must be a tensor or a list of one tensor per step, "
            f"but it is of type {type(entries).__name__}{_remedies.remedy_for_type(entries)}"
        )
    for step, entry in zip(_steps(head, len(entries)), entries, strict=True):
        where = _at(name, step, what)
        if not isinstance(entry, torch.Tensor):
            raise TypeError(
                f"multi_step_loss: {where} must be a tensor, but it is of type {type(entry).__name__}"
                f"{_remedies.remedy_for_type(entry)}"
            )
        check_kind(where, entry)
    if not entries:
        raise ValueError(f"multi_step_loss: the {what} of head '{name}' has no entries")
    return list(entries)


#: Remedy for distributions as targets of a head with a support.
_RAW_SCALARS = "; pass raw scalars: the head encodes them"


def _check_stacked(what: str, name: str, head: Head, entries: torch.Tensor, batch_first: bool) -> None:
    """Refuse a tensor without a dimension of steps, as its last dimension would be treated as one."""
    letters = [form.prediction if what == "prediction" else form.target or () for form in head.forms]
    known = [tuple(_shape(head, form_letters, 0)[1:]) for form_letters in dict.fromkeys(letters)]
    if all(entries.dim() != 2 + len(shape) for shape in known):
        leading = ("B", "T") if batch_first else ("T", "B")
        forms = [(*leading, *shape) for shape in known]
        instead = _remedies.remedy_for_shape(what, entries.shape, forms)
        if what == "target" and head.decodes and entries.dim() == 3:
            instead = instead or _RAW_SCALARS
        if any(entries.dim() == 1 + len(shape) for shape in known):
            instead += f"; a single step is a list: [{what}]"
        raise ValueError(
            f"multi_step_loss: the stacked {what} of head '{name}' must have shape {' or '.join(map(written, forms))} "
            f"for {type(head).__name__}, but it has {written(entries.shape)}{instead}"
        )


def _targets(
    name: str, head: Head, entries: Entries | None, steps: int, batch_first: bool
) -> list[torch.Tensor | None]:
    if head.has_target:
        return list(_entries("target", name, head, entries, batch_first))  # type: ignore[arg-type]
    if entries is not None:
        raise ValueError(
            f"multi_step_loss: {type(head).__name__} has no target, but targets has an entry for head '{name}'; "
            "leave it out"
        )
    return [None] * steps


def _shape(
    head: Head, letters: Sequence[str], batch: int, known: Mapping[str, int] = types.MappingProxyType({})
) -> tuple[int | str, ...]:
    """`[B, ...]` with the sizes of the letters that are known: the bins of a support, the sizes of the prediction."""
    if "S" in letters:
        known = {**known, "S": head.support.num_bins}  # type: ignore[attr-defined]
    return (batch, *(known.get(letter, letter) for letter in letters))


def _check_head(
    name: str,
    head: Head,
    predictions: list[torch.Tensor],
    targets: list[torch.Tensor | None],
    batch: int,
    device: torch.device,
) -> None:
    before: tuple[torch.Tensor, torch.Tensor | None] | None = None
    for step, prediction, target in zip(_steps(head, len(predictions)), predictions, targets, strict=True):
        if before and _is_like(prediction, before[0]) and (target is before[1] or _is_like(target, before[1])):
            continue
        before = prediction, target
        where = _at(name, step, "prediction")
        check_dtype(where, prediction, "")
        check_device(where, prediction, device)
        patterns = [_shape(head, letters, batch) for letters in dict.fromkeys(form.prediction for form in head.forms)]
        if not any(_remedies.fits(prediction.shape, pattern) for pattern in patterns) or (
            prediction.dim() != predictions[0].dim() or prediction.shape[1:] != predictions[0].shape[1:]
        ):
            same = ""
            if step > head.first_step and any(isinstance(size, str) for pattern in patterns for size in pattern):
                same = f" (the same at every step, and step {head.first_step} has {written(predictions[0].shape)})"
            if all(len(pattern) != prediction.dim() for pattern in patterns):
                patterns = [("B", *pattern[1:]) for pattern in patterns]  # B may have been read from this tensor
            raise ValueError(
                f"multi_step_loss: {where} must have shape {' or '.join(map(written, patterns))}{same} for "
                f"{type(head).__name__}, but it has {written(prediction.shape)}"
                + (
                    _remedies.remedy_for_shape("prediction", prediction.shape, patterns)
                    or _remedy_for_bins(head, prediction, batch)
                )
            )
        if target is not None:
            possible = [form for form in head.forms if len(form.prediction) == prediction.dim() - 1]
            _check_target(_at(name, step, "target"), head, possible, prediction, target, device)


def _remedy_for_bins(head: Head, prediction: torch.Tensor, batch: int) -> str:
    """Remedy for logits of another number of bins than the support has."""
    if not head.decodes or prediction.dim() != 2 or prediction.shape[0] != batch:
        return ""
    return _remedies.remedy_for_bins(head.support.num_bins, prediction.shape[1])  # type: ignore[attr-defined]


def _is_like(tensor: torch.Tensor | None, checked: torch.Tensor | None) -> bool:
    """Return True if the checks of a tensor that has passed them hold for this one too."""
    return (
        tensor is not None
        and checked is not None
        and tensor.shape == checked.shape
        and tensor.dtype == checked.dtype
        and tensor.device == checked.device
        and tensor.requires_grad == checked.requires_grad
    )


def _check_target(
    where: str, head: Head, forms: list[Form], prediction: torch.Tensor, target: torch.Tensor, device: torch.device
) -> None:
    takes_classes = any(form.classes for form in forms)
    is_class = takes_classes and not target.is_floating_point()
    if is_class and target.dtype != torch.int64:
        raise TypeError(
            f"multi_step_loss: {where} must be probabilities or torch.int64 classes, but it is {target.dtype}; write "
            ".long() for classes, or visits / visits.sum(-1, keepdim=True) for visit counts"
        )
    if not is_class:
        check_dtype(where, target, " or, for classes, torch.int64" if takes_classes else "")
    check_device(where, target, device)
    shapes = [
        _shape(
            head,
            form.target or (),
            prediction.shape[0],
            dict(zip(form.prediction, prediction.shape[1:], strict=True)),
        )
        for form in forms
        if form.classes == is_class
    ]
    if not any(_remedies.fits(target.shape, shape) for shape in shapes):
        kind = " with torch.int64 classes (probabilities are floating)" if is_class else ""
        instead = _remedies.remedy_for_shape("target", target.shape, shapes)
        if head.decodes and target.shape == prediction.shape:
            instead = _RAW_SCALARS
        if takes_classes and not instead and target.shape == prediction.shape[: target.dim()]:
            instead = (
                "; write visits / visits.sum(-1, keepdim=True) for visit counts" if is_class else "; write .long()"
            )
        raise ValueError(
            f"multi_step_loss: {where} must have shape {' or '.join(map(written, shapes))} for "
            f"{type(head).__name__}{kind}, but it has {written(target.shape)}{instead}"
        )
    if why := _context.why_not_constant(target):
        raise ValueError(f"multi_step_loss: {where} {why[0]}, but targets get no gradient; {why[1]}")
