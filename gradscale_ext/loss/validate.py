"""The rules for the arguments of a multi-step loss, and the words of their errors."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from .. import _context, _remedies
from ..heads import Form, Head
from .options import Entries, Nonfinite, Options, Reduction, StepNumbers, turned_around, unroll_scale

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """The arguments of one call, checked and brought into one form."""

    heads: Mapping[str, Head]
    predictions: dict[str, list[torch.Tensor]]
    """One tensor `[B, ...]` per step, by head."""
    targets: dict[str, list[torch.Tensor | None]]
    """One tensor per step, by head; None for a head without a target."""
    masks: dict[str, torch.Tensor]
    """A bool tensor `[B, T]` by head; a head without a mask is absent."""
    step_weights: torch.Tensor | None
    """`[T]` or `[B, T]`."""
    step_gradient_scale: torch.Tensor | None
    """`[T]` or `[B, T]`."""
    options: Options
    """The options as they were given."""
    batch: int
    steps: int
    dtype: torch.dtype
    """Type of the loss: float32, or float64 when a prediction is float64."""


def validate(
    heads: Mapping[str, Head], predictions: Mapping[str, Entries], targets: Mapping[str, Entries], options: Options
) -> Call:
    """Raise the error that the arguments deserve, or return them in one form."""
    check_heads(heads)
    check_choice("reduction", options.reduction, get_args(Reduction))
    check_choice("nonfinite", options.nonfinite, get_args(Nonfinite))
    batch_first = options.batch_first
    if not isinstance(batch_first, bool):
        raise TypeError(
            f"multi_step_loss: batch_first must be True or False, but it is of type {type(batch_first).__name__}"
        )
    predictions, targets = as_dict("predictions", predictions), as_dict("targets", targets)
    _check_names("predictions", predictions, heads, heads)
    _check_names("targets", targets, heads, [name for name, head in heads.items() if head.has_target])
    predicted = {
        name: _entries("prediction", name, head, predictions[name], batch_first) for name, head in heads.items()
    }
    wanted = {
        name: _targets(name, head, targets.get(name), len(predicted[name]), batch_first) for name, head in heads.items()
    }
    first = next(iter(predicted.values()))[0]
    if first.dim() == 0:
        raise ValueError(f"multi_step_loss: {_at(next(iter(heads)), 0, 'prediction')} has no batch dimension")
    batch, steps = first.shape[0], _count_steps(heads, predicted, wanted)
    for name, head in heads.items():
        _check_head(name, head, predicted[name], wanted[name], batch, first.device)
    is_double = any(tensor.dtype == torch.float64 for tensors in predicted.values() for tensor in tensors)
    dtype = torch.float64 if is_double else torch.float32
    step_gradient_scale = options.step_gradient_scale
    if isinstance(step_gradient_scale, str):
        check_choice("step_gradient_scale", step_gradient_scale, ("unroll",))
        step_gradient_scale = unroll_scale(steps)
    _check_importance_weights(options.importance_weights, batch, first.device)
    return Call(
        heads,
        predicted,
        wanted,
        _masks(options.mask, heads, batch, steps, batch_first, first.device),
        _step_numbers("step_weights", options.step_weights, batch, steps, batch_first, dtype, first.device),
        _step_numbers("step_gradient_scale", step_gradient_scale, batch, steps, batch_first, dtype, first.device),
        options,
        batch,
        steps,
        dtype,
    )


def _count_steps(
    heads: Mapping[str, Head],
    predicted: Mapping[str, list[torch.Tensor]],
    wanted: Mapping[str, list[torch.Tensor | None]],
) -> int:
    """T, which all heads must agree on."""
    steps, longest = 0, ""
    for name, head in heads.items():
        if head.first_step + len(predicted[name]) > steps:
            steps, longest = head.first_step + len(predicted[name]), name
    for name, head in heads.items():
        for what, entries in (("prediction", predicted[name]), ("target", wanted[name])):
            if len(entries) != steps - head.first_step:
                raise ValueError(
                    f"multi_step_loss: the {what} of head '{name}' must have {steps - head.first_step} entries "
                    f"(first_step = {head.first_step}; T = {steps} steps, those of head '{longest}' with first_step = "
                    f"{heads[longest].first_step} and {len(predicted[longest])} predictions), but it has {len(entries)}"
                    + _remedies.instead_of_count(
                        what, entries, steps - head.first_step, head.first_step, longest, heads[longest].first_step
                    )
                )
    return steps


def is_mapping(value: object) -> bool:
    """Return True if a value has items. A TensorDict is a Mapping; a tensorclass only has the methods of one."""
    return isinstance(value, dict) or (hasattr(value, "items") and not _remedies.is_proxy(value))


def as_dict(argument: str, given: Any) -> dict[str, Any]:
    """Make a dict of a mapping by its items: a TensorDict iterates over something else."""
    if type(given) is dict:
        return given
    if not is_mapping(given):
        raise TypeError(
            f"multi_step_loss: {argument} must be a mapping of head to {'head' if argument == 'heads' else 'tensors'}, "
            f"but it is of type {type(given).__name__}"
            + (_remedies.instead_of(given) if _remedies.is_proxy(given) else f"; {_AS_MAPPING[argument]}")
        )
    return dict(given.items())


_AS_MAPPING = {
    "heads": 'write {"value": TwoHot(...), ...}',
    "predictions": 'write {"value": [...], ...} with a list or tensor for each head',
    "targets": 'write {"value": [...], ...} with a list or tensor for each head',
    "mask": 'write {"value": ..., ...}',
}


def check_heads(heads: Mapping[str, Head]) -> None:
    """Raise when `heads` is not a mapping of names to heads."""
    if not isinstance(heads, Mapping) or not heads:
        raise ValueError(f"multi_step_loss: heads must be a mapping with at least one head, but it is {heads!r}")
    for name, head in heads.items():
        if not isinstance(head, Head) or not head.kind:
            raise TypeError(
                f"multi_step_loss: head '{name}' must be one of the head dataclasses (TwoHot, ...), "
                f"but it is of type {type(head).__name__}"
            )


def _at(head: str, step: int, what: str) -> str:
    return f"the {what} of head '{head}' at step {step}"


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise when `value` is not one of `choices`."""
    if value not in choices:
        wanted = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"multi_step_loss: {argument} must be {wanted}, but it is {value!r}")


def _check_names(argument: str, given: Mapping[str, Entries], heads: Mapping[str, Head], needed: Iterable[str]) -> None:
    missing = [name for name in needed if name not in given]
    unknown = [name for name in given if name not in heads]
    if missing or unknown:
        problems = []
        if missing:
            problems.append(f"has nothing for {', '.join(map(repr, missing))}")
        if unknown:
            problems.append(f"names {', '.join(map(repr, unknown))}, which is no head")
        raise ValueError(f"multi_step_loss: {argument} {' and '.join(problems)}; the heads are {', '.join(heads)}")


def _entries(what: str, name: str, head: Head, entries: Entries, batch_first: bool) -> list[torch.Tensor]:
    """One tensor per step."""
    if isinstance(entries, torch.Tensor):
        _check_kind(f"the stacked {what} of head '{name}'", entries)
        _check_stacked(what, name, head, entries, batch_first)
        entries = list(entries.unbind(1 if batch_first else 0))
    elif not isinstance(entries, list | tuple):
        raise TypeError(
            f"multi_step_loss: the {what} of head '{name}' must be a tensor or a list of one tensor per step, "
            f"but it is of type {type(entries).__name__}{_remedies.instead_of(entries)}"
        )
    for step, entry in enumerate(entries, start=head.first_step):
        where = _at(name, step, what)
        if not isinstance(entry, torch.Tensor):
            raise TypeError(
                f"multi_step_loss: {where} must be a tensor, but it is of type {type(entry).__name__}"
                f"{_remedies.instead_of(entry)}"
            )
        _check_kind(where, entry)
    if not entries:
        raise ValueError(f"multi_step_loss: the {what} of head '{name}' has no entries")
    return list(entries)


def _check_stacked(what: str, name: str, head: Head, entries: torch.Tensor, batch_first: bool) -> None:
    """Refuse a tensor without a dimension of steps, as its last dimension would be treated as one."""
    letters = [form.prediction if what == "prediction" else form.target or () for form in head.forms]
    known = [tuple(_shape(head, of_form, 0)[1:]) for of_form in dict.fromkeys(letters)]
    if all(entries.dim() != 2 + len(shape) for shape in known):
        leading = ("B", "T") if batch_first else ("T", "B")
        forms = " or ".join([_written((*leading, *shape)) for shape in known])
        lacks_steps = any(entries.dim() == 1 + len(shape) for shape in known)
        raise ValueError(
            f"multi_step_loss: the stacked {what} of head '{name}' must have shape {forms} for {type(head).__name__}, "
            f"but it has {_written(entries.shape)}" + (f"; a single step is a list: [{what}]" if lacks_steps else "")
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


def _written(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join([f"{size}" for size in shape]) + "]"


def _check_head(
    name: str,
    head: Head,
    predictions: list[torch.Tensor],
    targets: list[torch.Tensor | None],
    batch: int,
    device: torch.device,
) -> None:
    for step, (prediction, target) in enumerate(zip(predictions, targets, strict=True), start=head.first_step):
        where = _at(name, step, "prediction")
        _check_dtype(where, prediction, "")
        _check_device(where, prediction, device)
        patterns = [_shape(head, letters, batch) for letters in dict.fromkeys(form.prediction for form in head.forms)]
        if not any(_remedies.fits(prediction.shape, pattern) for pattern in patterns) or (
            prediction.dim() != predictions[0].dim() or prediction.shape[1:] != predictions[0].shape[1:]
        ):
            same = ""
            if step > head.first_step and any(isinstance(size, str) for pattern in patterns for size in pattern):
                same = f" (the same at every step, and step {head.first_step} has {_written(predictions[0].shape)})"
            if all(len(pattern) != prediction.dim() for pattern in patterns):
                patterns = [("B", *pattern[1:]) for pattern in patterns]  # B may have been read from this tensor
            raise ValueError(
                f"multi_step_loss: {where} must have shape {' or '.join(map(_written, patterns))}{same} for "
                f"{type(head).__name__}, but it has {_written(prediction.shape)}"
                + _remedies.instead_of_shape("prediction", prediction.shape, patterns)
            )
        if target is not None:
            possible = [form for form in head.forms if len(form.prediction) == prediction.dim() - 1]
            _check_target(_at(name, step, "target"), head, possible, prediction, target, device)


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
        _check_dtype(where, target, " or, for classes, torch.int64" if takes_classes else "")
    _check_device(where, target, device)
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
        instead = _remedies.instead_of_shape("target", target.shape, shapes)
        if head.decodes and target.shape == prediction.shape:
            instead = "; give the scalars: the head encodes them"
        if takes_classes and not instead and target.shape == prediction.shape[: target.dim()]:
            instead = (
                "; write visits / visits.sum(-1, keepdim=True) for visit counts" if is_class else "; write .long()"
            )
        raise ValueError(
            f"multi_step_loss: {where} must have shape {' or '.join(map(_written, shapes))} for "
            f"{type(head).__name__}{kind}, but it has {_written(target.shape)}{instead}"
        )
    if target.requires_grad:
        raise ValueError(f"multi_step_loss: {where} requires grad, but targets get no gradient; detach() it")


def _check_dtype(where: str, tensor: torch.Tensor, others: str) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"multi_step_loss: {where} must be float64, float32, bfloat16 or float16{others}, but it is {tensor.dtype}"
            f"{_remedies.instead_of_dtype(tensor.dtype)}"
        )


def _check_kind(where: str, tensor: torch.Tensor) -> None:
    problem = _remedies.instead_of_kind(tensor)
    if problem is not None:
        raise TypeError(f"multi_step_loss: {where} {problem}")


def _check_device(where: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"multi_step_loss: {where} is on {tensor.device}, but the predictions are on {device}; write "
            f".to('{device}')"
        )


def _check_importance_weights(weights: torch.Tensor | None, batch: int, device: torch.device) -> None:
    if weights is None:
        return
    _check_weights("importance_weights", weights, device)
    if tuple(weights.shape) != (batch,):
        raise ValueError(
            f"multi_step_loss: importance_weights must have shape [B] = [{batch}], but it has {_written(weights.shape)}"
            + (
                _remedies.instead_of_shape("importance_weights", weights.shape, [(batch,)])
                or ("; weights of steps go to step_weights" if weights.dim() == 2 else "")
            )
        )


def _check_weights(argument: str, weights: torch.Tensor, device: torch.device) -> None:
    if not isinstance(weights, torch.Tensor):
        raise TypeError(
            f"multi_step_loss: {argument} must be a tensor, but it is of type {type(weights).__name__}"
            f"{_remedies.instead_of(weights, argument)}"
        )
    _check_kind(argument, weights)
    _check_dtype(argument, weights, "")
    _check_device(argument, weights, device)
    if weights.requires_grad:
        raise ValueError(f"multi_step_loss: {argument} requires grad, but weights get no gradient; detach() it")


def _check_step_shape(
    argument: str, name: str, tensor: torch.Tensor, or_steps: bool, batch: int, steps: int, batch_first: bool
) -> None:
    """Refuse other shapes than `[B, T]` in the caller's order, and `[T]` where that may be."""
    wanted = (batch, steps) if batch_first else (steps, batch)
    shape = tuple(tensor.shape)
    if shape == wanted or (or_steps and shape == (steps,)):
        return
    forms = f"[T] = [{steps}] or " if or_steps else ""
    raise ValueError(
        f"multi_step_loss: {argument} must have shape {forms}{'[B, T]' if batch_first else '[T, B]'} = "
        f"{_written(wanted)}, but it has {_written(shape)}"
        + _remedies.instead_of_step_shape(name, shape, batch, steps, batch_first)
    )


def _step_numbers(
    argument: str,
    numbers: StepNumbers,
    batch: int,
    steps: int,
    batch_first: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """`[T]` or `[B, T]`."""
    if numbers is None:
        return None
    if isinstance(numbers, torch.Tensor):
        _check_weights(argument, numbers, device)
        _check_step_shape(argument, argument, numbers, True, batch, steps, batch_first)
        return turned_around(numbers, batch_first).to(dtype)
    if not isinstance(numbers, Sequence) or isinstance(numbers, str):
        raise TypeError(
            f"multi_step_loss: {argument} must be a tensor or a sequence of {steps} numbers, "
            f"but it is of type {type(numbers).__name__}"
            + (
                f"; write [{numbers}] * {steps}"
                if isinstance(numbers, int | float)
                else _remedies.instead_of(numbers, argument)
            )
        )
    if len(numbers) != steps:
        raise ValueError(
            f"multi_step_loss: {argument} must have {steps} numbers, one per step, but it has {len(numbers)}"
            + ("; T counts the root too" if len(numbers) == steps - 1 else "")
        )
    if any(isinstance(number, torch.Tensor) and number.device.type != "cpu" for number in numbers):
        raise TypeError(
            f"multi_step_loss: {argument} is a sequence of tensors that are not on the CPU, and reading them would "
            f"wait for their device; pass one tensor of {steps} numbers: torch.stack({argument})"
        )
    try:
        values = [float(number) for number in numbers]
    except (TypeError, ValueError, RuntimeError) as error:
        stacked = f"torch.stack({argument}, 1)" if batch_first else f"torch.stack({argument})"
        instead = f"; write {stacked}" if all(isinstance(number, torch.Tensor) for number in numbers) else ""
        raise TypeError(
            f"multi_step_loss: {argument} must be a tensor or a sequence of numbers: {error}{instead}"
        ) from None
    if not _context.is_eager() and any([_context.varies(value) for value in values]):
        return torch.stack([_context.as_tensor(value, device, dtype) for value in values])
    return torch.tensor(values, dtype=dtype, device=device)


def _masks(
    mask: torch.Tensor | Mapping[str, torch.Tensor] | None,
    heads: Mapping[str, Head],
    batch: int,
    steps: int,
    batch_first: bool,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The masks `[B, T]` by head."""
    if mask is None:
        return {}
    of_heads = is_mapping(mask)
    by_head = as_dict("mask", mask) if of_heads else {name: mask for name in heads}
    for name, tensor in by_head.items():
        argument = f"the mask of head '{name}'" if of_heads else "mask"
        if name not in heads:
            raise ValueError(
                f"multi_step_loss: mask names {name!r}, which is no head; the heads are {', '.join(heads)}"
            )
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"multi_step_loss: {argument} must be a bool tensor, but it is of type {type(tensor).__name__}"
                f"{_remedies.instead_of(tensor, 'mask')}"
            )
        _check_kind(argument, tensor)
        if tensor.dtype != torch.bool:
            raise TypeError(
                f"multi_step_loss: {argument} must be a bool tensor, but it is {tensor.dtype}; write mask.bool()"
            )
        _check_step_shape(argument, "mask", tensor, False, batch, steps, batch_first)
        _check_device(argument, tensor, device)
    return {name: turned_around(tensor, batch_first) for name, tensor in by_head.items()}
