"""Checks of tensors as arguments: errors name the function, the argument, what was expected and what came."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import _distributed, _remedies

#: Floating types that the kernels accept.
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def written(shape: Sequence[object]) -> str:
    """A shape as error messages show it. It may contain letters."""
    return "[" + ", ".join([f"{size}" for size in shape]) + "]"


def result_dtype(*values: object) -> torch.dtype:
    """float64 if an argument is a float64 tensor, else float32."""
    is_double = any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in values)
    return torch.float64 if is_double else torch.float32


def check_tensor(
    function: str,
    name: str,
    value: Any,
    wanted: str = "a tensor",
    shape: str = "",
    dims: Mapping[str, int] | None = None,
) -> None:
    """Refuse what is not a dense tensor. For a number, the error names the `shape`, if it is given. `dims` are the
    dimensions along which a list may have to be stacked, by what they mean."""
    if not isinstance(value, torch.Tensor):
        needs_shape = bool(shape) and isinstance(value, numbers.Number)
        raise TypeError(
            f"{function}: {name} must be {wanted}{f' of shape {shape}' if needs_shape else ''}, but it is of type "
            f"{type(value).__name__}{'' if needs_shape else _remedies.remedy_for_type(value, name, dims)}"
        )
    if fault := _remedies.remedy_for_kind(value):
        raise TypeError(f"{function}: {name} {fault}")


def check_dtype(function: str, name: str, value: torch.Tensor, accepted: bool, wanted: str, remedy: str) -> None:
    """Refuse a dtype that is not accepted. `remedy` follows the name: ``.long()``."""
    if not accepted:
        raise TypeError(f"{function}: {name} must be {wanted}, but its dtype is {value.dtype}; write {name}{remedy}")


def check_float_dtype(function: str, name: str, value: torch.Tensor, or_else: str = "") -> None:
    """Refuse every dtype but float64, float32, bfloat16 and float16."""
    remedy = ".real" if value.is_complex() else f".float(){or_else}"
    check_dtype(function, name, value, value.dtype in FLOATS, "float64, float32, bfloat16 or float16", remedy)


def check_floats(function: str, name: str, value: Any) -> None:
    """Refuse what is not a tensor of float64, float32, bfloat16 or float16."""
    check_tensor(function, name, value)
    check_float_dtype(function, name, value)


def check_bools(function: str, name: str, value: torch.Tensor) -> None:
    """Refuse every dtype but bool."""
    check_dtype(function, name, value, value.dtype == torch.bool, "a bool tensor", ".bool()")


def check_device(function: str, name: str, value: torch.Tensor, other_name: str, device: torch.device) -> None:
    """Refuse a tensor that is not on the device of another one."""
    if value.device != device:
        raise ValueError(
            f"{function}: {name} must be on the device of {other_name}, {device}, but it is on {value.device}; "
            f"write {name}.to('{device}')"
        )


def check_mask(function: str, mask: Any, name: str, masked: torch.Tensor) -> None:
    """Refuse what is not a bool tensor with the device and the shape of `masked`, which is the argument `name`."""
    check_tensor(function, "mask", mask, "a bool tensor")
    check_bools(function, "mask", mask)
    check_device(function, "mask", mask, name, masked.device)
    if mask.shape != masked.shape:
        is_turned = mask.dim() == 2 and mask.shape == masked.shape[::-1]
        raise ValueError(
            f"{function}: mask must have the shape of {name}, {tuple(masked.shape)}, but it has {tuple(mask.shape)}"
            + ("; write mask.T" if is_turned else _remedies.remedy_for_shape("mask", mask.shape, [masked.shape]))
        )


def refuse_group(function: str, group: str, name: str, *values: object) -> None:
    """Refuse a process group next to a DTensor."""
    if group and any(_distributed.is_distributed(value) for value in values):
        raise ValueError(
            f"{function}: process_group cannot be given with a DTensor, whose entries on all ranks count already; "
            f"leave out process_group, or give {name}.to_local()"
        )
