"""The five gradient-flow operators: every layout, dtype, form of the arguments and context, against the formulas."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import gradscale_ext as gs

from . import formulas
from .budget import fuzz
from .strategies import (
    COMPLEX,
    LAYOUTS,
    REAL,
    REPEATING,
    SEEDS,
    SHAPES,
    Described,
    Numbers,
    Watched,
    bits,
    check_close,
    eps_of,
    laid_out,
    numbers,
    precise,
    product,
    random,
    smallest_normal_of,
    smallest_of,
)

Tensor = torch.Tensor
Array = np.ndarray
INF = math.inf

ROUNDED = 4.0
"""Allowed error in units in the last place: an operator computes its coefficient in a few steps, which are rounded to
the dtype in which it multiplies (float32 for half types)."""
SECOND = 64.0
"""The same for a second derivative, whose sums over a group are computed in the dtype itself."""
SUMMED = 2.0**-52
"""Error of a norm per element: norms are sums in float64, and each addition is rounded."""
POWERS = 512 * 2.0**-52
"""Relative error of powers x^p in float64, whose exponents p log2(x) are up to about 2,000."""
UNDERFLOW = 2.0**-20
"""Error as a share of the smallest normal number: subnormal numbers lose digits, also as intermediate results."""
CHAINED = 3 * ROUNDED
"""`ROUNDED` for two operators in a row: the rounding of the first changes the norm of the second."""
MARGIN = 1e-3
"""A norm within this relative distance of its limit may be treated as above or below it."""

NORMS = ("clip_gradient_norm", "normalize_gradient")
OPERATORS = ("scale_gradient", "reverse_gradient", *NORMS, "clip_gradient_value")
MODULES = {
    "scale_gradient": gs.ScaleGradient,
    "reverse_gradient": gs.ReverseGradient,
    "clip_gradient_norm": gs.ClipGradientNorm,
    "normalize_gradient": gs.NormalizeGradient,
    "clip_gradient_value": gs.ClipGradientValue,
}


# ---- Operators ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """A limit, scale or bound: a number, or a tensor that broadcasts to the required shape."""

    values: tuple[float, ...] = (0.5,)
    """Values to draw elements from; limits and bounds are in units of the gradient's size."""
    dropped: int | None = None
    """Number of leading dimensions that the tensor lacks; None for a number."""
    ones: int = 0
    """Bit i is set if dimension i has size 1."""
    dtype: torch.dtype = torch.float64
    layout: str = "contiguous"

    def build(self, shape: tuple[int, ...], unit: float, seed: int) -> float | Tensor:
        """The argument for an operator."""
        if self.dropped is None:
            return self.values[0] * unit
        shape = tuple(
            1 if self.ones >> i & 1 else size for i, size in enumerate(shape[min(self.dropped, len(shape)) :])
        )
        drawn = torch.tensor(random("argument", seed).choice(self.values, shape) * unit, dtype=torch.float64)
        narrow = drawn.to(self.dtype)
        exact = narrow if torch.equal(narrow.isinf(), drawn.isinf()) else drawn
        return laid_out(exact.reshape(shape), self.layout)


def numbers_of(argument: float | Tensor | None) -> Array:
    return precise(argument) if isinstance(argument, Tensor) else np.array(argument, dtype=np.float64)


@dataclass(frozen=True)
class Operator:
    """One of the five operators, and the form of its call."""

    name: str
    arguments: tuple[Argument | None, ...]
    batch_dims: int = 0
    norm_type: float = 2.0
    module: bool = False
    structure: str = "tensor"

    def inputs(self, shape: tuple[int, ...], unit: float, seed: int) -> list[float | Tensor | None]:
        """Limits, scales or bounds for a tensor of this shape."""
        has_unit = self.name not in ("scale_gradient", "reverse_gradient")
        shape = shape[: self.batch_dims] if self.name in NORMS else shape
        return [
            None if argument is None else argument.build(shape, unit if has_unit else 1.0, seed + 100 * index)
            for index, argument in enumerate(self.arguments)
        ]

    def options(self, dim: int) -> dict[str, Any]:
        return {"batch_dims": min(self.batch_dims, dim), "norm_type": self.norm_type} if self.name in NORMS else {}

    def function(self, dim: int) -> Callable[..., Tensor]:
        """A function of a tensor with this many dimensions and the inputs."""
        options, name = self.options(dim), self.name

        def call(x: Any, *inputs: Any) -> Any:
            if self.module:
                return MODULES[name](*inputs, **options)(x)
            return getattr(gs, name)(x, *inputs, **options)

        if self.structure == "tuple":
            return lambda x, *inputs: call((x, x), *inputs)[1]
        return (lambda x, *inputs: call({"a": [x]}, *inputs)["a"][0]) if self.structure == "dict" else call

    def formula(self, g: Array, inputs: list[float | Tensor | None]) -> Array:
        values = [numbers_of(argument) for argument in inputs]
        if self.name == "clip_gradient_value":
            low, high = (
                np.array(default) if argument is None else numbers_of(argument)
                for argument, default in zip(inputs, (-INF, INF), strict=True)
            )
            return formulas.clamped(g, low, high)
        if self.name in NORMS:
            dims = min(self.batch_dims, g.ndim)
            return formulas.resized(g, values[0], dims, self.norm_type, self.name == "clip_gradient_norm")[0]
        return formulas.scaled(g, values[0] if self.name == "scale_gradient" else -values[0])

    def blur(self, g: Tensor) -> Array | float:
        """Relative error of norms: the moduli of complex numbers close to 0 are multiples of the smallest number."""
        if self.name not in NORMS or not g.is_complex() or not g.numel():
            return 0.0
        dims = min(self.batch_dims, g.dim())
        sizes = np.abs(precise(g)).reshape(*g.shape[:dims], -1)
        largest = np.maximum(np.nan_to_num(sizes).max(-1), 1e-323)
        blur = np.minimum(sizes.shape[-1] * smallest_of(g.dtype) / largest, 0.5)
        return np.asarray(blur).reshape((*blur.shape, *[1] * (g.dim() - dims)))


def argument_of(*choices: float) -> st.SearchStrategy[Argument]:
    some = [(value,) for value in choices] + [choices, choices[:2], choices[1:3], choices[2:]]
    return product(
        Argument,
        values=some,
        dropped=(None, 0, 0, 0, 1, 2, 9),
        ones=(0, 0, 0, 1, 2, 3, 5, 15),
        dtype=(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        layout=LAYOUTS,
    )


_limits = argument_of(0.5, 0.01, 1.0, 3.0, 1000.0, 0.0)
_limits_or_none = argument_of(0.5, 0.01, 1.0, 3.0, 1000.0, 0.0, INF)
_scales = argument_of(0.5, 0.0, 1.0, -1.0, 1 / 3, -2.0, -0.0, 1e-9, 100.0, INF)
_low, _high = argument_of(-0.5, -1.0, 0.0, -0.0, -INF), argument_of(0.5, 1.0, 0.0, INF)
_arguments: dict[str, st.SearchStrategy[tuple[Argument | None, ...]]] = {
    "scale_gradient": st.tuples(_scales),
    "reverse_gradient": st.tuples(_scales),
    "clip_gradient_norm": st.tuples(_limits_or_none),
    "normalize_gradient": st.tuples(_limits),
    "clip_gradient_value": st.one_of(st.tuples(_low, _high), st.tuples(_low, st.none()), st.tuples(st.none(), _high)),
}
_forms: dict[str, Any] = {"module": (False, True), "structure": ("tensor", "tensor", "tensor", "tuple", "dict")}
_norm_forms: dict[str, Any] = {"norm_type": (2.0, 1.0, 3.0, 0.5, INF, 0.1, 12.0), "batch_dims": range(5)}
_norm_options = product(dict, **_forms, **_norm_forms)
_other_options = product(dict, **_forms)


@st.composite
def operators(draw: st.DrawFn) -> Operator:
    name = draw(st.sampled_from(OPERATORS))
    return Operator(name, draw(_arguments[name]), **draw(_norm_options if name in NORMS else _other_options))


# ---- Contexts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case(Described):
    """An operator, its input, the incoming gradient, and the context."""

    operator: Operator
    context: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    x_layout: str
    gradient: Numbers
    arrival: str = "given"
    seed: int = 0

    @property
    def unit(self) -> float:
        """The unit of limits and bounds: the magnitude of the gradient's elements."""
        info = torch.finfo(self.dtype)
        return {"tiny": info.smallest_normal, "huge": info.max / 16}.get(self.gradient.palette, 1.0)

    def g(self) -> Tensor:
        return self.gradient.tensor(self.shape, self.dtype)

    def x(self) -> Tensor:
        return Numbers(self.x_layout, "everything", self.seed).tensor(self.shape, self.dtype).requires_grad_()


class _Arrive(torch.autograd.Function):
    """A function whose gradient is the result of `make`. Nothing else refers to that tensor, unless `make` keeps it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return y.new_zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.make(), None


ARRIVALS = ("given", "fresh", "held", "permuted", "shared")


def pull(case: Case, y: Tensor, x: Tensor, g: Tensor, **options: Any) -> Tensor:
    """The gradient of x for the gradient g of y, which arrives as the case specifies."""
    if case.arrival == "given":
        return torch.autograd.grad(y, x, g, **options)[0]
    if case.arrival == "permuted":
        order = random(case.seed).permutation(g.dim()).tolist()
        arrived = _Arrive.apply(y.permute(order), lambda: g.clone().permute(order).contiguous())
    elif case.arrival == "held":
        arrived = _Arrive.apply(y, lambda: g)
    elif case.arrival == "shared":
        other = torch.zeros_like(y).requires_grad_()
        arrived = _Arrive.apply(y + other, case.g)
        result, others = torch.autograd.grad(arrived, [x, other], **options)
        check_identical(others, g)
        return result
    else:
        arrived = _Arrive.apply(y, case.g)
    return torch.autograd.grad(arrived, x, **options)[0]


class Trial:
    """A case with its tensors, and the expected result."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.x, self.g = case.x(), case.g()
        self.inputs = case.operator.inputs(case.shape, case.unit, case.seed)
        self.call = case.operator.function(len(case.shape))
        self.truth = case.operator.formula(precise(self.g), self.inputs)

    def apply(self, x: Tensor) -> Tensor:
        y = self.call(x, *self.inputs)
        assert y.dtype == x.dtype
        assert y.shape == x.shape
        return y

    def check(self, gradient: Tensor, what: str = "gradient") -> None:
        assert gradient.dtype == self.case.dtype
        check_rounded(gradient, self.truth, what, blur=self.case.operator.blur(self.g))


def check_rounded(gradient: Tensor, truth: Array, what: str, steps: float = ROUNDED, blur: Array | float = 0.0) -> None:
    relative = steps * eps_of(gradient.dtype) + truth.size * SUMMED + POWERS + blur
    check_close(gradient, truth, relative * np.abs(truth) + UNDERFLOW * smallest_normal_of(gradient.dtype), what)


def check_identical(gradient: Tensor, g: Tensor, nan_bits: bool = True) -> None:
    is_negated = g.is_complex() and g.is_neg()
    if not nan_bits:  # any NaN will do
        gradient, g = (torch.where(tensor.isnan(), torch.nan, tensor) for tensor in (gradient, g))
    if is_negated:  # the sign of PyTorch's negated complex zeros varies
        np.testing.assert_array_equal(precise(gradient), precise(g))
    else:
        assert bits(gradient) == bits(g), "a gradient that needs no change must pass bit-identical"


Context = Callable[[Trial], None]
CONTEXTS: dict[str, Context] = {}


def context(function: Context) -> Context:
    CONTEXTS[function.__name__.strip("_").replace("_", " ")] = function
    return function


@context
def _eager(trial: Trial) -> None:
    y = trial.apply(trial.x)
    assert bits(y) == bits(trial.x)
    assert (y.stride(), y.data_ptr()) == (trial.x.stride(), trial.x.data_ptr())
    gradient = pull(trial.case, y, trial.x, trial.g)
    trial.check(gradient)
    operator = trial.case.operator
    if operator.name == "scale_gradient" and (numbers_of(trial.inputs[0]) == 1).all():
        check_identical(gradient, trial.g, nan_bits=not isinstance(trial.inputs[0], Tensor))
    if operator.name == "clip_gradient_norm":
        g, dims = precise(trial.g), min(operator.batch_dims, trial.g.dim())
        limits = numbers_of(trial.inputs[0])
        within = formulas.resized(g, limits * (1 - MARGIN), dims, operator.norm_type, True)[1]
        for index in np.argwhere(within & (limits > 0)):
            check_identical(gradient[tuple(index)], trial.g[tuple(index)])


@context
def _backward(trial: Trial) -> None:
    trial.apply(trial.x).backward(trial.g)
    assert trial.x.grad is not None
    trial.check(trial.x.grad)
    if trial.x.grad.numel() and trial.case.x_layout not in REPEATING:
        trial.x.grad.fill_(-3.0)  # the user owns it: `Watched` finds memory shared with an input


@context
def _accumulate(trial: Trial) -> None:
    """The incoming gradient reaches the operator and a second leaf as the same tensor."""
    leaf = trial.x
    branch = torch.zeros_like(trial.g).requires_grad_()
    total = trial.apply(leaf) + branch
    torch.autograd.backward(_Arrive.apply(total, trial.case.g))
    assert leaf.grad is not None
    assert branch.grad is not None
    trial.check(leaf.grad)
    check_identical(branch.grad, trial.g)
    before = bits(branch.grad)
    if leaf.grad.numel() and trial.case.x_layout not in REPEATING:
        leaf.grad.fill_(-3.0)
    assert bits(branch.grad) == before, "two gradients share their memory"


@context
def _retain_graph(trial: Trial) -> None:
    y = trial.apply(trial.x)
    first = pull(trial.case, y, trial.x, trial.g, retain_graph=True)
    before = bits(first)
    second = pull(trial.case, y, trial.x, trial.g)
    assert bits(first) == before == bits(second)
    trial.check(first)


@context
def _create_graph(trial: Trial) -> None:
    operator, g = trial.case.operator, trial.g.requires_grad_()
    (gradient,) = torch.autograd.grad(trial.apply(trial.x), trial.x, g, create_graph=True)
    trial.check(gradient)
    v = Numbers("contiguous", "ordinary", trial.case.seed + 1).tensor(trial.case.shape, trial.case.dtype)
    if trial.case.gradient.palette != "ordinary" or not gradient.requires_grad:
        return
    (second,) = torch.autograd.grad(gradient, g, v)
    truth, exact = precise(g), precise(v)
    values = [numbers_of(argument) for argument in trial.inputs]
    if operator.name in NORMS:
        dims, clips = min(operator.batch_dims, g.dim()), operator.name == "clip_gradient_norm"
        expected, size = formulas.resized_backward(truth, exact, values[0], dims, operator.norm_type, clips, MARGIN)
        check_close(second, expected, SECOND * eps_of(g.dtype) * size, "second derivative")
    elif operator.name == "clip_gradient_value":
        low, high = (
            np.array(default) if argument is None else numbers_of(argument)
            for argument, default in zip(trial.inputs, (-INF, INF), strict=True)
        )
        check_rounded(second, np.where((low <= truth) & (truth <= high), exact, 0), "second derivative")
    else:
        check_rounded(second, operator.formula(exact, trial.inputs), "second derivative")


@context
def _vjp(trial: Trial) -> None:
    trial.check(torch.func.vjp(trial.apply, trial.x.detach())[1](trial.g)[0])


@context
def _grad(trial: Trial) -> None:
    if not trial.g.is_complex():
        trial.check(torch.func.grad(lambda x: (trial.apply(x) * trial.g).sum())(trial.x.detach()))


@context
def _vmap(trial: Trial) -> None:
    _check_vmap(trial, lambda call: call, lambda call, x, g, dim: torch.autograd.grad(call(x), x, g)[0])


@context
def _vmapped_vjp(trial: Trial) -> None:
    def pulled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, g, *inputs: torch.func.vjp(lambda x: call(x, *inputs), x)[1](g)[0]

    _check_vmap(trial, pulled, None)


def _check_vmap(
    trial: Trial,
    pulled: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
    outside: Callable[..., Tensor] | None,
) -> None:
    """vmap equals the formula of each example; with an odd seed, the tensor inputs are mapped too."""
    case, dim = trial.case, len(trial.case.shape)
    if dim == 0 or 0 in case.shape:
        return
    mapped = case.seed % dim
    shape = case.shape[:mapped] + case.shape[mapped + 1 :]
    count = case.shape[mapped]
    operator = dataclasses.replace(case.operator, batch_dims=min(case.operator.batch_dims, dim - 1), module=False)
    each = [operator.inputs(shape, case.unit, case.seed + i * (case.seed % 2)) for i in range(count)]
    in_dims: list[int | None] = []
    inputs: list[Any] = []
    for column in zip(*each, strict=True):
        stacked = case.seed % 2 == 1 and isinstance(column[0], Tensor)
        inputs.append(torch.stack(column) if stacked else column[0])
        in_dims.append(0 if stacked else None)
    call = operator.function(dim - 1)
    examples = torch.movedim(trial.g.detach().resolve_conj(), mapped, 0)
    blur = np.stack([np.broadcast_to(operator.blur(g), shape) for g in examples], mapped)
    truth = np.stack(
        [operator.formula(g, values) for g, values in zip(np.moveaxis(precise(trial.g), mapped, 0), each, strict=True)],
        mapped,
    )
    if outside is None:
        function = torch.func.vmap(pulled(call), in_dims=(mapped, mapped, *in_dims), out_dims=mapped)
        gradient = function(trial.x.detach(), trial.g, *inputs)
    else:
        function = torch.func.vmap(call, in_dims=(mapped, *in_dims), out_dims=mapped)
        gradient = outside(lambda x: function(x, *inputs), trial.x, trial.g, mapped)
    check_rounded(gradient, truth, "gradient", blur=blur)


@context
def _jacrev(trial: Trial) -> None:
    if not 0 < trial.g.numel() <= 12 or trial.g.is_complex():
        return
    jacobian = torch.func.jacrev(trial.apply)(trial.x.detach())
    for index in np.ndindex(*trial.case.shape):
        one = np.zeros(trial.case.shape)
        one[index] = 1
        check_rounded(jacobian[index], trial.case.operator.formula(one, trial.inputs), f"jacobian{index}")


@context
def _threads(trial: Trial) -> None:
    y = trial.apply(trial.x)
    results: list[Tensor] = []

    def run() -> None:
        results.append(pull(trial.case, y, trial.x, trial.g, retain_graph=True))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for result in results:
        trial.check(result)


@context
def _checkpoint(trial: Trial) -> None:
    for reentrant in (False, True):
        y = checkpoint(trial.apply, trial.x, use_reentrant=reentrant)
        y.backward(trial.g)
        assert trial.x.grad is not None
        trial.check(trial.x.grad)
        trial.x.grad = None


@context
def _reference(trial: Trial) -> None:
    """The operator of `gs.reference`, with which other tests compare; x is finite here."""
    case, operator = trial.case, trial.case.operator
    x = Numbers(case.x_layout, "ordinary", case.seed).tensor(case.shape, case.dtype).requires_grad_()
    y = getattr(gs.reference, operator.name)(x, *trial.inputs, **operator.options(x.dim()))
    trial.check(pull(case, y, x, trial.g))


@context
def _saved_tensor_hooks(trial: Trial) -> None:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        y = trial.apply(trial.x)
    trial.check(pull(trial.case, y, trial.x, trial.g))


@context
def _autocast(trial: Trial) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = trial.apply(trial.x)
    trial.check(pull(trial.case, y, trial.x, trial.g))


_others = product(
    dict,
    seed=range(32),
    dtype=REAL + COMPLEX,
    shape=SHAPES,
    arrival=ARRIVALS,
    context=(*["eager"] * 6, "reference", "reference", "backward", *CONTEXTS),
    x_layout=LAYOUTS,
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(operator=draw(operators()), gradient=draw(numbers), **draw(_others))


@fuzz(cases(), examples=400)
def test_operators(case: Case) -> None:
    trial = Trial(case)
    if case.dtype.is_complex and case.operator.name == "clip_gradient_value":
        with pytest.raises(TypeError, match="complex"):
            trial.apply(trial.x)
        return
    watched = Watched(trial.x, trial.g, *trial.inputs)
    CONTEXTS[case.context](trial)
    watched.check(case.context)


# ---- Gradients that PyTorch's operations pass to an operator --------------------------------------------------------


def _lstm(y: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.nn.LSTM(y.shape[-1], 3, dtype=y.dtype)(y.reshape(-1, y.shape[-2], y.shape[-1]).transpose(0, 1))[0]


def _convolution(y: Tensor) -> Tensor:
    torch.manual_seed(0)
    images = y if y.dim() == 4 else y.reshape(1, 1, *y.shape[-2:]) if y.dim() == 2 else y.unsqueeze(0)
    weight = torch.randn(2, images.shape[1], 1, 2, dtype=y.dtype).contiguous(memory_format=torch.channels_last)
    return torch.nn.functional.conv2d(images, weight, padding=1)


def _weighted(y: Tensor) -> Tensor:
    return y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)


CONSUMERS: dict[str, Callable[[Tensor], Tensor]] = {
    "weights": _weighted,
    "sum": lambda y: y.sum(),
    "sum of rows": lambda y: _weighted(y.sum(0)),
    "movedim": lambda y: _weighted(y.movedim(0, -1).contiguous()),
    "transpose": lambda y: _weighted(y.transpose(0, 1).reshape(-1)),
    "lstm": _lstm,
    "convolution": _convolution,
    "matmul": lambda y: y.transpose(-1, -2) @ torch.linspace(1, 2, y.shape[-2], dtype=y.dtype).diag(),
    "einsum": lambda y: _weighted(torch.einsum("...ij->...ji", y)) ** 2,
    "slice": lambda y: _weighted(y[..., ::2]),
    "select": lambda y: _weighted(y[0]),
    "unfold": lambda y: _weighted(y.unfold(-1, 2, 1)),
    "as strided": lambda y: _weighted(y.contiguous().as_strided((2, 2), (1, 1))),
    "diagonal": lambda y: _weighted(y.diagonal(dim1=0, dim2=1)),
    "expand": lambda y: _weighted(y.unsqueeze(0).expand(3, *y.shape)),
    "index": lambda y: _weighted(y[[0, 0, 1]]),
    "cat": lambda y: _weighted(torch.cat([y, y.flip(0)])),
    "stack of unbind": lambda y: _weighted(torch.stack(y.unbind(-1), 0)),
    "layer norm": lambda y: _weighted(torch.nn.functional.layer_norm(y, y.shape[-1:])),
    "softmax": lambda y: _weighted(y.softmax(0)),
    "roll": lambda y: _weighted(y.roll(1, 0)),
    "pad": lambda y: _weighted(torch.nn.functional.pad(y, (1, 2))),
    "negative": lambda y: _weighted(torch._neg_view(y)),
    "complex": lambda y: _weighted(torch.complex(y, 2 * y).conj().imag),
    "double": lambda y: _weighted(y.double()),
    "two": lambda y: torch.cat([_weighted(y).flatten(), y.transpose(0, 1).reshape(-1) * 3]),
    "split": lambda y: _weighted(y.split(1, 0)[1]),
    "itself": lambda y: (y.transpose(-1, -2) @ y),
}


@dataclass(frozen=True)
class Chain(Described):
    """Chained operators, and the operation that reads their results."""

    operators: tuple[Operator, ...]
    consumer: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    x_layout: str
    intermediate: bool
    create_graph: bool
    seed: int


_links = product(
    dict,
    seed=SEEDS,
    dtype=(torch.float32, torch.float64),
    shape=((3, 4), (2, 3, 4), (8, 4, 3), (2, 3, 4, 5), (8, 8, 16), (2, 2), (16, 17)),
    intermediate=(False, True),
    create_graph=(False, True),
    consumer=tuple(CONSUMERS),
    x_layout=LAYOUTS,
)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    return Chain(tuple(draw(operators()) for _ in range(draw(st.integers(1, 2)))), **draw(_links))


@fuzz(chains(), examples=100)
def test_consumers(case: Chain) -> None:
    consume, x = CONSUMERS[case.consumer], Numbers(case.x_layout, seed=case.seed).tensor(case.shape, case.dtype)

    def run(operators: list[Operator]) -> Tensor:
        leaf = x.detach().requires_grad_()
        y = leaf.mul(1.0) if case.intermediate else leaf
        for index, operator in enumerate(operators):
            y = operator.function(y.dim())(y, *operator.inputs(case.shape, 1.0, case.seed + index))
        result = consume(y)
        return torch.autograd.grad(result, leaf, torch.ones_like(result), create_graph=case.create_graph)[0].detach()

    truth = precise(run([]))
    for index, operator in reversed(list(enumerate(case.operators))):
        truth = operator.formula(truth, operator.inputs(case.shape, 1.0, case.seed + index))
    check_rounded(run(list(case.operators)), truth, case.consumer, CHAINED)
