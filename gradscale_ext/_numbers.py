"""Numbers as arguments."""

from __future__ import annotations

from typing import Any


def as_float(argument: str, value: Any) -> float:
    """A number as a float. Integers and fractions may be too large for one: the error names the argument."""
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{argument} must be a number in the range of a float, but it is too large") from None
