"""The one place that asks in which context of PyTorch a call is made."""

from __future__ import annotations

import functools
import warnings

import torch


def is_eager() -> bool:
    """Whether Python runs for real: False while torch.compile or torch.export traces and must see the operators."""
    return not torch.compiler.is_compiling()


def is_transformed() -> bool:
    """Whether a torch.func transform is at work; also while torch.compile traces one."""
    return bool(torch._C._are_functorch_transforms_active())


# What torch.compiler.assume_constant_result does, but for importing the compiler: a second, and 70 MB.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def varies(number: float) -> bool:
    """Whether torch.compile traces a Python number as a variable: one that has changed since it compiled first."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # with the compiler, and not before

    return not has_static_value(number)


def as_tensor(number: float, device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A scalar tensor of a number, also of one that varies: a product stays in the graph, where torch.tensor(number)
    would make the number a constant, and every other number another graph."""
    dtype = torch.float32 if device.type == "mps" else dtype  # which has no float64
    return torch.ones((), dtype=dtype, device=device) * number


@functools.cache
def say_once(message: str) -> None:
    """Warn, the first time that there is reason to."""
    warnings.warn(message, stacklevel=4)
