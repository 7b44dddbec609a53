"""The rules for the arguments of a multi-step loss, and their error messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import _context, _numbers, _remedies
from .._distributed import mapped
from ..heads import Field, Form, Head
from ..policy_heads import PolicyGradient
from .checks import as_dict, check_choice, check_device, check_dtype, written
from .entries import (
    RAW_SCALARS,
    Fields,
    Slot,
    as_fields,
    by_step,
    read_fields,
    remedy_for_parts,
    remedy_for_samples,
    steps_of,
)
from .options import NONFINITES, REDUCTIONS, FieldEntries, Options
from .weights import Rules, Weights


@dataclass(frozen=True)
class Call:
    """The arguments of one call, checked and brought into one form."""

    heads: Mapping[str, Head]
    forms: Mapping[str, Form]
    """By head, the form of its predictions; of several that differ in their targets, the first."""
    predictions: dict[str, list[Fields]]
    """One dict of tensors `[B, ...]` per step, by head."""
    targets: dict[str, list[Fields]]
    """The same; the dicts of a head without a target are empty."""
    weights: Weights
    """Weights and masks, `[B, ...]`."""
    options: Options
    """The options as they were given."""
    batch: int
    steps: int
    dtype: torch.dtype
    """Type of the loss: float32, or float64 when a prediction is float64."""
    device: torch.device

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors."""
        for by_head in (self.predictions, self.targets):
            for entries in by_head.values():
                for fields in entries:
                    yield from fields.values()
        for weights in vars(self.weights).values():
            yield from weights.values()

    def heads_with_gradient(self) -> list[str]:
        """Names of the heads of which a prediction gets a gradient."""
        if not torch.is_grad_enabled():
            return []
        return [
            name
            for name, entries in self.predictions.items()
            if any([tensor.requires_grad for fields in entries for tensor in fields.values()])
        ]

    def has_distribution(self, name: str) -> bool:
        """Return False if predictions of a head are single numbers, such as log-probabilities."""
        return bool(self.forms[name].predictions[0].shape)

    def shared(self, name: str) -> list[str]:
        """The fields of a head's prediction that are one tensor for all samples and steps."""
        return [field.name for field in self.forms[name].predictions if field.shared]


def validate(
    heads: Mapping[str, Head],
    predictions: Mapping[str, FieldEntries],
    targets: Mapping[str, FieldEntries],
    options: Options,
) -> Call:
    """Check the arguments, and return them in one form."""
    check_heads(heads)
    check_choice("reduction", options.reduction, REDUCTIONS)
    check_choice("nonfinite", options.nonfinite, NONFINITES)
    _numbers.check_flag("multi_step_loss: batch_first", options.batch_first)
    _numbers.check_flag("multi_step_loss: steps", options.steps)
    if not options.steps:
        _check_without_steps(heads, options)
    predictions, targets = as_dict("predictions", predictions), as_dict("targets", targets)
    _check_names("predictions", predictions, heads, heads)
    _check_names("targets", targets, heads, [name for name, head in heads.items() if head.has_target])
    if _context.is_eager() and options.steps:
        predicted, wanted, forms, batch, steps = _read_or_other_order(heads, predictions, targets, options)
    else:
        predicted, wanted, forms, batch, steps = _read(heads, predictions, targets, options)
    first = next(iter(predicted.values()))[0]
    device = next(iter(first.values())).device
    is_double = any(
        [tensor.dtype == torch.float64 for entries in predicted.values() for x in entries for tensor in x.values()]
    )
    dtype = torch.float64 if is_double else torch.float32
    weights = Rules(heads, batch, steps, options.batch_first, device, dtype, options.steps).check(options)
    predicted, wanted, weights = all_saveable((predicted, wanted, weights))
    return Call(heads, forms, predicted, wanted, weights, options, batch, steps, dtype, device)


def _check_without_steps(heads: Mapping[str, Head], options: Options) -> None:
    """Refuse what needs steps."""
    for argument in ("step_weights", "step_gradient_scale"):
        if getattr(options, argument) is not None:
            raise ValueError(f"multi_step_loss: {argument} needs steps, but steps=False; leave out {argument}")
    for name, head in heads.items():
        if head.first_step > 0:
            raise ValueError(
                f"multi_step_loss: head '{name}' must have first_step=0 with steps=False, but it has {head.first_step}"
            )


#: By field, its slot and its tensors: one per step, or one in all if the field is shared.
_Read = dict[str, tuple[Slot, list[torch.Tensor]]]
_ByStep = tuple[dict[str, list[Fields]], dict[str, list[Fields]], dict[str, Form], int, int]


def _read(
    heads: Mapping[str, Head],
    predictions: Mapping[str, FieldEntries],
    targets: Mapping[str, FieldEntries],
    options: Options,
) -> _ByStep:
    """Predictions and targets by head, one dict of tensors `[B, ...]` per step; the forms of the heads, B and T."""
    predicted: dict[str, _Read] = {}
    wanted: dict[str, _Read] = {}
    forms: dict[str, list[Form]] = {}
    for name, head in heads.items():
        predicted[name], forms[name] = read_fields(name, head, "prediction", predictions[name], head.forms, options)
    for name, head in heads.items():
        wanted[name] = {}
        if head.has_target:
            first = next(iter(predicted[name].values()))[1]
            wanted[name], forms[name] = read_fields(
                name, head, "target", targets.get(name), forms[name], options, first
            )
        elif targets.get(name) is not None:
            raise ValueError(
                f"multi_step_loss: {type(head).__name__} has no target, but targets has an entry for head '{name}'; "
                "leave it out"
            )
    slot, tensors = next(iter(next(iter(predicted.values())).values()))
    if tensors[0].dim() == 0:
        raise ValueError(f"multi_step_loss: {slot.at(0)} has no batch dimension")
    batch, device = tensors[0].shape[0], tensors[0].device
    steps = _count_steps(heads, predicted, wanted, batch, options)
    for name, head in heads.items():
        sizes = _check_predictions(predicted[name], batch, device)
        _check_targets(wanted[name], sizes, batch, device)
        _check_neutral(name, head, forms[name][0], options.steps)

    def stepped(read: _Read, head: Head) -> list[Fields]:
        shared = [field for field, (slot, _) in read.items() if slot.field.shared]
        fields = {field: tensors[0] if field in shared else tensors for field, (_, tensors) in read.items()}
        return by_step(fields, shared, options, batch, steps - head.first_step)

    return (
        {name: stepped(predicted[name], head) for name, head in heads.items()},
        {name: stepped(wanted[name], head) for name, head in heads.items()},
        {name: fitting[0] for name, fitting in forms.items()},
        batch,
        steps,
    )


def _check_neutral(name: str, head: Head, form: Form, has_steps: bool) -> None:
    """Refuse an argument of a head that has no meaning for the form of its tensors."""
    for argument in form.without:
        neutral = getattr(type(head), argument)
        if getattr(head, argument) != neutral:
            predictions = " and ".join(written(("B", *field.shape)) for field in form.predictions)
            fields = " and ".join(f"'{field.name}'" for field in form.targets)
            raise ValueError(
                f"multi_step_loss: head '{name}' must have {argument}={neutral} for predictions {predictions} with "
                f"targets {fields}, but it is {_numbers.written(getattr(head, argument))}"
                f"; write {argument}={neutral}"
                + ", or steps=False for logits without a dimension of steps"
                * (has_steps and form.predictions[0].shape == ())
            )


def _read_or_other_order(
    heads: Mapping[str, Head],
    predictions: Mapping[str, FieldEntries],
    targets: Mapping[str, FieldEntries],
    options: Options,
) -> _ByStep:
    """The same. If all tensors fit the other order of dimensions, the error says so."""
    try:
        return _read(heads, predictions, targets, options)
    except ValueError as error:
        batch_first = options.batch_first
        try:
            _read(heads, predictions, targets, options._replace(batch_first=not batch_first))
        except (TypeError, ValueError):
            raise error from None
        given, other = ("[B, T]", "[T, B]") if batch_first else ("[T, B]", "[B, T]")
        remedy = f"write batch_first={not batch_first}"
        for what, by_head in (("prediction", predictions), ("target", targets)):
            fields = [field for entries in by_head.values() for field in as_fields(entries).values()]
            if not all(isinstance(field, torch.Tensor) for field in fields):
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
    predicted: Mapping[str, _Read],
    wanted: Mapping[str, _Read],
    batch: int,
    options: Options,
) -> int:
    """T, which all heads must agree on."""
    counts = {name: len(next(iter(read.values()))[1]) for name, read in predicted.items()}
    steps, longest = 0, ""
    for name, head in heads.items():
        if head.first_step + counts[name] > steps:
            steps, longest = head.first_step + counts[name], name
    surplus = {len(tensors) - counts[name] for name, read in wanted.items() for _, tensors in read.values()}
    for name, head in heads.items():
        count = steps - head.first_step
        for slot, tensors in (*predicted[name].values(), *wanted[name].values()):
            if len(tensors) != count and not slot.field.shared:
                _refuse_last_prediction(heads, predicted, wanted)
                raise ValueError(
                    f"multi_step_loss: {slot.words} must have {count} entries "
                    f"(first_step = {head.first_step}; T = {steps} steps, those of head '{longest}' with first_step = "
                    f"{heads[longest].first_step} and {counts[longest]} predictions), but it has {len(tensors)}"
                    + (
                        remedy_for_samples(slot)
                        or _remedies.remedy_for_count(
                            slot.code,
                            tensors,
                            count,
                            batch,
                            head.first_step,
                            longest,
                            heads[longest].first_step,
                            surplus.pop() if len(surplus) == 1 else None,
                            options.batch_first,
                        )
                    )
                )
    return steps


def _refuse_last_prediction(
    heads: Mapping[str, Head], predicted: Mapping[str, _Read], wanted: Mapping[str, _Read]
) -> None:
    """Refuse a prediction with one step more than its targets if all heads agree on T without that step. If all of them
    have one more than targets without fields, K actions gave K + 1 predictions: `_count_steps` says so."""
    long, agreed, is_unroll = [], set(), True
    for name, head in heads.items():
        counts = {(len(tensors), tensors[0].shape[:1]) for _, tensors in wanted[name].values()}
        for slot, tensors in predicted[name].values():
            if slot.field.shared:
                continue
            is_long = head.first_step == 0 and counts == {(len(tensors) - 1, tensors[0].shape[:1])}
            agreed.add(head.first_step + len(tensors) - is_long)
            if is_long:
                long.append(slot)
            is_unroll = is_unroll and is_long and "" in wanted[name]
    if not long or len(agreed) > 1 or is_unroll:
        return
    slot, count = long[0], agreed.pop()
    fields = [f"'{field}'" for field in wanted[slot.name] if field]
    targets = f"field{'s' if len(fields) > 1 else ''} {', '.join(fields)}" if fields else "target"
    is_second = isinstance(slot.entries, torch.Tensor) and slot.options.batch_first
    raise ValueError(
        f"multi_step_loss: the prediction of head '{slot.name}' has {count + 1} steps and its {targets} {count}: write "
        f"{slot.code}{'[:, :-1]' if is_second else '[:-1]'} to drop the last"
    )


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


def _check_names(
    argument: str, given: Mapping[str, FieldEntries], heads: Mapping[str, Head], needed: Iterable[str]
) -> None:
    missing = [name for name in needed if name not in given]
    unknown = [name for name in given if name not in heads]
    if missing or unknown:
        problems = []
        if missing:
            problems.append(f"has nothing for {', '.join(map(repr, missing))}")
        if unknown:
            what = "which is not a head" if len(unknown) == 1 else "which are not heads"
            problems.append(f"names {', '.join(map(repr, unknown))}, {what}")
        raise ValueError(f"multi_step_loss: {argument} {' and '.join(problems)}; the heads are {', '.join(heads)}")


def _check_predictions(read: _Read, batch: int, device: torch.device) -> dict[str, int]:
    """Check the predictions of a head, and return the sizes of the letters in their shapes."""
    sizes: dict[str, int] = {}
    for slot, tensors in read.values():
        before: torch.Tensor | None = None
        for step, prediction in zip(steps_of(slot.head, len(tensors)), tensors, strict=True):
            if before is None or not _is_like(prediction, before):
                _check_prediction(slot, step, prediction, tensors[0], sizes, batch, device)
            before = prediction
        field = next(field for field in slot.fields if len(field.shape) + (not field.shared) == tensors[0].dim())
        sizes.update(zip(field.shape, tensors[0].shape[not field.shared :], strict=True))
    return sizes


def _check_prediction(
    slot: Slot,
    step: int,
    prediction: torch.Tensor,
    first: torch.Tensor,
    sizes: Mapping[str, int],
    batch: int,
    device: torch.device,
) -> None:
    where, head = slot.at(step), slot.head
    check_dtype(where, prediction, "")
    check_device(where, prediction, device)
    patterns = slot.shapes(batch, sizes)
    if any(_remedies.fits(prediction.shape, pattern) for pattern in patterns) and (
        prediction.dim() == first.dim() and prediction.shape[1:] == first.shape[1:]
    ):
        return
    same = ""
    if step > head.first_step and any(isinstance(size, str) for pattern in patterns for size in pattern):
        same = f" (the same at every step, and step {head.first_step} has {written(first.shape)})"
    if all(len(pattern) != prediction.dim() for pattern in patterns) and not slot.field.shared:
        patterns = [("B", *pattern[1:]) for pattern in patterns]  # B may have been read from this tensor
    raise ValueError(
        f"multi_step_loss: {where} must have shape {' or '.join(map(written, patterns))}{same} for "
        f"{type(head).__name__}, but it has {written(prediction.shape)}"
        + (
            _remedy_for_shared(slot, prediction)
            or _remedies.remedy_for_shape(slot.code, prediction.shape, patterns)
            or _remedy_for_bins(head, prediction, batch)
            or _remedy_for_choices(slot, prediction, batch)
        )
    )


def _remedy_for_shared(slot: Slot, prediction: torch.Tensor) -> str:
    """Remedy for one row of a field that all samples may share."""
    fields = [field for form in slot.head.forms for field in form.predictions if field.shared]
    if prediction.dim() != 2 or prediction.shape[0] != 1 or slot.field.name not in [field.name for field in fields]:
        return ""
    return f"; write {slot.field.name}[0] for one [D] of all samples"


def _remedy_for_bins(head: Head, prediction: torch.Tensor, batch: int) -> str:
    """Remedy for logits of another number of bins than the support has."""
    if not head.decodes or prediction.dim() != 2 or prediction.shape[0] != batch:
        return ""
    return _remedies.remedy_for_bins(head.sizes["S"], prediction.shape[1])


def _remedy_for_choices(slot: Slot, prediction: torch.Tensor, batch: int) -> str:
    """Remedy for logits of another number of actions than the choices have together."""
    choices = slot.head.choices if isinstance(slot.head, PolicyGradient) else None
    if not choices or prediction.dim() != 2 or prediction.shape[0] != batch:
        return ""
    return (
        f"; choices={choices} add up to {sum(choices)}, but the logits of head '{slot.name}' have width "
        f"{prediction.shape[1]}"
    )


def _is_like(tensor: torch.Tensor, checked: torch.Tensor) -> bool:
    """Return True if the checks of a tensor that has passed them hold for this one too."""
    return (
        tensor.shape == checked.shape
        and tensor.dtype == checked.dtype
        and tensor.device == checked.device
        and tensor.requires_grad == checked.requires_grad
    )


def _check_targets(read: _Read, sizes: Mapping[str, int], batch: int, device: torch.device) -> None:
    """Check the targets of a head, step by step, because letters that only they have may differ by step."""
    before: list[torch.Tensor] = []
    for i in range(max([len(tensors) for _, tensors in read.values()], default=0)):
        entry = [tensors[i] for _, tensors in read.values()]
        if before and all([_is_like(target, old) for target, old in zip(entry, before, strict=True)]):
            continue
        before = entry
        known = dict(sizes)
        for (slot, _), target in zip(read.values(), entry, strict=True):
            field = _check_target(slot, slot.head.first_step + i, target, known, batch, device)
            known.update(zip(field.shape, target.shape[1:], strict=True))


def _check_target(
    slot: Slot, step: int, target: torch.Tensor, sizes: Mapping[str, int], batch: int, device: torch.device
) -> Field:
    """Check a target, and return the field that it is."""
    where, head = slot.at(step), slot.head
    takes_classes = any(field.classes for field in slot.fields)
    takes_others = not all(field.classes for field in slot.fields)
    is_class = takes_classes and not (takes_others and target.is_floating_point())
    if is_class and target.dtype != torch.int64:
        wanted = "probabilities or torch.int64 classes" if takes_others else "torch.int64"
        remedy = "; write .long() for classes, or visits / visits.sum(-1, keepdim=True) for visit counts"
        raise TypeError(
            f"multi_step_loss: {where} must be {wanted}, but it is {target.dtype}"
            f"{remedy if takes_others else f'; write {slot.code}.long()'}"
        )
    if not is_class:
        check_dtype(where, target, " or, for classes, torch.int64" if takes_classes else "")
    check_device(where, target, device)
    slot = slot._replace(fields=tuple(field for field in slot.fields if field.classes == is_class))
    shapes = slot.shapes(batch, sizes)
    fitting = [field for field in slot.fields if len(field.shape) == target.dim() - 1]
    if not any(_remedies.fits(target.shape, shape) for shape in shapes):
        kind = " with torch.int64 classes (probabilities are floating)" if is_class and takes_others else ""
        instead = _remedies.remedy_for_shape(slot.code, target.shape, shapes) or remedy_for_parts(slot, target.shape)
        if head.decodes and target.shape == (batch, *head.sizes.values()):
            instead = RAW_SCALARS
        if takes_classes and takes_others and not instead and target.shape == (batch, sizes["A"])[: target.dim()]:
            instead = (
                "; write visits / visits.sum(-1, keepdim=True) for visit counts" if is_class else "; write .long()"
            )
        raise ValueError(
            f"multi_step_loss: {where} must have shape {' or '.join(map(written, shapes))} for "
            f"{type(head).__name__}{kind}, but it has {written(target.shape)}{instead}"
        )
    why = _context.why_not_constant(target, slot.field.name or "it")
    if why and (not slot.field.name or torch.is_grad_enabled() or not target.requires_grad):
        raise ValueError(f"multi_step_loss: {where} {why[0]}, but targets get no gradient; {why[1]}")
    return fitting[0]
