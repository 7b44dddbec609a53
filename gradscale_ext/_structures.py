"""Structures of tensors: containers, dataclasses and registered pytree nodes, built again with other leaves."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_CONTAINERS = (tuple, list, dict)


def is_leaf(value: Any) -> bool:
    """Return False for tuples, lists, dicts and their subclasses, dataclasses, and nodes that are registered with
    `torch.utils._pytree`."""
    if isinstance(value, _CONTAINERS) or type(value) in pytree.SUPPORTED_NODES:
        return False
    if value is None or isinstance(value, torch.Tensor):  # Dynamo of PyTorch 2.11 does not trace is_dataclass(None)
        return True
    return not dataclasses.is_dataclass(value) or isinstance(value, type)


def mapped(owner: str, function: Callable[[Any], Any], x: Any) -> Any:
    """Make the same structure of ``function(leaf)`` for each leaf of a structure.

    Errors begin with `owner`. If the function calls its argument `x` in an error, the entry is named, as ``x['h'][0]``.
    """

    def change(key: Any, item: Any) -> Any:
        try:
            is_tensor = isinstance(item, torch.Tensor)
            return function(item) if is_tensor or is_leaf(item) else mapped(owner, function, item)
        except (TypeError, ValueError, NotImplementedError) as error:
            entry = f".{key.name}" if isinstance(key, dataclasses.Field) else f"[{key!r}]"
            raise renamed(error, x="x" + entry) from None

    return rebuilt(owner, change, x)


def renamed(error: Exception, **names: str) -> Exception:
    """Make the same error with other names of arguments in its message."""
    words = rf"(?<!')\b({'|'.join(names)})\b"
    return type(error)(re.sub(words, lambda match: names[match[0]], str(error)))


def rebuilt(owner: str, change: Callable[[Any, Any], Any], x: Any) -> Any:
    """Make the same structure of ``change(key, item)`` for each item of a structure; keys of dataclasses are fields."""
    kind = type(x)
    if kind is tuple or kind is list or kind is torch.Size:
        return kind([change(k, item) for k, item in enumerate(x)])
    if kind is dict:
        return {key: change(key, item) for key, item in x.items()}
    if kind in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[kind]
        items, context = node.flatten_fn(x)
        keys = list(x) if isinstance(x, dict) else range(len(items))
        return node.unflatten_fn([change(key, item) for key, item in zip(keys, items, strict=True)], context)
    if isinstance(x, tuple) and hasattr(x, "_fields") and not kind.__dictoffset__:  # it has no attributes
        return tuple.__new__(kind, [change(k, item) for k, item in enumerate(x)])
    if isinstance(x, dict):
        items = list(x.items())
    elif isinstance(x, tuple | list):
        items = list(enumerate(x))
    else:
        items = [(field, getattr(x, field.name)) for field in dataclasses.fields(x)]
    changed = [change(key, item) for key, item in items]
    try:
        if isinstance(x, _CONTAINERS):
            return _subclass_instance(x, items, changed)
        return dataclasses.replace(x, **{field.name: value for (field, _), value in zip(items, changed, strict=True)})
    except Exception as error:
        raise TypeError(
            f"{owner}: x is of type {kind.__name__}, which cannot be built again with other items ({error}); register "
            "the type with torch.utils._pytree.register_pytree_node"
        ) from error


def _subclass_instance(x: Any, items: list[tuple[Any, Any]], changed: list[Any]) -> Any:
    """Copy an instance of a subclass of tuple, list or dict without a call of its constructor, and replace its items,
    also where they are attributes."""
    kind: Any = type(x)
    if any([getattr(base, "__slots__", ()) for base in kind.__mro__]):
        raise TypeError("attributes in __slots__ are not copied")
    result = tuple.__new__(kind, changed) if isinstance(x, tuple) else kind.__new__(kind)
    attributes = getattr(x, "__dict__", None)
    if attributes is x:
        result.__dict__ = result
    elif attributes:
        pairs = [(item, value) for (_, item), value in zip(items, changed, strict=True)]
        result.__dict__.update(
            {
                name: next((value for item, value in pairs if item is attribute), attribute)
                for name, attribute in attributes.items()
            }
        )
    if isinstance(x, defaultdict):
        result.default_factory = x.default_factory
    if isinstance(x, list):
        result[:] = changed
    if isinstance(x, dict):
        for (key, _), value in zip(items, changed, strict=True):
            result[key] = value
    return result
