"""Adaptive clipping, which limits the norm of each unit of a gradient in proportion to the norm of its weights."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import gradscale_ext as gs
from gradscale_ext import GradientMonitor, reference
from gradscale_ext._native import _C

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
UNITS = ("row", "tensor")
# Rows inside a chunk of 16320 elements, across its end, and longer; rows of one and of no element; biases and scalars.
SHAPES = [(7, 5), (64, 3, 3, 3), (1000, 33), (3, 16320), (2, 16321), (5, 40000), (50, 1), (1, 9), (0, 4), (4, 0)]
SHAPES += [(), (1,), (0,), (13,), (40000,)]


def real(dtype):
    return dtype.to_real() if dtype.is_complex else dtype


def numbers(shape, seed, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (scale * torch.randn(shape, generator=generator, dtype=wide)).to(dtype)


def parameters_of(dtype, shapes=SHAPES):
    """Parameters with gradients; some units exceed the limit of adaptive=0.1, and some weights or gradients are 0."""
    parameters = []
    for seed, shape in enumerate(shapes):
        parameter = nn.Parameter(numbers(shape, seed, dtype))
        parameter.grad = numbers(shape, 100 + seed, dtype)
        if len(shape) > 1 and shape[0] > 2:
            by_row = 10.0 ** (torch.arange(shape[0]) % 5 - 3.0)
            parameter.grad = (parameter.grad * by_row.view(-1, *[1] * (len(shape) - 1))).to(dtype)
            parameter.grad[1] = 0
            parameter.data[2] = 0
        parameters.append(parameter)
    return parameters


def by_formula(weight, gradient, adaptive, eps, unit):
    """timm's formula in float64, without the lower bound of 1e-6 for the norm by which it divides."""
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    weight, gradient = weight.detach().to(wide), gradient.to(wide)
    if unit == "row" and weight.dim() > 1:
        dim = tuple(range(1, weight.dim()))
        norms = [torch.linalg.vector_norm(tensor, dim=dim, keepdim=True) for tensor in (weight, gradient)]
    else:
        norms = [torch.linalg.vector_norm(tensor) for tensor in (weight, gradient)]
    limit = norms[0].clamp(min=eps) * adaptive
    return torch.where(norms[1] > limit, gradient * (limit / norms[1]), gradient), norms[1] > limit


def assert_clipped(parameters, before, adaptive, eps, unit):
    """Compare with the formula; units within their limits must be unchanged. Return which gradients were clipped."""
    clipped = []
    for parameter, gradient in zip(parameters, before, strict=True):
        expected, beyond = by_formula(parameter, gradient, adaptive, eps, unit)
        ours = parameter.grad.to(expected.dtype)
        eps_of = torch.finfo(real(parameter.dtype)).eps
        smallest = torch.finfo(real(parameter.dtype)).smallest_normal * eps_of
        relative = max(2 * eps_of, 1e-13 if eps_of < 1e-10 else 3e-7)
        assert ((ours - expected).abs() <= relative * expected.abs() + 2 * smallest).all()
        same = (~beyond).expand_as(gradient)
        assert torch.equal(parameter.grad[same], gradient[same])
        clipped.append(bool(beyond.any()))
    return clipped


# ---- Values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "unit", "adaptive"),
    [
        *itertools.product(DTYPES, UNITS, [0.1]),
        *zip(DTYPES, UNITS * 3, [0.0, 0.0, 1e6, 1e6, math.inf, math.inf], strict=True),
    ],
    ids=str,
)
def test_clips_by_the_formula(dtype, unit, adaptive):
    parameters = parameters_of(dtype)
    before = [parameter.grad.clone() for parameter in parameters]
    statistics = gs.clip_gradients_(parameters, adaptive=adaptive, unit=unit)
    clipped = assert_clipped(parameters, before, adaptive, 1e-3, unit)
    assert any(clipped) == (adaptive < 1)
    assert statistics.clipping[2] == any(clipped)
    same = gs.gradient_statistics(before)
    for field in ("norm", "abs_max", "mean", "zeros", "total_norm"):
        assert torch.equal(getattr(statistics, field), getattr(same, field))


@pytest.mark.parametrize("unit", UNITS)
def test_the_reference_clips_the_same(unit):
    for dtype in DTYPES:
        ours, theirs = parameters_of(dtype), parameters_of(dtype)
        gs.clip_gradients_(ours, adaptive=0.1, unit=unit)
        rows = unit == "row"
        gradients = [parameter.grad for parameter in theirs]
        norms = [reference.unit_norms(tensors, rows) for tensors in (gradients, theirs)]
        factors, _ = reference.unit_factors(torch.stack(norms), torch.ones(3), 0.1, 1e-3, False)
        reference.clip_units(gradients, factors, rows, False)
        for mine, other in zip(ours, theirs, strict=True):
            tolerance = max(torch.finfo(real(dtype)).eps, 1e-13 if real(dtype) == torch.float64 else 2e-7)
            torch.testing.assert_close(
                mine.grad, other.grad, rtol=tolerance, atol=1e-7 if dtype == torch.float16 else 0
            )


def test_eps_of_zero_freezes_weights_of_zero():
    for adaptive in (0.1, math.inf):
        parameter = nn.Parameter(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
        parameter.grad = torch.tensor([[1.0, 1.0], [0.3, 0.4]])
        gs.clip_gradients_([parameter], adaptive=adaptive, eps=0.0)
        assert torch.equal(parameter.grad, torch.tensor([[0.0, 0.0], [0.3, 0.4]]))


@pytest.mark.parametrize("unit", UNITS)
def test_nothing_overflows_or_vanishes(unit):
    for dtype, size in ((torch.float16, 6e4), (torch.float32, 1e38), (torch.float64, 1e300), (torch.float64, 1e-310)):
        for shape in ((3, 1000), (2, 40000)):
            parameter = nn.Parameter(torch.full(shape, size, dtype=dtype))
            parameter.grad = parameter.detach() / 4
            before = parameter.grad.clone()
            gs.clip_gradients_([parameter], adaptive=0.26, eps=0.0, unit=unit)
            assert torch.equal(parameter.grad, before)
            gs.clip_gradients_([parameter], adaptive=0.125, eps=0.0, unit=unit)
            torch.testing.assert_close(parameter.grad, before / 2, rtol=2e-3 if size == 6e4 else 1e-6, atol=0)


def test_factors_by_kernel_and_reference():
    """Norms of gradients and weights that include 0, NaN and inf, with every option."""
    special = torch.tensor([0.0, 1e-4, 1.0, 5.0, math.inf, math.nan], dtype=torch.float64)
    norms = torch.cartesian_prod(special, special).T.contiguous()
    finite = norms[:, norms.isfinite().all(0)].contiguous()
    for unit_norms in (norms, finite, norms[:, :0].contiguous()):
        for adaptive, eps, skip, kept in itertools.product(
            (0.0, 0.1, math.inf), (0.0, 1e-3), (False, True), (0.0, 1.0)
        ):
            clipping = torch.tensor([3.0, kept, 0.0], dtype=torch.float64)
            found = _C.unit_factors(unit_norms, clipping, adaptive, eps, skip)
            expected = reference.unit_factors(unit_norms, clipping, adaptive, eps, skip)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# ---- NaN and inf -----------------------------------------------------------------------------------------------------


def model_with(bad):
    """Two parameters; the second row of the first has a bad element."""
    first, second = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2))
    first.grad, second.grad = torch.full((3, 4), 5.0), torch.ones(2)
    first.grad[1, 2] = bad
    return [("first", first), ("second", second)]


@pytest.mark.parametrize("width", [4, 20000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_elements_stay_in_their_unit(bad, width):
    parameter = nn.Parameter(torch.ones(3, width))
    parameter.grad = torch.full((3, width), 5.0)
    parameter.grad[1, 2] = bad
    statistics = gs.clip_gradients_([parameter], adaptive=0.1)
    torch.testing.assert_close(parameter.grad[::2], torch.full((2, width), 0.1))
    assert parameter.grad[1, 2].isnan()
    others = torch.cat([parameter.grad[1, :2], parameter.grad[1, 3:]])
    assert others.isnan().all() if math.isnan(bad) else (others == 0).all()
    assert statistics.total_norm.isnan() if math.isnan(bad) else statistics.total_norm == math.inf


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_skip_and_error(bad, unit):
    named = model_with(bad)
    gs.clip_gradients_(named, adaptive=0.1, unit=unit, nonfinite="skip")
    assert not any(parameter.grad.any() for _, parameter in named)
    named = model_with(bad)
    before = [parameter.grad.clone() for _, parameter in named]
    with pytest.raises(RuntimeError, match=r"NaN or inf in the gradients of first \(1 of 12 elements\); no gradient"):
        gs.clip_gradients_(named, adaptive=0.1, unit=unit, nonfinite="error")
    for (_, parameter), gradient in zip(named, before, strict=True):
        assert torch.equal(parameter.grad.nan_to_num(), gradient.nan_to_num())


@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "error"])
def test_weights_that_are_not_finite(nonfinite):
    named = model_with(5.0)
    named[0][1].data[0, 0], named[0][1].data[1, 0] = math.nan, math.inf
    if nonfinite == "error":
        with pytest.raises(RuntimeError, match="NaN in the weights of first; no gradient has been changed"):
            gs.clip_gradients_(named, adaptive=0.1, nonfinite=nonfinite)
        assert (named[0][1].grad == 5).all()
        return
    gs.clip_gradients_(named, adaptive=0.1, nonfinite=nonfinite)
    gradient = named[0][1].grad
    if nonfinite == "skip":
        assert not gradient.any()
    else:
        assert gradient[0].isnan().all()
        assert (gradient[1] == 5).all()
        torch.testing.assert_close(gradient[2], torch.full((4,), 0.1))


# ---- Tensors of every kind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS)
def test_gradients_and_weights_in_any_memory(unit):
    """Strided, transposed, channels-last, conjugate and negated tensors are read and written in place."""
    image = numbers((4, 3, 2, 5), 0)
    negative = torch.complex(numbers((3, 4), 1), numbers((3, 4), 1)).conj().imag
    gradients = [
        numbers((6, 8), 2)[:, ::2],
        numbers((6, 8), 3).T,
        numbers((6, 8), 4)[1:5],
        image.contiguous(memory_format=torch.channels_last),
        numbers((6, 4), 5, torch.complex64).conj(),
        negative,
        numbers((2, 3, 4), 6).permute(1, 0, 2),
    ]
    before = [gradient.clone().resolve_conj().resolve_neg().contiguous() for gradient in gradients]
    places = [gradient.data_ptr() for gradient in gradients]
    parameters = []
    for seed, gradient in enumerate(gradients):
        weight = numbers((2, *gradient.shape), 20 + seed, gradient.dtype)
        parameters.append(nn.Parameter(weight.movedim(0, -1)[..., 0]))  # strided too
        parameters[-1].grad = gradient
    gs.clip_gradients_(parameters, adaptive=0.3, unit=unit)
    assert all(assert_clipped(parameters, before, 0.3, 1e-3, unit))
    assert places == [parameter.grad.data_ptr() for parameter in parameters]


@pytest.mark.parametrize("unit", UNITS)
def test_sparse_gradients(unit):
    """The gradients of a repeated row are added before clipping. The same call clips a dense parameter."""
    embedding = nn.Embedding(50, 7, sparse=True)
    other = nn.Parameter(torch.ones(3, 3))
    (embedding(torch.tensor([3, 4, 3, 9])).square().sum() + (other**2).sum()).backward()
    assert embedding.weight.grad.is_sparse
    parameters = [other, embedding.weight]
    before = [parameter.grad.to_dense().clone() for parameter in parameters]
    gs.clip_gradients_(parameters, adaptive=0.1, unit=unit)
    for parameter, gradient in zip(parameters, before, strict=True):
        expected, beyond = by_formula(parameter, gradient, 0.1, 1e-3, unit)
        assert beyond.any()
        torch.testing.assert_close(parameter.grad.to_dense().double(), expected, rtol=1e-6, atol=0)
    compressed = torch.eye(3).to_sparse_csr()
    compressed.grad = 5 * compressed
    if unit == "row":
        with pytest.raises(ValueError, match=r"of 0 is of layout torch.sparse_csr; convert it with to_dense\(\)"):
            gs.clip_gradients_([compressed], adaptive=0.1)
    else:
        gs.clip_gradients_([compressed], adaptive=0.1, unit=unit)
        torch.testing.assert_close(compressed.grad.to_dense(), 0.1 * torch.eye(3))


def test_shared_and_missing_gradients():
    """A gradient that two parameters share is clipped once, by the weights of the first. A missing one is skipped."""
    first, second, third = (nn.Parameter(torch.full((2,), size)) for size in (1.0, 2.0, 1.0))
    first.grad = second.grad = torch.tensor([3.0, 4.0])
    statistics = gs.clip_gradients_([first, third, second], adaptive=0.5)
    torch.testing.assert_close(first.grad, torch.tensor([0.3, 0.4]) * math.sqrt(2))
    assert statistics.missing.tolist() == [False, True, False]
    assert gs.clip_gradients_([], adaptive=0.5).total_norm == 0
    assert gs.clip_gradients_([third], adaptive=0.5).clipping.tolist() == [0, 1, 0]


def test_many_tensors():
    parameters = parameters_of(torch.float32, [(1 + i % 7, 1 + i % 13) if i % 3 else (i,) for i in range(700)])
    before = [parameter.grad.clone() for parameter in parameters]
    gs.clip_gradients_(parameters, adaptive=0.1)
    assert sum(assert_clipped(parameters, before, 0.1, 1e-3, "row")) > 600


@pytest.mark.cpu_kernels
def test_the_same_bits_with_any_number_of_threads():
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            parameters = parameters_of(torch.float32)
            gs.clip_gradients_(parameters, adaptive=0.1)
            found.append([parameter.grad for parameter in parameters])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_gradient_of_another_dtype():
    """PyTorch allows it if the parameter's `grad_dtype` is set."""
    parameter = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    if not hasattr(parameter, "grad_dtype"):
        pytest.skip("this version of PyTorch has no Tensor.grad_dtype")
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.full((3, 4), 5.0)
    gs.clip_gradients_([parameter], adaptive=0.1)
    torch.testing.assert_close(parameter.grad, torch.full((3, 4), 0.1))


# ---- Arguments, and the monitor --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"adaptive": None}, ValueError, "give one of max_norm and adaptive, but it got neither"),
        ({"max_norm": 1.0}, ValueError, "give one of max_norm and adaptive, but it got max_norm=1.0 and adaptive=0.1"),
        ({"adaptive": -1.0}, ValueError, "adaptive must be at least 0, but it is -1.0"),
        ({"adaptive": math.nan}, ValueError, "adaptive must be at least 0, but it is nan"),
        ({"adaptive": "x"}, TypeError, "adaptive must be a number, but it is of type str"),
        ({"adaptive": True}, TypeError, "adaptive must be a number, but it is of type bool"),
        ({"adaptive": torch.tensor(0.1)}, TypeError, "adaptive must be a number, but it is of type Tensor"),
        ({"eps": True}, TypeError, "eps must be a number, but it is of type bool"),
        ({"eps": -1e-3}, ValueError, "eps must be at least 0, but it is -0.001"),
        ({"eps": None}, TypeError, "eps must be a number, but it is of type NoneType"),
        ({"unit": "column"}, ValueError, "unit must be 'row' or 'tensor', but it is 'column'"),
        ({"norm_type": 1.0}, ValueError, "norm_type must be 2 with adaptive, but it is 1.0"),
        ({"nonfinite": "drop"}, ValueError, "nonfinite must be 'propagate', 'skip' or 'error', but it is 'drop'"),
    ],
)
def test_errors(change, error, words):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(error, match=words):
        gs.clip_gradients_([parameter], **{"adaptive": 0.1, **change})
    assert parameter.grad.tolist() == [3.0, 4.0]


def test_the_monitor_counts_steps_with_a_clipped_unit():
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with GradientMonitor(model, optimizer, every=2) as monitor:
        for size in (0.01, 1.0, 1.0, 0.01, 0.01):
            model.weight.data = torch.eye(2)
            model.weight.grad = torch.tensor([[0.01, 0.0], [0.0, size]])
            gs.clip_gradients_(model, adaptive=0.1)
            optimizer.step()
    assert monitor.history["clip_rate"] == [(0, 0.0), (2, 1.0), (4, 0.0)]
    norms = [value for _, value in monitor.history["gradient_norm_before_clipping/weight"]]
    assert norms == pytest.approx([math.hypot(0.01, size) for size in (0.01, 1.0, 0.01)])
