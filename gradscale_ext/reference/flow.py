"""The gradient-flow operators: identity forward, and a formula in plain PyTorch backward.

The functions have the arguments of the public operators, except that `x` is one tensor. Other arguments are numbers or
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .. import _context
from .tensors import norm_of

#: Computes the gradient of `x` from the incoming gradient and the tensor arguments.
Rule = Callable[..., torch.Tensor]


def scale_gradient(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """``dL/dx = scale * dL/dy``; exact zeros for a scale of 0.

    Not a torch.autograd.Function, because some transforms drop it under torch.compile. Instead, the result is the value
    plus a zero that carries the gradient. An infinite or NaN element becomes ``x * scale`` if that product has the same
    value. The remaining cases (a scale that is not finite, an infinite element times a negative scale) get a NaN
    gradient.
    """
    scale = _as_tensor(scale, x)
    value, wide, is_finite = x.detach(), _wide(x), x.isfinite()
    # 1 / NaN would have a NaN gradient, also where it is not chosen.
    zero = torch.where(is_finite, wide - wide.detach(), 1 / torch.where(is_finite | x.isnan(), 1, wide))
    is_none, is_usable = scale == 0, is_finite & scale.isfinite()
    scaled = value + (zero * torch.where(scale.isfinite(), scale, 1)).to(x.dtype)
    product = (wide * scale).to(x.dtype)
    is_product = ~is_finite & ((value == product) | value.isnan())
    root = torch.where(is_none | is_usable | is_product, 1, zero * zero).sqrt()  # the root of 0 has a NaN gradient
    result = torch.where(is_product, product, value + root.to(x.dtype))
    return torch.where(is_none, value, torch.where(is_usable, scaled, result))


def reverse_gradient(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """``dL/dx = -scale * dL/dy``."""
    return scale_gradient(x, -scale)


def clip_gradient_norm(
    x: torch.Tensor, max_norm: float | torch.Tensor, *, batch_dims: int = 0, norm_type: float = 2.0
) -> torch.Tensor:
    """``dL/dx = g * min(1, max_norm / |g|_p)`` for ``g = dL/dy``."""

    def clipped(gradient: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        unit, norm, limit = _direction(gradient, limit, batch_dims, norm_type)
        is_within = norm <= limit
        shortened = torch.where(limit == 0, 0, unit * torch.where(is_within, 1, limit))
        return torch.where(is_within, gradient, shortened.to(gradient.dtype))

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
    """Convert a number or a tensor to the widest dtype of the device of `x`; the result is detached."""
    if not isinstance(value, torch.Tensor):
        return _context.as_tensor(value, x.device)
    return value.to(x.device, _context.widest(x.device)).detach()


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Convert to double precision, or to single precision if the device has no float64."""
    wide = _context.widest(x.device)
    return x.to(wide.to_complex() if x.is_complex() else wide)


def _quotient(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Divide by real numbers. PyTorch would convert them to complex numbers, whose squares may underflow."""
    return torch.complex(x.real / divisor, x.imag / divisor) if x.is_complex() else x / divisor


def _direction(
    gradient: torch.Tensor, limit: torch.Tensor, batch_dims: int, p: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient divided by its norms, the norms, and the limits, in shapes that broadcast to the gradient."""
    wide = _wide(gradient)
    flat = (*wide.shape[:batch_dims], math.prod(wide.shape[batch_dims:]))
    shape = (*flat[:-1], *[1] * (gradient.dim() - batch_dims))
    limit = limit.to(wide.real).expand(flat[:-1]).reshape(shape)
    if wide.numel() == 0:
        return wide, torch.zeros_like(limit), limit
    # Powers of elements divided by the largest neither overflow nor underflow. Largest is the largest part of a complex
    # number, whose modulus may overflow. The root of 0 has no derivative, so groups of zeros are replaced by groups of
    # ones.
    sizes = torch.maximum(wide.real.abs(), wide.imag.abs()) if wide.is_complex() else wide.abs()
    largest = sizes.detach().reshape(flat).amax(-1).reshape(shape)
    divisor = torch.where((largest > 0) & largest.isfinite(), largest, 1)
    quotient = _quotient(wide, divisor)
    magnitudes = torch.where(largest == 0, 1, quotient.abs()).reshape(flat)
    relative = norm_of(magnitudes, p, dim=-1).reshape(shape)
    return _quotient(quotient, relative), torch.where(largest == 0, 0, divisor * relative), limit


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
            "gradscale_ext.reference: torch.compile loses the gradient of this operator in a torch.func transform; use "
            "the operator of gradscale_ext"
        )
    return _GradientFlow.apply(x, rule, *[_as_tensor(value, x) for value in arguments])  # type: ignore[no-any-return, no-untyped-call]
