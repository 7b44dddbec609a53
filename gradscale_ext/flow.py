"""Gradient-flow operators: identity forward, changed gradient backward.

`x` is a tensor, or a tuple, list, dict or namedtuple of them (the states of an LSTM), and comes back in the same
structure.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from . import _library
from ._library import _C

_PLAIN = (torch.Tensor, torch.nn.Parameter)

#: A tensor, or a tuple, list, dict or namedtuple of such.
Tree = TypeVar("Tree")


def scale_gradient(x: Tree, scale: float | torch.Tensor) -> Tree:
    """Return `x` unchanged; the gradient that flows back through the result is multiplied by `scale`.

    Forward ``y = x``; backward ``dL/dx = scale * dL/dy``; in forward mode the tangent is multiplied by `scale` too, as
    in ``x * scale + stop_gradient(x) * (1 - scale)``, but without rounding the value. This is the function that the
    MuZero pseudocode calls with 0.5 on the hidden state after every recurrent step, and with 1/K on the losses of the
    K unrolled steps (Schrittwieser et al. 2020, appendix G).

    Args:
        x: floating or complex tensor of any shape, or a structure of them. The result is a view of it: no data is
            copied. An in-place operation on either of them afterwards, which would lose the scale, raises.
        scale: a real number, or a real tensor that broadcasts to the shape of `x`, on its device (or a scalar on the
            CPU), which is read on that device without a synchronisation and gets no gradient. 1 passes the gradient
            bit-identical; 0 gives exact zeros, also where the incoming gradient is inf or NaN; a negative scale
            reverses it.

    Returns:
        Tensors equal to `x` bit for bit, with the same shape, strides, dtype and device.

    Raises:
        TypeError: a tensor of `x` is not floating or complex, a leaf is no tensor, or `scale` is not real.
        ValueError: a tensor `scale` requires grad, does not broadcast to `x`, or is on another device.

    In every context (eager, `no_grad`, double backward, `torch.func` transforms, forward-mode AD, `torch.compile`,
    `torch.export`, checkpointing) value and gradient are those of the formula. When the incoming gradient's memory
    belongs to nobody else it is scaled in place.

    >>> x = torch.ones(3, requires_grad=True)
    >>> scale_gradient(x, 0.5).sum().backward()
    >>> x.grad
    tensor([0.5000, 0.5000, 0.5000])
    """
    if type(scale) is not float:
        scale = _real("scale_gradient", "scale", scale)
    if type(x) in _PLAIN and not torch.compiler.is_dynamo_compiling():
        return _C.scale_gradient(x, scale)  # type: ignore[arg-type, return-value]
    # The compiler, and subclasses of Tensor, are to see the operator.
    return _map("scale_gradient", lambda tensor: _library.scale_gradient(tensor, scale), x)  # type: ignore[no-any-return]


def reverse_gradient(x: Tree, scale: float | torch.Tensor = 1.0) -> Tree:
    """Return `x` unchanged; the gradient that flows back through the result is multiplied by ``-scale``.

    The gradient reversal layer of domain-adversarial training (Ganin et al. 2016, DANN): the features before it learn
    to confuse the classifier behind it. It is ``scale_gradient(x, -scale)``, whose documentation holds here.

    Args:
        x: floating or complex tensor of any shape, or a structure of them.
        scale: lambda, a real number, or a real tensor that broadcasts to the shape of `x`.

    Returns:
        Tensors equal to `x` bit for bit.

    Raises:
        TypeError, ValueError: as `scale_gradient`.

    >>> x = torch.ones(3, requires_grad=True)
    >>> reverse_gradient(x, 0.5).sum().backward()
    >>> x.grad
    tensor([-0.5000, -0.5000, -0.5000])
    """
    scale = _real("reverse_gradient", "scale", scale)
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise ValueError("reverse_gradient: scale requires grad, but it gets no gradient; detach() it")
    return scale_gradient(x, -scale)


def _real(operator: str, argument: str, value: Any) -> float | torch.Tensor:
    """A number as a float, a tensor as it is."""
    if isinstance(value, torch.Tensor):
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{operator}: {argument} must be real, but it is a tensor of dtype {value.dtype}")
        return value if value.is_floating_point() else value.double()  # unsigned integers cannot be negated
    if isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt):
        return float(value)
    raise TypeError(f"{operator}: {argument} must be a real number or tensor, but it is of type {type(value).__name__}")


def _map(operator: str, function: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    """Apply to every tensor of a structure, and keep the structure."""
    if isinstance(x, torch.Tensor):
        return function(x)
    if isinstance(x, tuple | list):
        items = [_map(operator, function, item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, dict):
        return type(x)((key, _map(operator, function, value)) for key, value in x.items())
    raise TypeError(
        f"{operator}: x must be a tensor, or a tuple, list, dict or namedtuple of tensors, "
        f"but it holds a value of type {type(x).__name__}"
    )


class _Operator(torch.nn.Module):
    """What the module forms share: numbers are buffers, so that a schedule may change them without recompiling."""

    def _keep(self, **numbers_or_tensors: Any) -> None:
        """Register float64 scalars, or the tensors that were given."""
        for name, value in numbers_or_tensors.items():
            value = _real(type(self).__name__, name, value)
            if not isinstance(value, torch.Tensor):
                value = torch.tensor(value, dtype=torch.float64)
            self.register_buffer(name, value)

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> _Operator:
        """Let `.to()` and `.half()` move the buffers, but not round them."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(function, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            moved = getattr(self, name)
            if moved.dtype != value.dtype:
                setattr(self, name, value.to(moved.device))
        return self

    def extra_repr(self) -> str:
        """The arguments."""
        shown = {name: value.item() if value.dim() == 0 else value for name, value in self.named_buffers(recurse=False)}
        return ", ".join(f"{name}={value}" for name, value in shown.items())


class ScaleGradient(_Operator):
    """`scale_gradient` as a module; `scale` is a buffer.

    >>> ScaleGradient(0.5)
    ScaleGradient(scale=0.5)
    """

    scale: torch.Tensor

    def __init__(self, scale: float | torch.Tensor) -> None:
        """Keep the scale."""
        super().__init__()
        self._keep(scale=scale)

    def forward(self, x: Tree) -> Tree:
        """Return `x`, its gradient scaled."""
        return scale_gradient(x, self.scale)


class ReverseGradient(_Operator):
    """`reverse_gradient` as a module; `scale` is a buffer.

    >>> ReverseGradient()
    ReverseGradient(scale=1.0)
    """

    scale: torch.Tensor

    def __init__(self, scale: float | torch.Tensor = 1.0) -> None:
        """Keep the scale."""
        super().__init__()
        self._keep(scale=scale)

    def forward(self, x: Tree) -> Tree:
        """Return `x`, its gradient reversed."""
        return reverse_gradient(x, self.scale)
