"""Checks of single arguments of a multi-step loss, and their error messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _remedies

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_AS_MAPPING = {
    "heads": ("names to heads", 'write {"value": TwoHot(...), ...}'),
    "predictions": ("head names to tensors", 'write {"value": [...], ...} with a list or tensor for each head'),
    "targets": ("head names to tensors", 'write {"value": [...], ...} with a list or tensor for each head'),
    "head_weights": ("head names to numbers or tensors", 'write {"value": ...}'),
}


def is_mapping(value: object) -> bool:
    """Return True if a value has items. A TensorDict is a Mapping; a tensorclass only has the methods of one."""
    return isinstance(value, dict) or (hasattr(value, "items") and not _remedies.is_proxy(value))


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
