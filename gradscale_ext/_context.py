"""The one place that asks in which context of PyTorch a call is made."""

from __future__ import annotations

import functools
import warnings

import torch


def is_eager() -> bool:
    """Return False while torch.compile or torch.export traces, which must see the operators."""
    return not torch.compiler.is_compiling()


def is_transformed() -> bool:
    """Return True inside a torch.func transform, also while torch.compile traces one."""
    return bool(torch._C._are_functorch_transforms_active())


# torch.compiler.assume_constant_result does the same, but imports the compiler, which takes a second and 70 MB.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def require_values(function: str) -> None:
    """Raise where tensors have no values that `check=True` could read."""
    if not is_eager() or is_transformed():
        raise NotImplementedError(
            f"{function}: check=True reads values, which do not exist while torch.compile, torch.export or a "
            "torch.func transform traces; call it once outside with check=True, and inside without"
        )


def varies(number: float) -> bool:
    """Return True if torch.compile traces a Python number as a variable because it changed after the first graph."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # not at the top: it imports the compiler

    return not has_static_value(number)


def widest(device: torch.device | None = None) -> torch.dtype:
    """The widest real dtype that a device has; PyTorch's default device, if none is named. MPS has no float64, and some
    Intel GPUs have none."""
    device = device or torch.empty(0).device  # not torch.get_default_device(), which torch.compile does not trace
    if device.type == "mps" or (device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64):
        return torch.float32
    return torch.float64


def as_tensor(number: float, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a scalar tensor of a number, which may vary: a product stays in the graph, while torch.tensor(number) would
    make the number a constant, and compile a graph for every number."""
    return torch.ones((), dtype=dtype or widest(device), device=device) * number


@functools.cache
def say_once(message: str) -> None:
    """Warn, once for each message."""
    warnings.warn(message, stacklevel=4)
