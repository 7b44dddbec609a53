"""Value transforms that compress the range of returns before they are learnt as categories."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from . import _numbers

#: Names of the transforms. The kernels identify a transform by its index here.
TRANSFORMS = ("identity", "signed_hyperbolic", "symlog")
LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def _in_float32(x: torch.Tensor) -> torch.Tensor:
    """Widen half types to float32, so that results are rounded once, at the end."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a floating tensor, but it is of type {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"x must be a floating tensor, but its dtype is {x.dtype}")
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _with_infinity(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, slope: float) -> torch.Tensor:
    """Apply a function to the entries that are not infinite; keep ±inf, with `slope` as the derivative."""
    is_infinite = x.isinf()
    infinite = torch.where(is_infinite, x, 0)
    beyond = infinite * slope if slope > 0 else infinite.detach()
    return torch.where(is_infinite, beyond, function(torch.where(is_infinite, 0, x)))


def checked_eps(function: str, eps: float) -> float:
    """The epsilon of the hyperbolic transforms as a float. One beyond float32 would be infinite in its arithmetic."""
    eps = _numbers.real(f"{function}: eps", eps)
    if not 0 <= eps <= LARGEST_FLOAT32:
        raise ValueError(f"{function}: eps must be at least 0 and finite in float32, but it is {eps}")
    return eps


def signed_hyperbolic(x: torch.Tensor, eps: float = 1e-3) -> torch.Tensor:
    """``h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x``, elementwise.

    Args:
        x: floating tensor of any shape.
        eps: weight of the linear term, at least 0 and finite in float32. If positive, it bounds the slope of h⁻¹.

    Returns:
        Tensor of the shape and dtype of `x`, with a relative error of at most 4e-7 in float32 over the whole range. The
        derivative is ``1/2 + eps`` at 0, and `eps`, its limit, at ±inf.

    From Pohlen et al. 2018, "Observe and Look Further". MuZero applies it to rewards and values, with eps=1e-3.

    Related names: value rescaling, `h(x)`, scalar transform (EfficientZero, LightZero).

    >>> signed_hyperbolic(torch.tensor([0.0, 3.0, -3.0]), eps=0.0)
    tensor([ 0.,  1., -1.])
    """

    eps = checked_eps("signed_hyperbolic", eps)

    def h(y: torch.Tensor) -> torch.Tensor:
        # (sqrt(a+1) - 1) / a = 1 / (sqrt(a+1) + 1): no cancellation, and the derivative at 0 exists.
        return y * (1 / ((y.abs() + 1).sqrt() + 1) + eps)

    return _with_infinity(h, _in_float32(x), slope=eps).to(x.dtype)


def signed_parabolic(x: torch.Tensor, eps: float = 1e-3) -> torch.Tensor:
    """Inverse of `signed_hyperbolic`, elementwise.

    With ``u = |x| / (sqrt(1/4 + eps (|x| + 1 + eps)) + 1/2 + eps)``, the result is ``sign(x) u (u + 2)``. This form
    avoids cancellation; the textbook form is off by 7.5e-5 for ``|x| <= 1`` in float32.

    Args:
        x: floating tensor of any shape, in transformed coordinates.
        eps: as in `signed_hyperbolic`.

    Returns:
        Tensor of the shape and dtype of `x`; the derivative at 0 is ``2 / (1 + 2 eps)``, at ±inf ``1 / eps``.

    Related names: inverse value rescaling, inverse scalar transform.

    >>> signed_parabolic(torch.tensor([0.0, 1.0, -1.0]), eps=0.0)
    tensor([ 0.,  3., -3.])
    """

    eps = checked_eps("signed_parabolic", eps)

    def inverse(y: torch.Tensor) -> torch.Tensor:
        u = y if eps == 0 else y / (_root(y.abs(), eps) + 0.5 + eps)
        return u * (u.abs() + 2)

    return _with_infinity(inverse, _in_float32(x), slope=1 / eps if eps > 0 else math.inf).to(x.dtype)


def _root(magnitude: torch.Tensor, eps: float) -> torch.Tensor:
    """``sqrt(1/4 + eps (|x| + 1 + eps))``; for ``eps > 1`` as a product of roots, and of a fourth of the sum, because
    the product and the sum may overflow."""
    if eps <= 1:
        return (0.25 + eps * (magnitude + 1 + eps)).sqrt()
    return 2 * math.sqrt(eps) * (magnitude / 4 + (1 + eps + 0.25 / eps) / 4).sqrt()


def symlog(x: torch.Tensor) -> torch.Tensor:
    """``sign(x) log(1 + |x|)``, elementwise (DreamerV3, Hafner et al. 2023).

    Args:
        x: floating tensor of any shape.

    Returns:
        Tensor of the shape and dtype of `x`; the derivative at 0 is 1.

    >>> symexp(symlog(torch.tensor([-100.0, 0.0, 0.5]))).round(decimals=4)
    tensor([-100.0000,    0.0000,    0.5000])
    """
    y = _in_float32(x)
    magnitude = torch.where(y < 0, -y, y)  # |y| with a derivative of 1 at 0, where the derivative of abs is 0
    result = magnitude.log1p()
    return torch.where(y < 0, -result, result).to(x.dtype)


def symexp(x: torch.Tensor) -> torch.Tensor:
    """``sign(x) (exp(|x|) - 1)``, the inverse of `symlog`, elementwise.

    Args:
        x: floating tensor of any shape.

    Returns:
        Tensor of the shape and dtype of `x`; the derivative at 0 is 1.

    >>> symexp(torch.tensor([0.0])).item()
    0.0
    """
    y = _in_float32(x)
    magnitude = torch.where(y < 0, -y, y)  # as in symlog
    result = magnitude.expm1()
    return torch.where(y < 0, -result, result).to(x.dtype)


def transform(x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
    """Apply the value transform called `name`."""
    if name == "signed_hyperbolic":
        return signed_hyperbolic(x, eps)
    return symlog(x) if name == "symlog" else x


def largest_transformed(name: str, eps: float) -> float:
    """The transform of the largest float32 number, without a tensor."""
    if name == "signed_hyperbolic":
        return LARGEST_FLOAT32 * (1 / (math.sqrt(LARGEST_FLOAT32 + 1) + 1) + eps)
    return math.log1p(LARGEST_FLOAT32) if name == "symlog" else LARGEST_FLOAT32


def inverse_transform(x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
    """Apply the inverse of the value transform called `name`."""
    if name == "signed_hyperbolic":
        return signed_parabolic(x, eps)
    return symexp(x) if name == "symlog" else x
