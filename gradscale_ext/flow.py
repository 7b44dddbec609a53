"""Gradient-flow operators: identity forward, changed gradient backward.

All of them return a view of `x`: the same values bit for bit, without a copy. `x` is a tensor, or a structure of
tensors (the states of an LSTM), and the result has the same structure; every tensor has its own gradient, and its own
norms. Structures are tuples, lists and dicts, their subclasses, dataclasses, and nodes that are registered with
`torch.utils._pytree`. A subclass is copied without a call of its constructor, and its items are replaced. A dataclass
is built by its constructor.

They are registered with PyTorch as its own operations are, so that gradients are changed in eager mode, under
`create_graph`, `torch.func` transforms, `torch.compile`, `torch.export`, checkpointing, autocast, DDP and FSDP2 alike.
An operator that cannot give the right gradient raises. An in-place operation on the result, or on `x` afterwards, which
would take the operator out of the graph, raises as well; clone() first. An exported program keeps the operators. Graphs
of its `run_decompositions()`, which is for inference, and of `make_fx` have lost them, without an error, because both
record what runs after autograd; `make_fx(..., pre_dispatch=True)` keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from . import _context, _distributed, _flow_checks, _flow_rules, _remedies, _structures
from ._buffers import ModuleWithNumbers
from ._native import _C
from ._ranks import group_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)

#: A tensor, or a structure of tensors.
Tree = TypeVar("Tree")


def scale_gradient(x: Tree, scale: float | torch.Tensor) -> Tree:
    """Return `x` unchanged; the gradient that flows back through the result is multiplied by `scale`.

    Forward ``y = x``; backward ``dL/dx = scale * dL/dy``; in forward mode the tangent is multiplied by `scale` too, as
    in ``x * scale + stop_gradient(x) * (1 - scale)``, but without rounding the value. This is the function that the
    MuZero pseudocode calls with 0.5 on the hidden state after every recurrent step, and with 1/K on the losses of the
    K unrolled steps (Schrittwieser et al. 2020, appendix G), and `scale_gradient` of Sonnet.

    Args:
        x: floating or complex tensor of any shape, or a structure of them. The result is a view of `x`: no data is
            copied. An in-place operation on either of them afterwards, which would lose the scale, raises.
        scale: a real number, or a real tensor that broadcasts to the shape of `x`, on its device (or a scalar on the
            CPU), which is read on that device without a synchronisation and gets no gradient. 1 passes the gradient
            bit-identical (a tensor's 1 may change the bits of a NaN); 0 gives exact zeros, also where the incoming
            gradient is inf or NaN; a negative scale reverses it. For gradients of at most 32 bits it is rounded to
            float32.

    Returns:
        Tensors equal to `x` bit for bit, with the same shape, strides, dtype and device.

    Raises:
        TypeError: a tensor of `x` is not floating or complex, a leaf is not a tensor, a structure cannot be built
            again, or `scale` is not real.
        ValueError: a tensor `scale` requires grad, does not broadcast to `x`, or is on another device.

    Value and gradient follow the formula in eager mode, `no_grad`, double backward, `torch.func` transforms,
    forward-mode AD, `torch.compile`, `torch.export` and checkpointing. When the incoming gradient's memory belongs to
    nobody else it is scaled in place.

    Related names: gradient scaling, `x * s + x.detach() * (1 - s)`, `GradMultiply` (fairseq).

    >>> x = torch.ones(3, requires_grad=True)
    >>> scale_gradient(x, 0.5).sum().backward()
    >>> x.grad
    tensor([0.5000, 0.5000, 0.5000])
    """
    return _apply("scale_gradient", _C.scale_gradient, x, _flow_checks.real("scale_gradient", "scale", scale))  # type: ignore[no-any-return]


@_remedies.without_parameter("other")
def reverse_gradient(x: Tree, scale: float | torch.Tensor = 1.0, **other: NoReturn) -> Tree:
    """Return `x` unchanged; the gradient that flows back through the result is multiplied by ``-scale``.

    Forward ``y = x``; backward ``dL/dx = -scale * dL/dy``. The gradient reversal layer of domain-adversarial training
    (Ganin et al. 2016, DANN): the features before it learn to confuse the classifier behind it. The rules of
    `scale_gradient` apply, in forward mode and in the other contexts.

    Args:
        x: floating or complex tensor of any shape, or a structure of them.
        scale: lambda, a real number, or a real tensor that broadcasts to the shape of `x`.

    Returns:
        Tensors equal to `x` bit for bit.

    Raises:
        TypeError, ValueError: as `scale_gradient`.

    Related names: gradient reversal layer, GRL, `grad_reverse`, `ReverseLayerF`.

    >>> x = torch.ones(3, requires_grad=True)
    >>> reverse_gradient(x, 0.5).sum().backward()
    >>> x.grad
    tensor([-0.5000, -0.5000, -0.5000])
    """
    if other:
        raise _flow_checks.unknown_keyword("reverse_gradient", other)
    return _apply("reverse_gradient", _C.reverse_gradient, x, _flow_checks.real("reverse_gradient", "scale", scale))  # type: ignore[no-any-return]


def clip_gradient_norm(
    x: Tree,
    max_norm: float | torch.Tensor,
    *,
    batch_dims: int = 0,
    norm_type: float = 2.0,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Tree:
    """Return `x` unchanged; the gradient that flows back through the result is at most `max_norm` long.

    Forward ``y = x``; backward ``dL/dx = g * min(1, max_norm / |g|_p)`` for ``g = dL/dy``. Unlike
    `torch.nn.utils.clip_grad_norm_`, which clips what has arrived at the parameters, this clips in the middle of a
    network: a hidden state, a feature layer, one branch of a loss. With ``batch_dims=1`` every sample of a batch is
    clipped by itself, as in Kaldi's ClipGradientComponent, so that one bad sample does not shrink the others.

    Args:
        x: floating or complex tensor, or a structure of them, each of whose tensors has its own norms: h and c of an
            LSTM's state are clipped separately.
        max_norm: non-negative number, or a real tensor that broadcasts to ``x.shape[:batch_dims]`` (one limit for each
            norm), on the device of `x` (or a scalar on the CPU). It is read there without a synchronisation, and gets
            no gradient. 0 gives zeros, inf never clips. A negative or NaN entry raises if it can be read without
            waiting for a device; otherwise it gives a NaN gradient. Limits are float64 numbers (float32 on a device
            without float64), whatever the dtype of `x` is: only the clipped gradient is rounded to that dtype.
        batch_dims: n: each index of the first n dimensions of `x` has its own norm. 0: one norm for the whole tensor.
            1: one norm per sample. Under `torch.func.vmap`: dimensions of one mapped example.
        norm_type: p of the norm: any number greater than 0, or inf.
        process_group: ranks that each hold a part of the tensor; the norm is over all parts (one all-gather of the
            norms). Every rank must run the same backward.

    Returns:
        Tensors equal to `x` bit for bit.

    Raises:
        TypeError: a tensor of `x` is not floating or complex, a leaf is not a tensor, or an argument has a wrong type.
        ValueError: `max_norm` is negative or NaN, requires grad, or does not broadcast; `batch_dims` is out of range;
            `norm_type` is not greater than 0.
        NotImplementedError: forward-mode differentiation (jvp, jacfwd, hessian, forward_ad).

    A gradient within its limit passes bit-identical; a zero gradient stays zero. No finite gradient is lost to overflow
    or underflow of the norm. NaN and inf follow the formula within their own norm group: NaN makes the group NaN, inf
    makes its finite elements 0. Sums are computed in float64. Devices other than the CPU compute norms over several
    processes, and norms in a compiled graph or a transform, in float32 (float64 for float64 gradients) from elements
    divided by the largest. Second derivatives include the derivative of the coefficient.

    Related names: per-sample gradient clipping, clipping inside of the network.

    >>> x = torch.zeros(2, 2, requires_grad=True)
    >>> clip_gradient_norm(x, 1.0, batch_dims=1).backward(
    ...     torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    ... )
    >>> x.grad
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    group = group_of("clip_gradient_norm", process_group)
    return _clip_gradient_norm(x, max_norm, batch_dims, norm_type, group)  # type: ignore[no-any-return]


def normalize_gradient(
    x: Tree, norm: float | torch.Tensor = 1.0, *, batch_dims: int = 0, norm_type: float = 2.0
) -> Tree:
    """Return `x` unchanged; the gradient that flows back through the result is exactly `norm` long.

    Forward ``y = x``; backward ``dL/dx = norm * g / |g|_p`` for ``g = dL/dy``; zero gradients stay zero. The
    balancer of audiocraft does this to the losses of EnCodec (Defossez et al. 2022): between a network's output and
    each loss, `norm` is the share of that loss in the gradient, whatever the scale of the loss.

    Args:
        x: floating or complex tensor, or a structure of them, each of whose tensors has its own norms.
        norm: length of the gradient, a non-negative number, or a real tensor that broadcasts to
            ``x.shape[:batch_dims]``, read on its device. 0 gives zeros. A float64 number, as `max_norm` of
            `clip_gradient_norm`: a result beyond the range of the gradient's dtype is inf.
        batch_dims: n: each index of the first n dimensions of `x` has its own norm.
        norm_type: p of the norm: any number greater than 0, or inf.

    Returns:
        Tensors equal to `x` bit for bit.

    Raises:
        TypeError, ValueError, NotImplementedError: as `clip_gradient_norm`.

    Related names: gradient normalization, loss balancer (EnCodec).

    >>> x = torch.zeros(2, requires_grad=True)
    >>> normalize_gradient(x, 10.0).backward(torch.tensor([3e-30, 4e-30]))
    >>> x.grad
    tensor([6., 8.])
    """
    limit = _flow_checks.limit("normalize_gradient", "norm", norm)
    dims, p = _flow_checks.groups("normalize_gradient", batch_dims, norm_type)
    return _apply("normalize_gradient", _C.normalize_gradient, x, limit, dims, p)  # type: ignore[no-any-return]


def clip_gradient_value(x: Tree, min: float | torch.Tensor | None, max: float | torch.Tensor | None) -> Tree:
    """Return `x` unchanged; every element of the gradient that flows back through the result is clamped.

    Forward ``y = x``; backward ``dL/dx = clamp(dL/dy, min, max)``, as `clip_gradient` of Sonnet. NaN stays NaN.

    Args:
        x: floating tensor of any shape, or a structure of them.
        min: lower bound, a real number, or a real tensor that broadcasts to the shape of `x`, read on its device. None:
            no bound.
        max: upper bound, likewise. `min` and `max` cannot both be None. Bounds are float64 numbers; the clamped
            gradient is rounded to its dtype.

    Returns:
        Tensors equal to `x` bit for bit.

    Raises:
        TypeError: a tensor of `x` is complex, or not floating; a leaf is not a tensor; a bound is not real.
        ValueError: ``min > max`` or NaN, as far as that can be seen without waiting for a device (elsewhere the
            gradient is NaN); a tensor bound requires grad, or does not broadcast; both bounds are None.
        NotImplementedError: forward-mode differentiation (jvp, jacfwd, hessian, forward_ad).

    The second derivative is the derivative of a clamp: 1 within the bounds and on them, 0 outside.

    Related names: `clip_gradient` (rlax), gradient clamping.

    >>> x = torch.zeros(3, requires_grad=True)
    >>> clip_gradient_value(x, -1.0, None).backward(torch.tensor([-2.0, 0.5, 3.0]))
    >>> x.grad
    tensor([-1.0000,  0.5000,  3.0000])
    """
    low, high = _flow_checks.bounds("clip_gradient_value", min, max)
    return _apply("clip_gradient_value", _C.clip_gradient_value, x, low, high)  # type: ignore[no-any-return]


# ---- Calling --------------------------------------------------------------------------------------------------------


def _apply(
    operator: str, compiled: Callable[..., torch.Tensor | None], x: Any, *arguments: Any
) -> Any:  # of the type of x
    """Apply to the tensor, or to every tensor of a structure, and keep the structure."""
    if type(x) in _PLAIN and _context.is_eager():
        result = compiled(x, *arguments)
        if result is not None:
            return result
    if isinstance(x, torch.Tensor | torch.fx.Proxy):
        if isinstance(x, torch.Tensor):
            _flow_checks.check_kinds(operator, x, arguments)
        if _distributed.is_distributed(x):
            arguments = _flow_rules.distributed(x, arguments)
        return _flow_rules.call(operator, x, *_flow_rules.with_tensors(x, arguments))
    if _structures.is_leaf(x):
        remedy = _remedies.remedy_for_type(x, "x") if hasattr(x, "__array__") else ""
        raise TypeError(
            f"{operator}: x must be a tensor, or a structure of tensors (tuples, lists, dicts, dataclasses, registered "
            f"pytree nodes), but it is of type {type(x).__name__}{remedy}"
        )
    return _structures.mapped(operator, lambda leaf: _apply(operator, compiled, leaf, *arguments), x)


def _clip_gradient_norm(
    x: Any, max_norm: float | torch.Tensor, batch_dims: int, norm_type: float, group: tuple[str, int]
) -> Any:
    limit = _flow_checks.limit("clip_gradient_norm", "max_norm", max_norm)
    dims, p = _flow_checks.groups("clip_gradient_norm", batch_dims, norm_type)
    return _apply("clip_gradient_norm", _C.clip_gradient_norm, x, limit, dims, p, *group)


# ---- Modules --------------------------------------------------------------------------------------------------------


class _Operator(ModuleWithNumbers):
    """Base of the module forms. Numbers are buffers, so that a schedule may change them without recompiling."""

    if TYPE_CHECKING:  # torch.nn.Module says that a call returns Any

        def __call__(self, x: Tree) -> Tree: ...


class ScaleGradient(_Operator):
    """`scale_gradient` as a module; `scale` is a buffer.

    >>> ScaleGradient(0.5)
    ScaleGradient(scale=0.5)
    """

    scale: torch.Tensor

    def __init__(self, scale: float | torch.Tensor) -> None:
        """Keep the scale."""
        super().__init__()
        self._keep(scale=_flow_checks.real("ScaleGradient", "scale", scale))

    def forward(self, x: Tree) -> Tree:
        """Return `x`, its gradient scaled."""
        return scale_gradient(x, self.scale)


class ReverseGradient(_Operator):
    """`reverse_gradient` as a module; `scale` is a buffer.

    >>> ReverseGradient()
    ReverseGradient(scale=1.0)
    """

    scale: torch.Tensor

    @_remedies.without_parameter("other")
    def __init__(self, scale: float | torch.Tensor = 1.0, **other: NoReturn) -> None:
        """Keep the scale."""
        super().__init__()
        if other:
            raise _flow_checks.unknown_keyword("ReverseGradient", other)
        self._keep(scale=_flow_checks.real("ReverseGradient", "scale", scale))

    def forward(self, x: Tree) -> Tree:
        """Return `x`, its gradient reversed."""
        return reverse_gradient(x, self.scale)


class _NormOperator(_Operator):
    """Base of the module forms with norms."""

    def __init__(self, batch_dims: int, norm_type: float) -> None:
        super().__init__()
        self.batch_dims, self.norm_type = _flow_checks.groups(type(self).__name__, batch_dims, norm_type)

    def _shown(self) -> dict[str, Any]:
        return {**self._buffers, "batch_dims": self.batch_dims, "norm_type": self.norm_type}


class ClipGradientNorm(_NormOperator):
    """`clip_gradient_norm` as a module; `max_norm` is a buffer.

    A compiled graph saves the buffer for its backward pass: change it before the forward pass or after the backward
    pass.

    >>> clip = ClipGradientNorm(1.0, batch_dims=1)
    >>> clip
    ClipGradientNorm(max_norm=1.0, batch_dims=1, norm_type=2.0)
    >>> x = torch.zeros(2, 2, requires_grad=True)
    >>> clip(x).backward(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
    >>> x.grad
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """

    max_norm: torch.Tensor

    def __init__(
        self,
        max_norm: float | torch.Tensor,
        *,
        batch_dims: int = 0,
        norm_type: float = 2.0,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """Keep the limit."""
        super().__init__(batch_dims, norm_type)
        self._keep(max_norm=_flow_checks.limit("ClipGradientNorm", "max_norm", max_norm))
        self._group = group_of("ClipGradientNorm", process_group)

    def forward(self, x: Tree) -> Tree:
        """Return `x`, the norms of its gradient clipped."""
        return _clip_gradient_norm(x, self.max_norm, self.batch_dims, self.norm_type, self._group)  # type: ignore[no-any-return]


class NormalizeGradient(_NormOperator):
    """`normalize_gradient` as a module; `norm` is a buffer.

    >>> NormalizeGradient(0.1, batch_dims=1)
    NormalizeGradient(norm=0.1, batch_dims=1, norm_type=2.0)
    """

    norm: torch.Tensor

    def __init__(self, norm: float | torch.Tensor = 1.0, *, batch_dims: int = 0, norm_type: float = 2.0) -> None:
        """Keep the norm."""
        super().__init__(batch_dims, norm_type)
        self._keep(norm=_flow_checks.limit("NormalizeGradient", "norm", norm))

    def forward(self, x: Tree) -> Tree:
        """Return `x`, its gradient of the given length."""
        return normalize_gradient(x, self.norm, batch_dims=self.batch_dims, norm_type=self.norm_type)


class ClipGradientValue(_Operator):
    """`clip_gradient_value` as a module; the bounds are buffers.

    >>> ClipGradientValue(-1.0, None)
    ClipGradientValue(min=-1.0, max=None)
    """

    min: torch.Tensor | None
    max: torch.Tensor | None

    def __init__(self, min: float | torch.Tensor | None, max: float | torch.Tensor | None) -> None:
        """Keep the bounds."""
        super().__init__()
        low, high = _flow_checks.bounds("ClipGradientValue", min, max)
        self._keep(min=None if min is None else low, max=None if max is None else high)

    def forward(self, x: Tree) -> Tree:
        """Return `x`, the elements of its gradient clamped."""
        return clip_gradient_value(x, self.min, self.max)
