"""Calls of PyTorch by their names: what they take, what they give, and what leaves or comes in through them."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral, Number
from typing import Any

import torch

from .lines import users_frame

#: Calls whose results do not depend on the values of their operands, or that update parameters.
_NOT_FOLLOWED = {"grad", "_base", "requires_grad_", "backward", "broadcast_tensors"}
_NOT_FOLLOWED_PREFIXES = ("new_", "_foreach_", "_fused_")
#: Calls that read only the form (shape, dtype, device) of their first operand, or of the others.
_FORM_OF_FIRST = {"new", "new_tensor", "new_full", "full_like"}
_FORM_OF_OTHERS = {"type_as", "to", "expand_as", "view_as", "reshape_as"}
#: Calls through which a value leaves PyTorch.
ESCAPES = {
    "item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "__complex__", "__dlpack__",
    "__cuda_array_interface__", "__reduce_ex__", "untyped_storage", "storage", "data_ptr",
}  # fmt: skip
#: Calls that make tensors from Python or NumPy values.
FACTORIES = {
    "tensor", "as_tensor", "asarray", "scalar_tensor", "full", "full_like", "new", "new_tensor", "new_full",
}  # fmt: skip
#: The ones that make tensors from arrays and lists, and other functions that do, but that no mode of PyTorch sees.
FROM_OUTSIDE = {"tensor", "as_tensor", "asarray", "new_tensor"}
FROM_OUTSIDE_UNSEEN = (
    (torch, "from_numpy"), (torch, "frombuffer"), (torch, "from_dlpack"), (torch.utils.dlpack, "from_dlpack"),
)  # fmt: skip
#: Operations that may have a Python or NumPy number as an operand, by their names without underscores at the ends.
ARITHMETIC = {
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv",
    "true_divide", "multiply", "divide", "subtract", "pow", "rpow", "setitem", "fill", "where", "lerp",
}  # fmt: skip


def name_of(func: Any) -> str:
    """Name of a function; a property's own name where it is read, followed by "=" where it is set."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", name) + ("=" if name == "__set__" else "")
    return name


def is_followed(name: str) -> bool:
    """Return False for calls that make no value of their operands."""
    sets_another_property = name.endswith("=") and name != "data="
    skipped = name in _NOT_FOLLOWED or name.startswith(_NOT_FOLLOWED_PREFIXES) or name.endswith("_like")
    return not (sets_another_property or (skipped and name not in FACTORIES))


def operands_of(name: str, args: Any, kwargs: Any) -> Any:
    """Arguments whose values go into the result."""
    if name in _FORM_OF_FIRST:
        return args[1:], kwargs
    return args[:1] if name in _FORM_OF_OTHERS else (args, kwargs)


def written(name: str, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Tensors that a call writes to: the first operand of `add_`, `x[i] = y` and `x.data = y`, and `out=`."""
    if name in ("__setitem__", "data=") or (name.endswith("_") and not name.endswith("__")):
        yield from tensors_in(args[:1])
    yield from tensors_in(kwargs.get("out"))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def is_table(tensor: torch.Tensor) -> bool:
    """Return True for a floating tensor with at least two dimensions of more than one element."""
    return tensor.is_floating_point() and not tensor.is_nested and sum(size > 1 for size in tensor.shape) > 1


def _is_fraction(value: Any) -> bool:
    """Return True for a Python or NumPy number that is not an integer by its type."""
    return isinstance(value, Number) and not isinstance(value, Integral)


def takes_number(name: str, values: list[Any]) -> bool:
    """Return True if an argument is a Python or NumPy number, and not a literal in the calling function."""
    frame = users_frame()
    literals = {value for value in frame.f_code.co_consts if isinstance(value, Number)} if frame else set()
    if name in FACTORIES:
        return not all(isinstance(value, Number) and value in literals for value in values[:1])
    return name.strip("_") in ARITHMETIC and any(value not in literals for value in filter(_is_fraction, values))
