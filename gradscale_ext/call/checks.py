"""Checks of single arguments of a multi-step loss, and their error messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _remedies

#: Floating types that the kernels accept.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_AS_MAPPING = {
    "heads": ("names to heads", 'write {"value": TwoHot(...), ...}'),
    "predictions": ("head names to tensors", 'write {"value": [...], ...} with a list or tensor for each head'),
    "targets": ("head names to tensors", 'write {"value": [...], ...} with a list or tensor for each head'),
    "head_weights": ("head names to numbers or tensors", 'write {"value": ...}'),
    "num_entries": ("head names to numbers or tensors", 'write {"value": ...}'),
}


#: Types of predictions and targets that are passed on unchanged.
_ENTRIES = (list, tuple, dict, torch.Tensor, torch.nn.Parameter)


def is_mapping(value: object) -> bool:
    """Return True if a value has items. A TensorDict is a Mapping; a tensorclass only has the methods of one."""
    return isinstance(value, dict) or (hasattr(value, "items") and not _remedies.is_proxy(value))


def is_sequence(value: object) -> bool:
    """Return True for lists, tuples and ranges, and for other objects with a length and items in one dimension, such as
    deques and NumPy arrays. False for tensors, text and mappings. C++ has the same rule (csrc/loss/python.cpp)."""
    if isinstance(value, list | tuple | range):
        return True
    if isinstance(value, torch.Tensor | str | bytes | bytearray) or is_mapping(value):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "ndim", 1) == 1


def as_dict(argument: str, given: Any) -> dict[str, Any]:
    """Convert a mapping to a dict by its items, because a TensorDict iterates over its first dimension."""
    if type(given) is dict:
        return given
    if not is_mapping(given):
        contents, instead = _AS_MAPPING[argument]
        raise TypeError(
            f"multi_step_loss: {argument} must be a mapping of {contents}, "
            f"but it is of type {type(given).__name__}"
            + (_remedies.remedy_for_type(given) if _remedies.is_proxy(given) else f"; {instead}")
        )
    return dict(given.items())


def as_dicts(argument: str, given: Any) -> dict[str, Any]:
    """The same for a mapping of head names whose values may be mappings of fields."""
    by_head = as_dict(argument, given)
    if all([type(entries) in _ENTRIES for entries in by_head.values()]):
        return by_head
    return {name: dict(entries.items()) if is_mapping(entries) else entries for name, entries in by_head.items()}


def rename(error: Exception, function: str, caller: str) -> None:
    """Let the message of an error begin with the function that the user called."""
    message = error.args[0] if error.args else None
    if isinstance(message, str) and message.startswith(f"{function}: "):
        error.args = (caller + message.removeprefix(function), *error.args[1:])


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise when `value` is not one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        wanted = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"multi_step_loss: {argument} must be {wanted}, but it is {value!r}")


def written(shape: Sequence[int | str]) -> str:
    """A shape as error messages show it."""
    return "[" + ", ".join([f"{size}" for size in shape]) + "]"


def check_dtype(where: str, tensor: torch.Tensor, others: str) -> None:
    """Refuse a dtype that is none of `DTYPES`."""
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"multi_step_loss: {where} must be float64, float32, bfloat16 or float16{others}, but it is {tensor.dtype}"
            f"{_remedies.remedy_for_dtype(tensor.dtype)}"
        )


def check_kind(where: str, tensor: torch.Tensor) -> None:
    """Refuse a kind of tensor that no kernel reads."""
    problem = _remedies.remedy_for_kind(tensor)
    if problem is not None:
        raise TypeError(f"multi_step_loss: {where} {problem}")


def check_device(where: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse a tensor on another device than the predictions."""
    if tensor.device != device:
        raise ValueError(
            f"multi_step_loss: {where} is on {tensor.device}, but the predictions are on {device}; write "
            f".to('{device}')"
        )
