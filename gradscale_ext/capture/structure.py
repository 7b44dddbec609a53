"""Arguments and results of a step: nested structures whose leaves are tensors and constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class Leaf(NamedTuple):
    """A tensor or constant, and its place for messages, such as ``[0]['obs']``."""

    place: str
    value: Any


#: The form of a structure: None for a leaf, else its type, what it is rebuilt from, and the forms of its parts.
Form = Any


def flatten(value: Any, place: str, refuse: Callable[[str, Any], Exception]) -> tuple[Form, list[Leaf]]:
    """The form of a structure and its leaves. Raises the error that `refuse(place, value)` makes for other leaves."""
    leaves: list[Leaf] = []
    return _flatten(value, place, leaves, refuse), leaves


def _flatten(value: Any, place: str, leaves: list[Leaf], refuse: Callable[[str, Any], Exception]) -> Form:
    kind = type(value)
    if isinstance(value, (torch.Tensor, *_CONSTANTS)):
        leaves.append(Leaf(place, value))
        return None
    if kind in (tuple, list):
        parts = [_flatten(part, f"{place}[{index}]", leaves, refuse) for index, part in enumerate(value)]
        return kind, len(parts), *parts
    if kind is dict:
        parts = [_flatten(part, f"{place}[{key!r}]", leaves, refuse) for key, part in value.items()]
        return kind, tuple(value), *parts
    if is_dataclass(value) and not isinstance(value, type) and kind not in pytree.SUPPORTED_NODES:
        names = tuple(field.name for field in fields(value))
        parts = [_flatten(getattr(value, name), f"{place}.{name}", leaves, refuse) for name in names]
        return kind, names, *parts
    node = pytree._get_node_type(value)
    if node not in pytree.SUPPORTED_NODES:
        raise refuse(place, value)
    held, context = pytree.SUPPORTED_NODES[node].flatten_fn(value)
    parts = [_flatten(part, f"{place}[{index}]", leaves, refuse) for index, part in enumerate(held)]
    return kind, _Node(node, context), *parts


class _Node(NamedTuple):
    """A registered pytree node: its key in PyTorch's registry, and what it is rebuilt from besides its parts."""

    key: Any
    context: Any


def build(form: Form, leaves: Iterator[Any]) -> Any:
    """A structure of this form with these leaves."""
    if form is None:
        return next(leaves)
    kind, context, *parts = form
    held = [build(part, leaves) for part in parts]
    if isinstance(context, _Node):
        return pytree.SUPPORTED_NODES[context.key].unflatten_fn(held, context.context)
    if kind is dict:
        return dict(zip(context, held, strict=True))
    if kind in (tuple, list):
        return kind(held)
    made = object.__new__(kind)
    for name, part in zip(context, held, strict=True):
        object.__setattr__(made, name, part)
    return made
