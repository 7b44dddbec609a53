"""Predictions and targets of a head, tensor by tensor: their fields and steps, and the error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from .. import _remedies
from ..heads import Field, Form, Head
from ..policy_heads import PolicyGradient, PolicyHead
from .checks import check_kind, is_mapping, written
from .options import Entries, FieldEntries, Options

#: The tensors of one prediction or target by field; under "" if it is one tensor, empty if there is no target.
Fields = dict[str, torch.Tensor]
#: Remedy for distributions as targets of a head with a support.
RAW_SCALARS = "; pass raw scalars: the head encodes them"
Value = TypeVar("Value")


class Slot(NamedTuple):
    """A prediction or a target of a head, or one of its fields."""

    name: str
    """Of the head."""
    head: Head
    what: str
    """"prediction" or "target"."""
    fields: tuple[Field, ...]
    """What it may be. All have the same name."""
    options: Options
    entries: Entries
    """As they are given."""
    predicted: Sequence[torch.Tensor]
    """For a target, the tensors of the head's prediction (the first field) by step; empty for a prediction."""

    @property
    def field(self) -> Field:
        """The first of the fields."""
        return self.fields[0]

    @property
    def code(self) -> str:
        """The tensor in code that an error recommends."""
        return self.field.name or self.what

    @property
    def words(self) -> str:
        """The tensor in an error."""
        owner = f"the {self.what} of head '{self.name}'"
        return f"the field '{self.field.name}' in {owner}" if self.field.name else owner

    @property
    def stacked(self) -> str:
        """The tensor of all steps in an error."""
        return f"the stacked {self.words.removeprefix('the ')}"

    def at(self, step: int) -> str:
        """The tensor of an absolute step in an error."""
        return f"{self.words} at step {step}" if self.options.steps and not self.field.shared else self.words

    def shapes(self, batch: int, known: Mapping[str, int]) -> list[tuple[int | str, ...]]:
        """The shapes that the tensor of a step may have, with the sizes of the letters that are known."""
        sizes = {**known, **self.head.sizes}
        unique = dict.fromkeys((field.shape, field.shared) for field in self.fields)
        return [
            tuple([*([] if shared else [batch]), *[sizes.get(letter, letter) for letter in letters]])
            for letters, shared in unique
        ]


def steps_of(head: Head, count: int) -> range:
    """The steps of a head's entries. A range makes `first_step` a constant under torch.compile(dynamic=True)."""
    return range(head.first_step, head.first_step + count)


def as_fields(entries: FieldEntries | None) -> dict[str, Entries]:
    """The fields that are given, as a dict."""
    if entries is None:
        return {}
    if is_mapping(entries):
        return {name: given for name, given in dict(entries.items()).items() if given is not None}  # type: ignore[union-attr]
    return {"": entries}  # type: ignore[dict-item]


def fields_of(form: Form, what: str) -> tuple[Field, ...]:
    """The fields of a form's prediction or target."""
    return form.predictions if what == "prediction" else form.targets


def read_fields(
    name: str,
    head: Head,
    what: str,
    entries: FieldEntries | None,
    forms: Sequence[Form],
    options: Options,
    predicted: Sequence[torch.Tensor] = (),
) -> tuple[dict[str, tuple[Slot, list[torch.Tensor]]], list[Form]]:
    """By field, its slot and one tensor per step (one in all if it is shared). Also the forms that have these fields,
    and tensors with these numbers of dimensions."""
    forms = _with_fields(name, head, what, entries, forms)
    given = as_fields(entries)
    if what == "prediction":
        forms = _with_dimensions(given, forms, options)
    read = {}
    for field in {field.name: None for form in forms for field in fields_of(form, what) if field.name in given}:
        possible = dict.fromkeys(one for form in forms for one in fields_of(form, what) if one.name == field)
        slot = Slot(name, head, what, tuple(possible), options, given[field], predicted)
        read[field] = slot, _tensors(slot)
    return read, forms


def _with_fields(name: str, head: Head, what: str, entries: FieldEntries | None, forms: Sequence[Form]) -> list[Form]:
    """The forms that have the fields that are given, of which there is at least one."""
    owner, kind = f"the {what} of head '{name}'", type(head).__name__
    is_named = is_mapping(entries)
    own = [form for form in forms if any(field.name for field in fields_of(form, what)) == is_named]
    if not own and is_named:
        raise TypeError(
            f"multi_step_loss: {owner} must be a tensor or a list of tensors for {kind}, but it is a mapping of "
            f"{', '.join(map(repr, as_fields(entries))) or 'nothing'}{_remedy_for_continuous(head, as_fields(entries))}"
        )
    if not own:
        raise TypeError(
            f"multi_step_loss: {owner} must be a mapping of fields for {kind}, but it is "
            f"{'missing' if entries is None else f'of type {type(entries).__name__}'}; write "
            f"{_code(name, what, fields_of(forms[0], what))}{_remedy_for_mappings(entries)}"
        )
    given = as_fields(entries)
    fitting = [
        form
        for form in own
        if all(any(field == known.name for known in fields_of(form, what)) for field in given)
        and all(field.name in given for field in fields_of(form, what) if field.required)
    ]
    if fitting:
        return fitting
    fields = fields_of(own[0], what)
    missing = [field.name for field in fields if field.required and field.name not in given]
    unknown = [field for field in given if field not in [known.name for known in fields]]
    problems = [f"has no field {', '.join(map(repr, missing))}"] if missing else []
    if unknown:
        problems.append(f"has the field {', '.join(map(repr, unknown))}, which {kind} does not take here")
    raise ValueError(
        f"multi_step_loss: {owner} {' and '.join(problems)}; write {_code(name, what, fields)}"
        f"{_remedy_for_fields(head, what, unknown, fields)}"
    )


def _code(name: str, what: str, fields: Sequence[Field]) -> str:
    """Code for a mapping of fields."""
    items = ", ".join(f"'{field.name}': ..." for field in fields if field.required)
    return f"{what}s={{'{name}': {{{items}}}}}"


def _remedy_for_continuous(head: Head, given: Mapping[str, Entries]) -> str:
    """Remedy for the prediction of a policy of continuous actions in place of logits."""
    if not isinstance(head, PolicyGradient) or not {"means", "log_stds"}.intersection(given):
        return ""
    return "; for continuous actions write MultiStepLoss.ppo(continuous=True), or GaussianPolicyGradient()"


def _remedy_for_mappings(entries: object) -> str:
    """Remedy for a list with a mapping for each step."""
    if not isinstance(entries, list | tuple) or not entries or not is_mapping(entries[0]):
        return ""
    return ", each a list: {field: [step[field] for step in steps] for field in steps[0]}"


def _remedy_for_fields(head: Head, what: str, unknown: Sequence[str], fields: Sequence[Field]) -> str:
    """Remedy for a field that another form has, or that another argument of the head allows."""
    if "reference_log_probs" in unknown:
        return "; reference_log_probs needs a kl_weight above 0"
    for form in head.forms:
        names = {field.name for field in fields_of(form, what)}
        if fields_of(form, what) != tuple(fields) and unknown and names.issuperset(unknown):
            shapes = " and ".join(written(("B", *field.shape)) for field in form.predictions)
            return (
                f"; {', '.join(map(repr, unknown))} belongs to predictions {shapes}: write steps=False if no tensor "
                "has a dimension of steps"
            )
    return ""


def _with_dimensions(given: Mapping[str, Entries], forms: list[Form], options: Options) -> list[Form]:
    """The forms whose fields have as many dimensions as the tensors, or all forms if there is none. A field is shared
    only if it is one tensor that has no dimension of samples."""

    def fits(field: Field) -> bool:
        entries = given[field.name]
        if isinstance(entries, torch.Tensor):
            return entries.dim() == len(field.shape) + (0 if field.shared else 1 + options.steps)
        is_list = isinstance(entries, list | tuple) and entries and isinstance(entries[0], torch.Tensor)
        return not field.shared and (not is_list or entries[0].dim() == 1 + len(field.shape))

    fitting = [form for form in forms if all([fits(field) for field in form.predictions])]
    return fitting or [form for form in forms if not any([field.shared for field in form.predictions])]


def _tensors(slot: Slot) -> list[torch.Tensor]:
    """One tensor per step; the tensor itself of a shared field, or without steps."""
    entries, options, is_shared = slot.entries, slot.options, slot.field.shared
    if isinstance(entries, torch.Tensor):
        is_stacked = options.steps and not is_shared
        check_kind(slot.stacked if is_stacked else slot.words, entries)
        if is_stacked:
            _check_stacked(slot, entries)
    else:
        _check_list(slot, entries)
    tensors: list[torch.Tensor] = [entries] if is_shared else unbound(entries, options)  # type: ignore[list-item]
    if not tensors:
        raise ValueError(f"multi_step_loss: {slot.words} has no entries")
    return tensors


def _check_list(slot: Slot, entries: Sequence[torch.Tensor]) -> None:
    """Refuse everything except a list or tuple of tensors, and that too without steps."""
    has_steps = slot.options.steps
    if not isinstance(entries, list | tuple):
        raise TypeError(
            f"multi_step_loss: {slot.words} must be a tensor{' or a list of one tensor per step' if has_steps else ''}"
            f", but it is of type {type(entries).__name__}{_remedies.remedy_for_type(entries)}"
        )
    _refuse_logits_by_choice(slot, slot.words, entries, f"torch.cat({slot.code}, -1)")
    if not has_steps:
        raise TypeError(
            f"multi_step_loss: {slot.words} must be one tensor with steps=False, but it is of type "
            f"{type(entries).__name__}; leave out steps=False for a list of one tensor per step"
        )
    for step, entry in zip(steps_of(slot.head, len(entries)), entries, strict=True):
        where = slot.at(step)
        if not isinstance(entry, torch.Tensor):
            _refuse_logits_by_choice(slot, where, entry, f"[torch.cat(step, -1) for step in {slot.code}]")
            raise TypeError(
                f"multi_step_loss: {where} must be a tensor, but it is of type {type(entry).__name__}"
                f"{_remedies.remedy_for_type(entry)}"
            )
        check_kind(where, entry)


def _refuse_logits_by_choice(slot: Slot, where: str, entries: object, instead: str) -> None:
    """Refuse a list with the logits of each choice."""
    choices = slot.head.choices if isinstance(slot.head, PolicyGradient) and slot.what == "prediction" else None
    if not choices or len(choices) == 1 or not isinstance(entries, list | tuple) or len(entries) != len(choices):
        return
    if all(isinstance(x, torch.Tensor) and x.dim() > 1 for x in entries) and [x.shape[-1] for x in entries] == [
        *choices
    ]:
        raise TypeError(
            f"multi_step_loss: {where} must be one tensor with the logits of all choices, but it is of type "
            f"{type(entries).__name__}, with a tensor for each choice; write {instead}"
        )


def _check_stacked(slot: Slot, entries: torch.Tensor) -> None:
    """Refuse a tensor without a dimension of steps, as its last dimension would be treated as one."""
    known = [shape[1:] for shape in slot.shapes(0, {})]
    if all(entries.dim() != 2 + len(shape) for shape in known):
        leading = ("B", "T") if slot.options.batch_first else ("T", "B")
        forms = [(*leading, *shape) for shape in known]
        instead = _remedies.remedy_for_shape(slot.code, entries.shape, forms)
        if slot.what == "target" and slot.head.decodes and entries.dim() == 3:
            instead = instead or RAW_SCALARS
        instead = instead or remedy_for_parts(slot, entries.shape[1:])
        if any(entries.dim() == 1 + len(shape) for shape in known):
            instead += _remedy_without_steps(slot)
        raise ValueError(
            f"multi_step_loss: {slot.stacked} must have shape "
            f"{' or '.join(map(written, forms))} for {type(slot.head).__name__}, but it has {written(entries.shape)}"
            f"{instead}"
        )


def _remedy_without_steps(slot: Slot) -> str:
    """Remedy for a tensor without a dimension of steps."""
    if len(slot.predicted) <= 1 or not slot.field.name:
        return f"; a single step is a list: [{slot.code}], or write steps=False if no tensor has steps"
    return remedy_for_samples(slot)


def remedy_for_samples(slot: Slot) -> str:
    """Remedy for a tensor with a number for each sample in place of one for each step."""
    steps, batch_first = len(slot.predicted), slot.options.batch_first
    if slot.field.name not in ("advantages", "returns") or steps <= 1 or not isinstance(slot.entries, torch.Tensor):
        return ""
    batch = slot.predicted[0].shape[:1].numel()
    by_shape = {
        (batch,): "[:, None]" if batch_first else "",
        (batch, 1): "" if batch_first else ".T",
        (1, batch): ".T" if batch_first else "",
    }
    column = by_shape.get(tuple(slot.entries.shape))
    sizes = (batch, steps) if batch_first else (steps, batch)
    return "" if column is None else f"; write {slot.code}{column}.expand{sizes}"


def remedy_for_parts(slot: Slot, shape: Sequence[int]) -> str:
    """Remedy for a field of a policy that has a number for each part of an action, or for each possible action. The
    shape is the shape of a step."""
    if len(shape) != 2 or not isinstance(slot.head, PolicyHead) or not slot.predicted:
        return ""
    size, width = shape[1], slot.predicted[0].shape[1:]
    choices = slot.head.choices if isinstance(slot.head, PolicyGradient) else None
    is_categorical = isinstance(slot.head, PolicyGradient) and not choices and len(width) == 1
    if slot.field.name == "actions" and is_categorical:
        if size >= width[0]:
            return "; for one-hot actions, write actions.argmax(-1)" if size == width[0] else ""
        names = "A_1, A_2" if size == 2 else f"A_1, ..., A_{size}"
        return f"; for several discrete choices, declare choices=({names})"
    if slot.field.name not in ("log_probs", "reference_log_probs"):
        return ""
    if is_categorical:
        chosen = f"{slot.code}.gather(-1, actions[..., None]).squeeze(-1)"
        return f"; for the log-probability of the action, write {chosen}" if width == (size,) else ""
    parts = (len(choices),) if choices else width
    return f"; sum over the last dimension: write {slot.code}.sum(-1)" if parts in ((), (size,)) else ""


def unbound(entries: Entries, options: Options) -> list[torch.Tensor]:
    """One tensor per step."""
    if not isinstance(entries, torch.Tensor):
        return list(entries)
    return list(entries.unbind(1 if options.batch_first else 0)) if options.steps else [entries]


def by_step(
    fields: Mapping[str, Entries], shared: Sequence[str], options: Options, batch: int, steps: int
) -> list[Fields]:
    """One dict of tensors per step from checked fields. A shared field is expanded to `[B, ...]`."""
    entries = {
        name: [given.expand(batch, *given.shape)] * steps if name in shared else unbound(given, options)  # type: ignore[union-attr]
        for name, given in fields.items()
    }
    return [{name: entries[name][step] for name in fields} for step in range(steps)]
