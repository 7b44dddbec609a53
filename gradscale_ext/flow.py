"""Gradient-flow operators: identity forward, changed gradient backward."""

from __future__ import annotations

import numbers

import torch

from . import _C, _library


def scale_gradient(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `x` unchanged; the gradient that flows back through the result is multiplied by `scale`.

    Forward ``y = x``; backward ``dL/dx = scale * dL/dy``; in forward mode the tangent is multiplied by `scale` too, as
    in ``x * scale + stop_gradient(x) * (1 - scale)``, but without rounding the value. This is the function that the
    MuZero pseudocode calls with 0.5 on the hidden state after every recurrent step, and with 1/K on the losses of the
    K unrolled steps (Schrittwieser et al. 2020, appendix G).

    Args:
        x: floating or complex tensor of any shape. The result is a view of it: no data is copied. An in-place
            operation on either of them afterwards, which would lose the scale, raises.
        scale: any real number. 1 passes the gradient bit-identical; 0 gives exact zeros, also where the incoming
            gradient is inf or NaN; a negative number reverses it.

    Returns:
        A tensor equal to `x` bit for bit, with the same shape, strides, dtype and device.

    Raises:
        TypeError: `x` is not a floating or complex tensor, or `scale` is not a real number.

    In every context (eager, `no_grad`, double backward, `torch.func` transforms, forward-mode AD, `torch.compile`,
    `torch.export`, checkpointing) value and gradient are those of the formula. When the incoming gradient's memory
    belongs to nobody else it is scaled in place.

    >>> x = torch.ones(3, requires_grad=True)
    >>> scale_gradient(x, 0.5).sum().backward()
    >>> x.grad
    tensor([0.5000, 0.5000, 0.5000])
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"scale_gradient: x must be a tensor, but it is of type {type(x).__name__}")
    if type(scale) is not float:
        if not isinstance(scale, numbers.Real) and not isinstance(scale, torch.SymFloat | torch.SymInt):
            raise TypeError(f"scale_gradient: scale must be a real number, but it is of type {type(scale).__name__}")
        scale = float(scale)
    if torch.compiler.is_dynamo_compiling():
        return _library.scale_gradient(x, scale)  # type: ignore[no-any-return]
    return _C.scale_gradient(x, scale)
