"""Numbers as arguments."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from . import _context


def as_float(argument: str, value: Any) -> float:
    """A number as a float. Integers and fractions may be too large for a float: the error names the argument."""
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{argument} must be a number in the range of a float, but it is too large") from None


def real(argument: str, value: Any, wanted: str = "a number", remedy: str = "") -> float:
    """A real number of Python or NumPy as a float; `wanted` describes the expected type in the error."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{argument} must be {wanted}, but it is of type {type(value).__name__}{remedy}")
    return as_float(argument, value)


def integer(argument: str, value: Any, least: int, most: int = 2**63 - 1) -> Any:
    """Check an integer of Python, NumPy or a tracer. `most` is a power of 2, minus 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral | torch.SymInt):
        raise TypeError(f"{argument} must be an integer of at least {least}, but it is of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{argument} must be an integer of at least {least}, but it is {value}")
    if value > most:
        raise ValueError(
            f"{argument} must be an integer from {least} to 2**{most.bit_length()} - 1, but it is too large"
        )
    return value


def check_real(argument: str, value: torch.Tensor) -> None:
    """Refuse a tensor of complex numbers or flags."""
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{argument} must be real, but it is a tensor of dtype {value.dtype}")


def check_scalar(argument: str, value: torch.Tensor) -> None:
    """Refuse a tensor that is not real, or that has dimensions."""
    check_real(argument, value)
    if value.is_nested:
        raise TypeError(f"{argument} must be a real number or a tensor without dimensions, but it is a nested tensor")
    if value.dim() > 0:
        raise ValueError(
            f"{argument} must be a real number or a tensor without dimensions, but it has shape {list(value.shape)}"
        )


def written(value: Any) -> str:
    """A value as error messages show it. torch.compile cannot write a number that varies."""
    if not _context.is_eager() and isinstance(value, float) and _context.varies(value):
        return "a number that varies under torch.compile and is not"
    return repr(value)


def real_field(owner: str, frozen: object, field: str) -> float:
    """Return the number in a field of a frozen dataclass as a float.

    The field keeps a Python float or an int in the range of int64. Any other number (NumPy's, a fraction, a larger
    integer) is replaced by a float in the field, because a tensor cannot be multiplied by some of these numbers.
    """
    value = getattr(frozen, field)
    number = real(f"{owner}: {field}", value)
    if type(value) is not float and not (type(value) is int and -(2**63) <= value < 2**63):
        object.__setattr__(frozen, field, number)
    return number


def integer_field(owner: str, frozen: object, field: str, least: int) -> None:
    """Check an integer in a field of a frozen dataclass, which the kernels read as an int32."""
    value = getattr(frozen, field)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{owner}: {field} must be an integer of at least {least}, but it is {value!r}")
    if value > 2**31 - 1:
        raise ValueError(f"{owner}: {field} must be an integer from {least} to 2**31 - 1, but it is too large")
    if type(value) is not int:
        object.__setattr__(frozen, field, int(value))


def check_flag(argument: str, value: Any) -> None:
    """Refuse everything except a Python bool. The error names the module of a type: NumPy has a `bool` too."""
    if not isinstance(value, bool):
        kind = type(value)
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        raise TypeError(f"{argument} must be True or False, but it is of type {name}")
