"""Checks of the arguments of the gradient-flow operators."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from . import _distributed, _numbers, _remedies

_ARGUMENTS = {
    "scale_gradient": ("scale",),
    "reverse_gradient": ("scale",),
    "clip_gradient_norm": ("max_norm",),
    "normalize_gradient": ("norm",),
    "clip_gradient_value": ("min", "max"),
}


def check_kinds(operator: str, x: torch.Tensor, arguments: tuple[Any, ...]) -> None:
    """Raise TypeError for kinds of tensors that the operators do not support."""
    values = zip(_ARGUMENTS[operator], arguments, strict=False)
    for name, value in (("x", x), *[(name, value) for name, value in values if isinstance(value, torch.Tensor)]):
        problem = _remedies.remedy_for_kind(value, has_mask=False)
        if problem is not None:
            raise TypeError(f"{operator}: {name} {problem}")
        if _distributed.is_distributed(value) and not _distributed.is_distributed(x):
            raise TypeError(
                f"{operator}: {name} must be a number or a plain tensor for a plain tensor x, but it is a DTensor; "
                f"write {name}.full_tensor()"
            )


def unknown_keyword(operator: str, given: dict[str, NoReturn]) -> TypeError:
    """The error for `alpha`, `lambda_` or `coeff`, as other packages call the scale of a reversed gradient."""
    return TypeError(
        f"{operator}: there is no argument {next(iter(given))!r}; the factor of the gradient is called scale: write "
        "scale=..."
    )


def real(operator: str, argument: str, value: Any) -> float | torch.Tensor:
    """A number as a float, a tensor as it is."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        _numbers.check_real(f"{operator}: {argument}", value)
        return value
    can_be_tensor = hasattr(value, "__array__") and argument != "norm_type"
    remedy = _remedies.remedy_for_type(value, argument) if can_be_tensor else ""
    return _numbers.real(f"{operator}: {argument}", value, "a real number or tensor", remedy)


def limit(operator: str, argument: str, value: Any) -> float | torch.Tensor:
    """Check a number that must not be negative. C++ checks a tensor, if it can read it without waiting."""
    value = real(operator, argument, value)
    if not isinstance(value, torch.Tensor) and not value >= 0:
        raise ValueError(f"{operator}: {argument} must not be negative or NaN, but it is {value}")
    return value  # type: ignore[no-any-return]


def groups(operator: str, batch_dims: Any, norm_type: Any) -> tuple[int, float]:
    batch_dims = int(_numbers.integer(f"{operator}: batch_dims", batch_dims, 0))
    p = real(operator, "norm_type", norm_type)
    if isinstance(p, torch.Tensor):
        raise TypeError(f"{operator}: norm_type must be a number, but it is a tensor")
    if not p > 0:
        raise ValueError(f"{operator}: norm_type must be greater than 0, but it is {p}")
    return batch_dims, p


def bounds(operator: str, min: Any, max: Any) -> tuple[float | torch.Tensor, float | torch.Tensor]:
    """Numbers or tensors; infinity where there is no bound."""
    if min is None and max is None:
        raise ValueError(f"{operator}: min and max are both None; at least one bound is needed")
    low = -math.inf if min is None else real(operator, "min", min)
    high = math.inf if max is None else real(operator, "max", max)
    if not isinstance(low, torch.Tensor) and not isinstance(high, torch.Tensor) and not low <= high:
        raise ValueError(
            f"{operator}: min must not be greater than max, and neither may be NaN, but they are {low} and {high}"
        )
    return low, high
