"""Calls of the gradient-flow operators through the dispatcher, and their rules for DTensor and vmap."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from . import _context, _distributed
from . import _native as _native  # registers the operators

_NORMS = ("clip_gradient_norm", "normalize_gradient")


def call(operator: str, x: torch.Tensor | torch.fx.Proxy, *arguments: Any) -> torch.Tensor:
    """Call a gradient-flow operator so that compilers, transforms, tracers and tensor subclasses see it.

    The overload is named, because for a scalar tensor PyTorch would choose the overload that accepts numbers.
    """
    packet = getattr(torch.ops.gradscale_ext, operator)
    if operator in _NORMS and isinstance(arguments[2], torch.Tensor):
        return packet.norm_type(x, *arguments)  # type: ignore[no-any-return]
    overload = packet.tensor if isinstance(arguments[0], torch.Tensor) else packet.default
    return overload(x, *arguments)  # type: ignore[no-any-return]


def distributed(x: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replicate plain tensor arguments over the mesh of a DTensor `x`. Scalar tensors can stay plain."""
    return tuple(
        _distributed.replicated(value, x.device_mesh) if isinstance(value, torch.Tensor) and value.dim() else value
        for value in arguments
    )


def with_tensors(x: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace the numbers among the first two arguments by tensors on the device of `x` if one of the two is a tensor,
    because an overload accepts either. Do the same for all numbers that vary under `torch.compile`: a number is a
    constant of the graph, which would be compiled again for the next number. A constant norm_type, the third argument,
    has a shorter formula.
    """
    tensors = [value for value in arguments[:2] if isinstance(value, torch.Tensor)]
    varies = [not _context.is_eager() and type(value) is float and _context.varies(value) for value in arguments]
    if not tensors and not any(varies):
        return arguments
    device = x.device if isinstance(x, torch.Tensor) else tensors[0].device  # a proxy of torch.fx has no device
    return tuple(
        [
            _context.as_tensor(value, device) if varying or (k < 2 and type(value) is float) else value
            for k, (value, varying) in enumerate(zip(arguments, varies, strict=True))
        ]
    )


Dims = tuple[int | None, ...]


def _example_first(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _aligned(value: Any, dim: int | None, dims: int) -> Any:
    """Align the dimensions of a mapped tensor argument with an example that has `dims` dimensions."""
    if dim is None:
        return value
    value = value.movedim(dim, 0)
    return value.reshape(value.shape[0], *[1] * (dims - value.dim() + 1), *value.shape[1:])


def _elementwise_rule(operator: str) -> Any:
    """Make the vmap rule of an operator whose arguments broadcast to `x`."""

    def rule(info: Any, in_dims: Dims, x: torch.Tensor, *values: Any) -> Any:
        x = _example_first(x, in_dims[0], info.batch_size)
        aligned = (_aligned(value, dim, x.dim() - 1) for value, dim in zip(values, in_dims[1:], strict=True))
        return call(operator, x, *aligned), 0

    return rule


def _norm_rule(operator: str) -> Any:
    """Make the vmap rule of an operator with one limit per norm: the mapped dimension becomes a batch dimension."""

    def rule(info: Any, in_dims: Dims, x: torch.Tensor, limit: Any, batch_dims: int, *others: Any) -> Any:
        x = _example_first(x, in_dims[0], info.batch_size)
        return call(operator, x, _aligned(limit, in_dims[1], batch_dims), batch_dims + 1, *others), 0

    return rule


def _copy_rule(info: Any, in_dims: Dims, scalar: torch.Tensor, *others: Any) -> Any:
    """The vmap rule of the operator that copies a scalar to a device."""
    return torch.ops.gradscale_ext.to_device(scalar, *others), in_dims[0]


@torch.library.register_fake("gradscale_ext::to_device")  # type: ignore[misc]
def _copy_shape(
    scalar: torch.Tensor, function: str, argument: str, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    return scalar.new_empty(scalar.shape, dtype=dtype, device=device)


torch.library.register_vmap("gradscale_ext::to_device", _copy_rule)

for _rule, _operators, _overloads in (
    (_elementwise_rule, ("scale_gradient", "reverse_gradient", "clip_gradient_value"), ("", ".tensor")),
    (_norm_rule, _NORMS, ("", ".tensor", ".norm_type")),
):
    for _operator, _overload in itertools.product(_operators, _overloads):
        torch.library.register_vmap(f"gradscale_ext::{_operator}{_overload}", _rule(_operator))
