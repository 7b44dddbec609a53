"""The one place that asks in which context of PyTorch a call is made."""

from __future__ import annotations

import functools
import warnings

import torch

from ._library import _C


def is_eager() -> bool:
    """Whether Python runs for real: False while torch.compile or torch.export traces and must see the operators."""
    return not torch.compiler.is_compiling()


def is_ordinary() -> bool:
    """Whether autograd is on, and no transform, tracer or dispatch mode is: what C++ asks before it takes a call."""
    return _C.ordinary_context()


@torch.compiler.assume_constant_result  # type: ignore[misc]
def is_transformed() -> bool:
    """Whether a torch.func transform is at work; also while torch.compile traces one."""
    return bool(torch._C._are_functorch_transforms_active())


@functools.cache
def say_once(message: str) -> None:
    """Warn, the first time that there is reason to."""
    warnings.warn(message, stacklevel=4)
