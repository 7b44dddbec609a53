"""Arguments and results of a step: nested structures whose leaves are tensors and constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .. import _structures

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)

#: The form of a structure, which can be compared: None for a leaf, else its type, and the keys and forms of its parts.
Form = Any
#: Makes the error for a leaf of another type, from its place and value.
Refuse = Callable[[str, Any], Exception]


class Leaf(NamedTuple):
    """A tensor or constant, and its place for messages, such as ``[0]['obs']``."""

    place: str
    value: Any


def flatten(value: Any, refuse: Refuse) -> tuple[Form, list[Leaf]]:
    """The form of a structure, and its leaves."""
    leaves: list[Leaf] = []
    return _form_of(value, "", leaves, refuse), leaves


def _form_of(value: Any, place: str, leaves: list[Leaf], refuse: Refuse) -> Form:
    if isinstance(value, (torch.Tensor, *_CONSTANTS)):
        leaves.append(Leaf(place, value))
        return None
    if _structures.is_leaf(value):
        raise refuse(place, value)
    parts: list[Any] = []

    def look(key: Any, item: Any) -> Any:
        name, shown = (key.name, f".{key.name}") if isinstance(key, dataclasses.Field) else (key, f"[{key!r}]")
        parts.append((name, _form_of(item, f"{place}{shown}", leaves, refuse)))
        return item

    _structures.rebuilt("CapturedStep", look, value)
    return type(value), *parts


def build(like: Any, leaves: Iterable[Any]) -> Any:
    """A structure like another one, with other leaves."""
    left = iter(leaves)
    if isinstance(like, (torch.Tensor, *_CONSTANTS)):
        return next(left)
    return _structures.mapped("CapturedStep", lambda leaf: next(left), like)
