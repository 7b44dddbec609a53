"""The one place that asks in which context of PyTorch a call is made."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def is_eager() -> bool:
    """Return False while torch.compile or torch.export traces, which must see the operators."""
    return not torch.compiler.is_compiling()


def is_transformed() -> bool:
    """Return True inside a torch.func transform, also while torch.compile traces one."""
    return bool(torch._C._are_functorch_transforms_active())


# torch.compiler.assume_constant_result does the same, but imports the compiler, which takes a second and 70 MB.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def allows_graph_breaks() -> bool:
    """Return True while torch.compile traces without fullgraph=True."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # not at the top: it imports the compiler

    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:  # torch.export, which traces without Dynamo
        return False
    return not (translator.one_graph or translator.error_on_graph_break)


allows_graph_breaks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_eager_mode(reason: str) -> Callable[[Function], Function]:
    """Decorate a function that torch.compile leaves to eager mode, with a graph break. With fullgraph=True, its error
    contains the reason. `torch.compiler.disable` does the same, but imports the compiler when it decorates."""

    def decorate(function: Function) -> Function:
        disabled: list[Function] = []

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not disabled:
                disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
            return disabled[0](*args, **kwargs)

        call.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
        return call  # type: ignore[return-value]

    return decorate


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
