"""Transforms, supports, passes over many tensors and priorities, against the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import gradscale_ext as gs

from . import formulas
from .budget import fuzz
from .strategies import (
    COMPLEX,
    LAYOUTS,
    PALETTES,
    REAL,
    SEEDS,
    SHAPES,
    Described,
    Numbers,
    Watched,
    bits,
    check_close,
    eps_of,
    laid_out,
    precise,
    product,
    random,
    smallest_normal_of,
    values,
)
from .test_loss import SUPPORTS, WIDE_SUPPORTS

Tensor = torch.Tensor
Array = np.ndarray

TRANSFORMED = 4e-7 / torch.finfo(torch.float32).eps
"""Units in the last place: what the contract promises in float32, and the same in float64."""
SLOPES = 16.0
"""The same for derivatives, which need more operations."""
ROUNDED = 4.0
"""Units in the last place for each of the magnitudes that enter a result, as in `test_loss`."""
SUMMED = 64.0
"""Units in the last place of a sum of up to 5,000 numbers of one sign, added in blocks."""


# ---- Transforms -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransformCase(Described):
    name: str
    eps: float
    x: Numbers
    shape: tuple[int, ...]
    dtype: torch.dtype


def slope(name: str, x: Array, eps: float) -> Array:
    """The derivative; at infinity, its limit."""
    size = np.abs(x)
    if name == "signed_hyperbolic":
        return 0.5 / np.sqrt(size + 1) + eps
    if name == "symlog":
        return 1 / (size + 1)
    if name == "symexp":
        return np.exp(size)
    return 1 / (0.5 / np.sqrt(np.abs(formulas.signed_parabolic(x, eps)) + 1) + eps)


def value(name: str, x: Array, eps: float) -> Array:
    if name in ("signed_hyperbolic", "symlog"):
        return formulas.transformed(x, name, eps)
    return formulas.transformed_back(x, {"symexp": "symlog", "signed_parabolic": "signed_hyperbolic"}[name], eps)


@st.composite
def transform_cases(draw: st.DrawFn) -> TransformCase:
    x = draw(product(Numbers, seed=SEEDS, layout=LAYOUTS, palette=PALETTES))
    names = ("signed_hyperbolic", "signed_parabolic", "symlog", "symexp")
    others = product(dict, name=names, eps=(1e-3, 0.0, 1e-2, 1.0), dtype=REAL, shape=SHAPES)
    return TransformCase(x=x, **draw(others))


@fuzz(transform_cases(), examples=120)
def test_transforms(case: TransformCase) -> None:
    x = case.x.tensor(case.shape, case.dtype).requires_grad_()
    watched, exact = Watched(x), precise(x).astype(np.longdouble)
    has_eps = case.name.startswith("signed")
    y = getattr(gs, case.name)(x, *([case.eps] if has_eps else []))
    assert y.dtype == case.dtype
    expected = value(case.name, exact, case.eps).astype(np.float64)
    eps, smallest = eps_of(case.dtype), smallest_normal_of(case.dtype) * eps_of(case.dtype)
    check_close(y.detach(), expected, TRANSFORMED * eps * np.abs(expected) + smallest, case.name)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    slopes = np.where(np.isnan(exact), np.nan, slope(case.name, exact, case.eps)).astype(np.float64)
    check_close(gradient, slopes, SLOPES * (eps * np.abs(slopes) + smallest), f"derivative of {case.name}")
    watched.check(case.name)


# ---- Supports -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SupportCase(Described):
    method: str
    support: gs.Support
    sigma_ratio: float
    values: str
    layout: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    create_graph: bool
    seed: int


support_cases = product(
    SupportCase,
    seed=range(8),
    support=SUPPORTS * 2 + WIDE_SUPPORTS,
    dtype=REAL,
    method=("two_hot", "hl_gauss", "decode"),
    shape=((3,), (), (0,), (2, 3), (1, 4, 2), (17,)),
    values=("inside", "centers", "sharp", "outside", "nan"),
    layout=LAYOUTS,
    sigma_ratio=(0.75, 0.1, 4.0),
    create_graph=(False, True),
)


@fuzz(support_cases, examples=120)
def test_supports(case: SupportCase) -> None:
    support, generator = case.support, random("support", case.seed)
    if case.method == "decode":
        check_decode(case, generator)
        return
    back = lambda y: formulas.transformed_back(np.asarray(y, float), support.transform, support.eps)
    middles = np.linspace(support.minimum, support.maximum, support.num_bins)
    drawn = {
        "centers": lambda: back(generator.choice(middles, case.shape)),
        "outside": lambda: generator.choice([np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0], case.shape),
        "nan": lambda: generator.choice([np.nan, 0.5], case.shape),
    }.get(case.values, lambda: back(generator.uniform(support.minimum, support.maximum, case.shape)))()
    x = laid_out(torch.from_numpy(np.asarray(drawn)).reshape(case.shape).to(case.dtype), case.layout)
    exact, watched = precise(x).ravel(), Watched(x)
    if case.method == "two_hot":
        encoded, (truth, moved) = support.two_hot(x), formulas.two_hot(exact, support)
    else:
        encoded = support.hl_gauss(x, case.sigma_ratio)
        truth, moved = formulas.hl_gauss(exact, support, case.sigma_ratio)
    assert encoded.dtype == case.dtype
    shape = (*case.shape, support.num_bins)
    error = ROUNDED * eps_of(case.dtype) * (moved + np.abs(truth)).reshape(shape)
    check_close(encoded, truth.reshape(shape), error, case.method)
    watched.check(case.method)


def check_decode(case: SupportCase, generator: np.random.Generator) -> None:
    support, shape = case.support, (*case.shape, case.support.num_bins)
    scale = {"sharp": 40.0, "centers": 0.0}.get(case.values, 2.0)
    drawn = generator.standard_normal(shape) * scale + (300 if case.values == "outside" else 0)
    if case.values == "nan":
        drawn[generator.random(shape) < 0.01] = np.nan
    logits = laid_out(torch.from_numpy(drawn).to(case.dtype), case.layout).requires_grad_()
    watched, rows = Watched(logits), precise(logits).reshape(-1, support.num_bins)
    result = support.decode(logits)
    assert result.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    truth, size = formulas.decoded(rows, support)
    eps = eps_of(case.dtype)
    check_close(result.detach(), truth.reshape(case.shape), ROUNDED * eps * size.reshape(case.shape), "decode")
    if case.values == "centers" and support.minimum == -support.maximum:
        assert (result == 0).all(), "uniform logits over a symmetric support are exactly 0"
    grad_output = torch.from_numpy(generator.standard_normal(case.shape)).reshape(case.shape).to(result.dtype)
    (gradient,) = torch.autograd.grad(result, logits, grad_output, create_graph=case.create_graph)
    slopes, error = formulas.decoded_gradient(rows, support)
    factor = precise(grad_output).reshape(-1, 1)
    slopes, error = (array.reshape(shape) for array in (slopes * factor, error * np.abs(factor)))
    ends = np.array([support.minimum, support.maximum], float)
    largest = np.abs(formulas.centers(support)).max() + 1
    if support.space == "transformed":
        largest *= formulas.slope_back(ends, support.transform, support.eps).max()
    underflow = smallest_normal_of(case.dtype) * largest * np.abs(factor).max(initial=0)
    error = ROUNDED * (eps * error + underflow)
    check_close(gradient.detach(), slopes, error, "gradient of decode")
    watched.check("decode")


# ---- Many tensors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A tensor of a list."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    numbers: Numbers

    def tensor(self) -> Tensor:
        return self.numbers.tensor(self.shape, self.dtype)


@dataclass(frozen=True)
class ListCase(Described):
    items: tuple[Item | None, ...]
    norm_type: float = 2.0
    max_norm: float = 1.0
    weight: float = 1.0
    nonfinite: str = "propagate"
    grad_output: float = 1.0


_items = product(dict, dtype=REAL + COMPLEX, shape=SHAPES)
_palettes = {
    "any": product(Numbers, seed=SEEDS, layout=LAYOUTS, palette=PALETTES),
    "finite": product(Numbers, seed=SEEDS, layout=LAYOUTS, palette=("ordinary", "zeros", "wide", "tiny")),
}
_list_options = product(
    dict,
    norm_type=(2.0, 1.0, 3.0, math.inf),
    max_norm=(1.0, 0.0, 100.0, 1e9, math.inf),
    weight=(1.0, 1e-4, 0.0, -2.0),
    nonfinite=("propagate", "skip", "error"),
    grad_output=(1.0, 0.5, 0.0),
)


@st.composite
def list_cases(draw: st.DrawFn) -> ListCase:
    palette = _palettes[draw(st.sampled_from(("any", "finite")))]
    items = [
        None if draw(st.integers(0, 9)) == 9 else Item(**draw(_items), numbers=draw(palette))
        for _ in range(draw(st.integers(0, 6)))
    ]
    return ListCase(tuple(items), **draw(_list_options))


def check_statistics(found: Any, tensors: list[Tensor | None], p: float) -> None:
    edges = found.bin_edges.numpy()
    for index, tensor in enumerate(tensors):
        assert bool(found.missing[index]) == (tensor is None)
        numbers = np.zeros(0) if tensor is None else precise(tensor)
        truth = formulas.statistics(numbers, p)
        for field in ("numel", "zeros", "nans", "infs"):
            assert int(getattr(found, field)[index]) == truth[field], f"{field} of tensor {index}"
        sizes = {"norm": truth["norm"], "abs_max": truth["abs_max"], "mean": truth["mean_size"]}
        for field, size in sizes.items():
            error = (numbers.size + 512) * 2.0**-52 * size + 1e-320
            what = f"{field} of tensor {index}"
            check_close(getattr(found, field)[index], np.array(truth[field]), error, what)
        if found.histogram is None:
            continue
        if tensor is None or not tensor.is_complex():  # moduli may be rounded into the next bin
            expected = formulas.histogram(numbers, edges)
            np.testing.assert_array_equal(found.histogram[index].numpy(), expected)
        assert int(found.histogram[index].sum()) == numbers.size - sum(truth[f] for f in ("zeros", "nans", "infs"))


@fuzz(list_cases(), examples=80)
def test_gradient_statistics(case: ListCase) -> None:
    tensors = [None if item is None else item.tensor() for item in case.items]
    watched = Watched(*tensors)
    check_statistics(gs.gradient_statistics(tensors, histogram=True), tensors, 2.0)
    watched.check("gradient_statistics")


@fuzz(list_cases(), examples=80)
def test_clip_gradients(case: ListCase) -> None:
    gradients = [None if item is None else item.tensor().clone() for item in case.items]
    parameters = [torch.zeros(()) if g is None else torch.zeros_like(g) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_().grad = gradient
    exact = [precise(gradient) for gradient in gradients if gradient is not None]
    before = [None if gradient is None else gradient.clone() for gradient in gradients]
    total, factor = formulas.clipping_factor(exact, case.max_norm, case.norm_type)
    options: dict[str, Any] = {"norm_type": case.norm_type, "nonfinite": case.nonfinite}
    if case.nonfinite == "error" and not math.isfinite(total):
        with pytest.raises(RuntimeError, match="no gradient has been changed"):
            gs.clip_gradients_(parameters, case.max_norm, **options)
        assert [g is None or bits(g) for g in gradients] == [g is None or bits(g) for g in before]
        return
    found = gs.clip_gradients_(parameters, case.max_norm, **options)
    check_statistics(found, before, case.norm_type)
    count = sum(numbers.size for numbers in exact)
    check_close(found.total_norm, np.array(total), (count + 512) * 2.0**-52 * abs(total) + 1e-320, "total_norm")
    for parameter, gradient, was in zip(parameters, gradients, before, strict=True):
        assert parameter.grad is gradient
        if gradient is None or was is None:
            continue
        if case.nonfinite == "skip" and not math.isfinite(total):
            assert (gradient == 0).all()
            continue
        if factor == 1:
            assert bits(gradient) == bits(was), "gradients within the limit stay as they are"
            continue
        truth = formulas.times(precise(was), factor)
        relative = 4 * eps_of(gradient.dtype) + (count + 512) * 2.0**-52
        error = relative * np.abs(truth) + 2.0**-20 * smallest_normal_of(gradient.dtype)
        check_close(gradient, truth, error, "clipped gradient")


@fuzz(list_cases(), examples=60)
def test_l2_loss(case: ListCase) -> None:
    tensors = [item.tensor().requires_grad_() for item in case.items if item is not None and item.dtype in REAL]
    watched = Watched(*tensors)
    loss = gs.l2_loss(tensors, case.weight)
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    assert loss.dtype == dtype
    exact = [precise(tensor).astype(np.longdouble) for tensor in tensors]
    total = sum((float((numbers**2).sum()) for numbers in exact), 0.0) / 2
    truth = np.array(case.weight * total)
    # Tensors are squared in the dtype of the computation, whose range limits the guarantee.
    limits = [torch.finfo(torch.float64 if tensor.dtype == torch.float64 else torch.float32).max for tensor in tensors]
    if all(float((numbers**2).sum()) < limit / 8 for numbers, limit in zip(exact, limits, strict=True)):
        eps = max([eps_of(tensor.dtype) for tensor in tensors], default=eps_of(dtype))
        check_close(loss.detach(), truth, SUMMED * eps * np.abs(truth) + smallest_normal_of(dtype), "l2_loss")
    if not tensors:
        return
    gradients = torch.autograd.grad(loss, tensors, torch.tensor(case.grad_output, dtype=dtype))
    for tensor, gradient in zip(tensors, gradients, strict=True):
        assert gradient.dtype == tensor.dtype
        expected = precise(tensor) * (case.weight * case.grad_output)
        error = 4 * (eps_of(tensor.dtype) * np.abs(expected) + smallest_normal_of(tensor.dtype) * eps_of(tensor.dtype))
        # Twice the largest number is inf, which some paths compute on the way.
        error = np.where(np.abs(precise(tensor)) < torch.finfo(tensor.dtype).max / 4, error, np.inf)
        check_close(gradient, expected, error, "gradient of l2_loss")
    for index, gradient in enumerate(gradients):
        gradient.fill_(index + 1)
    assert all((gradient == index + 1).all() for index, gradient in enumerate(gradients))
    watched.check("l2_loss")


# ---- Priorities -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PriorityCase(Described):
    batch: int
    steps: int
    batch_first: bool
    which: str
    alpha: float
    eps: float
    dtype: torch.dtype
    target_dtype: torch.dtype
    form: str
    layout: str
    seed: int


priority_cases = product(
    PriorityCase,
    seed=range(8),
    batch=(3, 1, 0, 5),
    steps=(1, 2, 5),
    batch_first=(True, False),
    which=("first", "mean", "max"),
    alpha=(1.0, 0.0, 0.6),
    eps=(1e-6, 0.0, 1.0),
    dtype=REAL,
    target_dtype=REAL,
    form=("stacked", "list"),
    layout=LAYOUTS,
)


@fuzz(priority_cases, examples=30)
def test_priorities(case: PriorityCase) -> None:
    generator = random("priorities", case.seed)
    entries, numbers = [], []
    for dtype in (case.dtype, case.target_dtype):
        drawn = torch.from_numpy(generator.standard_normal((case.batch, case.steps)) * 100).to(dtype)
        stacked = laid_out(drawn if case.batch_first else drawn.t(), case.layout)
        exact = precise(stacked)
        numbers.append(exact if case.batch_first else exact.T)
        entries.append(stacked if case.form == "stacked" else list(stacked.unbind(1 if case.batch_first else 0)))
    result = gs.priorities(*entries, steps=case.which, alpha=case.alpha, eps=case.eps, batch_first=case.batch_first)
    expected = formulas.priorities(*numbers, case.which, case.alpha, case.eps)
    # The difference is rounded to its operands' precision: an error that the exponent amplifies next to 0.
    eps = eps_of(torch.float64 if {case.dtype, case.target_dtype} == {torch.float64} else torch.float32)
    larger = [formulas.priorities(*numbers, case.which, case.alpha, case.eps + sign * eps * 4e3) for sign in (1, -1)]
    error = np.nan_to_num(np.abs(larger[0] - np.where(np.isnan(larger[1]), 0, larger[1]))) + 8 * eps * expected
    check_close(result, expected, error, "priorities")


# ---- standardize ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StandardizeCase(Described):
    shape: tuple[int, ...]
    dtype: torch.dtype
    palette: str
    offset: float
    eps: float
    unmasked: float | None
    """The share of entries that count; None without a mask."""
    layouts: tuple[str, str]
    """Of the tensor and of the mask."""
    seed: int


standardize_cases = product(
    StandardizeCase,
    seed=range(8),
    shape=(*SHAPES, (20_000,), (130, 257)),
    dtype=REAL,
    palette=("ordinary", "zeros", "inf", "nan"),
    offset=(0.0, 1e6),
    eps=(1e-8, 0.0, 1.0),
    unmasked=(None, 0.8, 0.02, 0.0),
    layouts=(("contiguous", "contiguous"), ("transposed", "columns"), ("negative", "rows"), ("expanded", "offset")),
)


@fuzz(standardize_cases, examples=60)
def test_standardize(case: StandardizeCase) -> None:
    generator = random("standardize", case.seed)
    x = laid_out(
        values(case.shape, torch.float64, case.palette, generator).add(case.offset).to(case.dtype), case.layouts[0]
    )
    mask = None
    if case.unmasked is not None:
        mask = laid_out(torch.from_numpy(np.asarray(generator.random(case.shape) < case.unmasked)), case.layouts[1])
    watched = Watched(x, mask)
    expected, scale = formulas.standardize(precise(x), None if mask is None else mask.numpy(), case.eps)
    # Sums are computed in float64 from differences that are at most `scale` standard deviations.
    error = SUMMED * torch.finfo(torch.float64).eps * scale
    result = gs.standardize(x, mask=mask, eps=case.eps)
    assert result.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    check_close(result, expected, error, "standardize")
    watched.check("standardize")
