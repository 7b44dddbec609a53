"""Checks of tensors as arguments: errors name the function, the argument, what was expected and what came."""

from __future__ import annotations

from typing import Any

import torch

from . import _distributed, _remedies
from ._trajectories import FLOATS


def check_tensor(function: str, name: str, value: Any, wanted: str = "a tensor") -> None:
    """Refuse what is not a dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{function}: {name} must be {wanted}, but it is of type {type(value).__name__}"
            f"{_remedies.remedy_for_type(value, name)}"
        )
    if fault := _remedies.remedy_for_kind(value):
        raise TypeError(f"{function}: {name} {fault}")


def check_floats(function: str, name: str, value: Any) -> None:
    """Refuse what is not a tensor of float64, float32, bfloat16 or float16."""
    check_tensor(function, name, value)
    if value.dtype not in FLOATS:
        raise TypeError(
            f"{function}: {name} must be float64, float32, bfloat16 or float16, but its dtype is {value.dtype}; write "
            f"{name}{'.real' if value.is_complex() else '.float()'}"
        )


def check_device(function: str, name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Refuse a tensor that is not on the device of another one."""
    if value.device != other.device:
        raise ValueError(
            f"{function}: {name} must be on the device of {other_name}, {other.device}, but it is on {value.device}; "
            f"write {name}.to('{other.device}')"
        )


def check_mask(function: str, mask: Any, name: str, masked: torch.Tensor) -> None:
    """Refuse what is not a bool tensor with the device and the shape of `masked`, which is the argument `name`."""
    check_tensor(function, "mask", mask, "a bool tensor")
    if mask.dtype != torch.bool:
        raise TypeError(f"{function}: mask must be a bool tensor, but its dtype is {mask.dtype}; write mask.bool()")
    check_device(function, "mask", mask, name, masked)
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
