"""The gradient-flow operators: identity forward, and a formula in plain PyTorch backward.

The arguments are those of the public operators, for one tensor `x`; numbers and tensors serve alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _context
from .tensors import norm_of

#: The gradient that reaches `x`, from the incoming one and the tensor arguments.
Rule = Callable[..., torch.Tensor]


def scale_gradient(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """``dL/dx = scale * dL/dy``; exact zeros for a scale of 0.

    No function of autograd's, which some transforms drop under torch.compile: the value is that of `x`, without a
    gradient, and the gradient that of a product, whose value is taken away. (Of an infinite element the product itself
    is the result; where their signs differ, for a negative scale, the element has no gradient.)
    """
    value, product = x.detach(), _wide(x) * scale
    difference = (product - product.detach()).to(x.dtype)
    narrow = product.to(x.dtype)
    infinite = torch.where((value == narrow) | value.isnan(), narrow, value)
    return torch.where(_as_tensor(scale, x) == 0, value, torch.where(product.isfinite(), value + difference, infinite))


def reverse_gradient(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """``dL/dx = -scale * dL/dy``."""
    return scale_gradient(x, -scale)


def clip_gradient_norm(
    x: torch.Tensor, max_norm: float | torch.Tensor, *, batch_dims: int = 0, norm_type: float = 2.0
) -> torch.Tensor:
    """``dL/dx = g * min(1, max_norm / |g|_p)`` for ``g = dL/dy``."""

    def clipped(gradient: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        unit, norm, limit = _direction(gradient, limit, batch_dims, norm_type)
        shortened = torch.where(limit == 0, 0, unit * limit)
        return torch.where(norm <= limit, gradient, shortened.to(gradient.dtype))

    return _apply(clipped, x, max_norm)


def normalize_gradient(
    x: torch.Tensor, norm: float | torch.Tensor = 1.0, *, batch_dims: int = 0, norm_type: float = 2.0
) -> torch.Tensor:
    """``dL/dx = norm * g / |g|_p`` for ``g = dL/dy``; zero gradients stay zero."""

    def normalized(gradient: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        unit, norm, length = _direction(gradient, length, batch_dims, norm_type)
        return torch.where((length == 0) | (norm == 0), 0, unit * length).to(gradient.dtype)

    return _apply(normalized, x, norm)


def clip_gradient_value(
    x: torch.Tensor, min: float | torch.Tensor | None, max: float | torch.Tensor | None
) -> torch.Tensor:
    """``dL/dx = clamp(dL/dy, min, max)``."""
    low, high = -torch.inf if min is None else min, torch.inf if max is None else max
    return _apply(lambda gradient, low, high: gradient.clamp(low.to(gradient), high.to(gradient)), x, low, high)


def _as_tensor(value: float | torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return value.to(x.device) if isinstance(value, torch.Tensor) else torch.tensor(value, device=x.device)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Elements in double precision, or single where the device has no other."""
    if x.device.type == "mps":
        return x.to(torch.complex64 if x.is_complex() else torch.float32)
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _direction(
    gradient: torch.Tensor, limit: torch.Tensor, batch_dims: int, p: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient over its norms, the norms, and the limits, in shapes that broadcast to the gradient's."""
    wide = _wide(gradient)
    flat = wide.abs().reshape(*wide.shape[:batch_dims], -1)
    shape = (*flat.shape[:-1], *[1] * (gradient.dim() - batch_dims))
    norm = norm_of(flat, p, dim=-1).reshape(shape)
    limit = limit.to(norm).expand(flat.shape[:-1]).reshape(shape)
    return wide / torch.where(norm == 0, 1, norm), norm, limit


class _GradientFlow(torch.autograd.Function):
    """Identity, with a rule for the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, rule: Rule, *arguments: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.rule, *arguments = inputs
        ctx.save_for_backward(*arguments)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.rule(gradient, *ctx.saved_tensors), None, *[None] * len(ctx.saved_tensors)


def _apply(rule: Rule, x: torch.Tensor, *arguments: float | torch.Tensor) -> torch.Tensor:
    if _context.is_transformed() and not _context.is_eager():
        raise NotImplementedError(
            "gradscale_ext.reference: torch.compile loses such a gradient in a torch.func transform; use the operator "
            "of gradscale_ext"
        )
    return _GradientFlow.apply(x, rule, *[_as_tensor(value, x).detach() for value in arguments])  # type: ignore[no-any-return, no-untyped-call]
