"""clip_gradient_norm, normalize_gradient, clip_gradient_value: the rules of the contract, against float64 formulas."""

from __future__ import annotations

import copy
import math
from collections import defaultdict

import pytest
import torch
import torch._dynamo.testing
from contexts import BACKEND
from digests import OPERATORS, through
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_ext as gs

INF = math.inf
NAN = math.nan
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
operators = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
# Recording a graph of the backward pass uses the path in tensor operations, otherwise the fused kernels run.
paths = pytest.mark.parametrize("create_graph", [False, True], ids=["fused", "operations"])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def norms(g: torch.Tensor, batch_dims: int, p: float) -> torch.Tensor:
    """Norm in float64, with elements divided by the largest one: correct for all finite gradients."""
    a = g.to(torch.complex128 if g.is_complex() else torch.float64).abs().reshape([*g.shape[:batch_dims], -1])
    largest = a.amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1)
    norm = scale if p == INF else scale * ((a / scale) ** p).sum(-1, keepdim=True) ** (1 / p)
    return torch.where(largest > 0, norm, 0).reshape([*g.shape[:batch_dims], *[1] * (g.dim() - batch_dims)])


def coefficient(rule: str, norm: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    limit = limit.reshape([*limit.shape, *[1] * (norm.dim() - limit.dim())]) if limit.dim() else limit
    ratio = limit / torch.where(norm == 0, 1, norm)
    return torch.where(norm <= limit, 1, ratio) if rule == "clip" else torch.where(norm == 0, 0, ratio)


def with_norm(rule: str, limit, **options):
    function = gs.clip_gradient_norm if rule == "clip" else gs.normalize_gradient
    return lambda x: function(x, limit, **options)


# ---- Values ---------------------------------------------------------------------------------------------------------


@paths
@pytest.mark.parametrize("rule", ["clip", "normalize"])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.14, 0.5, INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_all_shapes(dtype, p, rule, create_graph):
    generator = torch.Generator().manual_seed(0)
    shapes = [((3, 5, 7), 0), ((3, 5, 7), 1), ((3, 5, 7), 2), ((3, 5, 7), 3), ((), 0), ((1, 1), 1), ((2, 40001), 1)]
    for shape, batch_dims in shapes:
        g = torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64, generator=generator)
        g = g.to(dtype)
        norm = norms(g, batch_dims, p)
        limits = norm.reshape(shape[:batch_dims]) * torch.rand(shape[:batch_dims], generator=generator) * 2
        for limit in (float(norm.mean()), limits, limits[..., :1] if limits.dim() else limits):
            result = through(with_norm(rule, limit, batch_dims=batch_dims, norm_type=p), g, create_graph)
            expected = g * coefficient(rule, norm, torch.as_tensor(limit, dtype=torch.float64))
            tolerance = max(2 * torch.finfo(dtype).eps, 1e-13)
            smallest = torch.finfo(dtype).smallest_normal
            torch.testing.assert_close(result.to(expected.dtype), expected, rtol=tolerance, atol=smallest)


@paths
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 20.0, INF])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float16, 2000.0),
        (torch.float16, 60000.0),
        (torch.float16, 6e-8),
        (torch.bfloat16, 1e38),
        (torch.bfloat16, 1e-38),
        (torch.float32, 1e20),
        (torch.float32, 3e38),
        (torch.float32, 1e-30),
        (torch.float32, 1e-45),
        (torch.float64, 1e200),
        (torch.float64, 1e308),
        (torch.float64, 1e-200),
        (torch.float64, 5e-324),
        (torch.complex64, 1e20),
        (torch.complex128, 1e-200),
    ],
)
def test_norms_neither_overflow_nor_vanish(dtype, size, p, create_graph):
    """Every finite gradient of size s times (1, ..., 1) over 4096 elements is normalised to 4096^(-1/p)."""
    g = torch.full((2, 4096), size, dtype=dtype)
    g[1] *= 0.5 if size > torch.finfo(dtype).smallest_normal else 1
    expected = 4096 ** (-1 / p)
    result = through(lambda x: gs.normalize_gradient(x, 1.0, batch_dims=1, norm_type=p), g, create_graph)
    rtol = max(torch.finfo(dtype).eps * 8, 1e-13)
    torch.testing.assert_close(
        result.abs().double(), torch.full((2, 4096), expected, dtype=torch.float64), rtol=rtol, atol=0
    )
    # The whole tensor, and clipping to a millionth of a norm that may be infinite.
    whole = through(lambda x: gs.normalize_gradient(x, 1.0, norm_type=p), g[:1].reshape(64, 64), create_graph)
    torch.testing.assert_close(
        whole.abs().double(), torch.full((64, 64), expected, dtype=torch.float64), rtol=rtol, atol=0
    )
    if size > 1e-30:
        limit = min(size, 1e30) * 1e-3
        clipped = through(lambda x: gs.clip_gradient_norm(x, limit, norm_type=p), g[:1], create_graph)
        torch.testing.assert_close(
            clipped.abs().double() / limit,
            torch.full((1, 4096), expected, dtype=torch.float64),
            rtol=rtol * 200,
            atol=1e-4,
        )


def test_cases_in_which_pytorch_clips_wrongly():
    """Cases of the contract in which this package must be better than PyTorch."""
    p = torch.nn.Parameter(torch.zeros(4096, dtype=torch.float16))
    p.grad = torch.full_like(p, 2000.0)
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    assert not (p.grad.norm() > 0)
    result = through(lambda x: gs.clip_gradient_norm(x, 1.0), torch.full((4096,), 2000.0, dtype=torch.float16))
    torch.testing.assert_close(result.double().norm().item(), 1.0, rtol=1e-3, atol=0)


@paths
def test_within_the_limit_passes_bit_identical(create_graph):
    g = torch.tensor([[3.0, 4.0, -0.0], [1e-45, 0.0, -0.0], [1 / 3, 0.1, 0.7]])
    for limit in (5.0, INF, torch.tensor([5.0, 1e-45, 1.0])):
        result = through(lambda x, m=limit: gs.clip_gradient_norm(x, m, batch_dims=1), g, create_graph)
        assert torch.equal(result.view(torch.int32), g.view(torch.int32))
    result = through(lambda x: gs.clip_gradient_value(x, -0.5, 4.0), g, create_graph)
    assert torch.equal(result.view(torch.int32)[:, 2], g.view(torch.int32)[:, 2])


@paths
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, INF])
def test_zero_gradients(p, dtype, create_graph):
    g = torch.zeros(3, 4, dtype=dtype)
    g[1] = 2
    for operator in (with_norm(rule, 0.5, batch_dims=1, norm_type=p) for rule in ("clip", "normalize")):
        result = through(operator, g, create_graph)
        assert torch.equal(result[0], g[0])
        assert torch.equal(result[2], g[2])
        assert (result[1] != 0).all()


@paths
@pytest.mark.parametrize("limit", [0.0, torch.tensor(0.0), torch.zeros(3)])
@pytest.mark.parametrize("rule", ["clip", "normalize"])
def test_a_limit_of_zero_gives_zeros(rule, limit, create_graph):
    g = torch.tensor([[1.0, 2.0], [NAN, 1.0], [INF, 1.0]])
    assert torch.equal(through(with_norm(rule, limit, batch_dims=1), g, create_graph), torch.zeros(3, 2))


@paths
@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, INF])
def test_nan_and_inf_stay_in_their_group(p, create_graph):
    g = torch.tensor([[3.0, 4.0], [NAN, 1.0], [INF, 1.0], [0.3, 0.4]], dtype=torch.float64)
    for rule in ("clip", "normalize"):
        result = through(with_norm(rule, 0.6, batch_dims=1, norm_type=p), g, create_graph)
        expected = g * coefficient(rule, norms(g, 1, p), torch.tensor(0.6, dtype=torch.float64))
        torch.testing.assert_close(result[[0, 3]], expected[[0, 3]], rtol=1e-12, atol=0)
        assert result[1].isnan().all()
        assert result[2, 0].isnan()
        assert result[2, 1] == 0


@paths
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_clamped_values(dtype, create_graph):
    g = torch.tensor([[-3.0, -0.5, 0.25, 7.0], [NAN, INF, -INF, -0.0]], dtype=dtype)
    low, high = -torch.tensor([1.0, 0.25, 0.0, 2.0]), torch.tensor([[0.125], [INF]], dtype=torch.float64)
    for a, b in ((-1.0, 0.125), (None, 0.125), (-1.0, None), (low, high), (low, 5.0), (None, high), (-INF, INF)):
        result = through(lambda x, a=a, b=b: gs.clip_gradient_value(x, a, b), g, create_graph)
        lowest = torch.tensor(-INF) if a is None else torch.as_tensor(a)
        highest = torch.tensor(INF) if b is None else torch.as_tensor(b)
        expected = torch.minimum(torch.maximum(g.double(), lowest.double()), highest.double())
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(0, 40),
    p=st.sampled_from([1.0, 1.5, 2.0, INF]),
    limit=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**31),
)
def test_properties(pytestconfig, rows, columns, p, limit, seed):
    """Norms are within the limit, directions are preserved, samples are independent, both paths agree."""
    g = torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 10
    clip = lambda x: gs.clip_gradient_norm(x, limit, batch_dims=1, norm_type=p)
    result = through(clip, g)
    assert (norms(result, 1, p) <= limit * (1 + 1e-12)).all() if columns else result.numel() == 0
    torch.testing.assert_close(through(clip, g, create_graph=True), result, rtol=1e-12, atol=0)
    # A GPU sums in the memory order of a row.
    off = 0 if pytestconfig.getoption("--simulated-kernels") is None else 1e-14
    torch.testing.assert_close(through(clip, g[:1]), result[:1], rtol=off, atol=0)
    order = torch.randperm(rows)
    torch.testing.assert_close(through(clip, g[order]), result[order], rtol=off, atol=0)
    torch.testing.assert_close(through(clip, result), result, rtol=1e-12, atol=0)


@operators
@paths
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_gradients(shape, create_graph, operator):
    assert through(operator, torch.zeros(shape), create_graph).shape == shape


@pytest.mark.parametrize("rule", ["clip", "normalize"])
def test_large_groups_give_the_same_bits_with_any_number_of_threads(rule):
    g = torch.randn(3, 100_003, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            results += [through(with_norm(rule, 2.0, batch_dims=n), g) for n in (0, 1)]
    finally:
        torch.set_num_threads(threads)
    for n in (0, 1):
        assert all(torch.equal(results[n], other) for other in results[n::2])
        expected = g * coefficient(rule, norms(g, n, 2.0), torch.tensor(2.0))
        torch.testing.assert_close(results[n].double(), expected, rtol=3e-7, atol=0)


def test_chunks_of_different_scales_are_added_correctly():
    """Sums of chunks have separate scales where they would overflow or underflow."""
    g = torch.full((2, 32768 * 3), 1e-200, dtype=torch.float64)
    g[0, -1] = 1e-190
    g[1, :32768] = 1e200
    result = through(lambda x: gs.normalize_gradient(x, 1.0, batch_dims=1), g)
    expected = g * coefficient("normalize", norms(g, 1, 2.0), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)


# ---- Memory and layout ----------------------------------------------------------------------------------------------


class _Receive(torch.autograd.Function):
    """Returns the incoming gradient, and records its address."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        ctx.log.append(g.data_ptr())
        return g, None


@operators
def test_an_unshared_gradient_is_changed_in_place(operator):
    before, after = [], []
    x = torch.ones(4, 16, requires_grad=True)
    (_Receive.apply(operator(_Receive.apply(x, after)), before) * 2).sum().backward()
    assert before == after


@operators
def test_a_held_gradient_is_not_modified(operator):
    held = []
    x = torch.ones(4, 2, requires_grad=True)
    y = operator(x * 1)
    z = y * 1
    z.register_hook(held.append)
    y.register_hook(held.append)
    (z * 3).sum().backward()
    assert all(torch.equal(g, torch.full((4, 2), 3.0)) for g in held)
    g = torch.full((4, 2), 3.0)
    torch.autograd.grad(operator(x), x, g)
    assert torch.equal(g, torch.full((4, 2), 3.0))


@operators
def test_layouts_of_gradients(operator):
    base = torch.randn(4, 3, 5, 2, generator=torch.Generator().manual_seed(0))
    layouts = {
        "contiguous": base,
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "transposed": base.transpose(0, 2).contiguous().transpose(0, 2),
        "every other sample": torch.repeat_interleave(base, 2, dim=0)[::2],
        "every other element": torch.repeat_interleave(base, 2, dim=3)[..., ::2],
    }
    expected = through(operator, base)
    for name, g in layouts.items():
        assert torch.equal(g, base), name
        torch.testing.assert_close(through(operator, g), expected, rtol=2e-7, atol=0, msg=name)
    one = torch.tensor(2.0).expand(4, 3, 5, 2)
    torch.testing.assert_close(through(operator, one), through(operator, one.clone()), rtol=0, atol=0)


@operators
@pytest.mark.parametrize("compiled", [False, True])
def test_forward_is_the_same_bits_and_the_same_memory(operator, compiled):
    x = torch.tensor([[NAN, INF, -INF], [-0.0, 1e-45, 1 / 3]]).t().requires_grad_()
    y = (torch.compile(operator, backend="aot_eager", fullgraph=True) if compiled else operator)(x)
    assert torch.equal(y.contiguous().view(torch.int32), x.contiguous().view(torch.int32))
    assert y.stride() == x.stride()
    assert compiled or y.data_ptr() == x.data_ptr()


@operators
@pytest.mark.parametrize("modified", ["result", "input"])
def test_in_place_afterwards_raises_and_before_is_right(operator, modified):
    x = torch.ones(2, 3, requires_grad=True)
    a = x * 1
    a.mul_(2)
    y = operator(a)
    g = torch.arange(6.0).view(2, 3)
    (result,) = torch.autograd.grad(y, x, g, retain_graph=True)
    assert torch.equal(result, 2 * through(operator, g))

    def modify_and_use():
        (y if modified == "result" else a).mul_(2)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="modified inplace"):
        modify_and_use()


# ---- Derivatives and contexts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_second_derivatives_agree_with_finite_differences(dtype, p):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, dtype=dtype, generator=generator, requires_grad=True)
    g = torch.randn(3, 4, dtype=dtype, generator=generator, requires_grad=True)
    functions = [with_norm(rule, 0.7, batch_dims=n, norm_type=p) for rule in ("clip", "normalize") for n in (0, 1)]
    functions.append(lambda x: gs.clip_gradient_norm(x, 50.0, norm_type=p))
    for function in functions:
        assert torch.autograd.gradgradcheck(function, (x,), (g,))


def test_second_derivative_of_a_clamp():
    x = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    g = torch.tensor([-2.0, -1.0, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(gs.clip_gradient_value(x, -1.0, 0.5), x, g, create_graph=True)
    assert torch.equal(torch.autograd.grad(first.sum(), g)[0], torch.tensor([0.0, 1, 1, 1, 0], dtype=torch.float64))


def test_batched_gradients():
    x = torch.zeros(2, 3, requires_grad=True)
    g = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    for operator in OPERATORS.values():
        (result,) = torch.autograd.grad(operator(x), x, g, is_grads_batched=True)
        torch.testing.assert_close(result, torch.stack([through(operator, one) for one in g]))


@pytest.mark.parametrize("rule", ["clip", "normalize"])
def test_vmap_over_limits(rule):
    g = torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    limits = torch.rand(4, 3, dtype=torch.float64)
    function = lambda g, limit: torch.func.vjp(with_norm(rule, limit, batch_dims=1), torch.zeros_like(g))[1](g)[0]
    expected = torch.stack([through(with_norm(rule, m, batch_dims=1), one) for m, one in zip(limits, g, strict=True)])
    torch.testing.assert_close(torch.func.vmap(function)(g, limits), expected)
    x = torch.zeros(4, 3, 2, dtype=torch.float64, requires_grad=True)
    for in_dims in ((0, 0), (1, 1)):
        mapped = x if in_dims == (0, 0) else x.transpose(0, 1)
        by = limits if in_dims == (0, 0) else limits.t()
        y = torch.func.vmap(lambda x, m: with_norm(rule, m, batch_dims=1)(x), in_dims)(mapped, by)
        torch.testing.assert_close(torch.autograd.grad(y, x, g)[0], expected)
    # Only the limits are mapped: one limit for each copy of x.
    y = torch.func.vmap(lambda m: with_norm(rule, m)(x[0]))(limits[:, 0])
    expected = sum(through(with_norm(rule, float(m)), one) for m, one in zip(limits[:, 0], g, strict=True))
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0][0], expected)


def test_vmap_over_bounds():
    g = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bounds = torch.rand(4, dtype=torch.float64)
    x = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    y = torch.func.vmap(lambda x, b: gs.clip_gradient_value(x, -b, 0.5))(x, bounds)
    expected = torch.maximum(torch.minimum(g, torch.tensor(0.5)), -bounds.unsqueeze(1))
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0], expected)


class _NoReading(TorchDispatchMode):
    """Rejects operations that would synchronize: converting a tensor to a Python or C++ number."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function)
        assert "nonzero" not in str(function)
        return function(*args, **(kwargs or {}))


def test_tensor_arguments_are_never_read_by_the_host():
    """Tensor operations, which other devices use, read no value."""
    g = torch.randn(4, 3)
    per_sample, scalar = torch.rand(4), torch.tensor(0.5)
    module = gs.ClipGradientNorm(scalar, batch_dims=1)
    with _NoReading():
        for function in (
            lambda x: gs.scale_gradient(x, scalar),
            lambda x: gs.reverse_gradient(x, per_sample.view(4, 1)),
            lambda x: gs.clip_gradient_norm(x, per_sample, batch_dims=1),
            lambda x: gs.normalize_gradient(x, scalar),
            lambda x: gs.clip_gradient_value(x, -scalar, None),
            module,
        ):
            through(function, g)
            through(function, g, create_graph=True)


@operators
def test_sparse_gradients(operator):
    """An embedding's sparse gradient is changed through its values if this is equivalent."""
    weight = torch.randn(5, 2, requires_grad=True)
    indices = torch.tensor([1, 3, 1])
    g = torch.arange(6.0).view(3, 2) + 1
    torch.nn.functional.embedding(indices, weight * 1).backward(g)
    whole = weight.grad.clone()
    weight.grad = None

    def run():
        torch.nn.functional.embedding(indices, operator(weight), sparse=True).backward(g)

    if operator in (OPERATORS["clip_norm per sample"], OPERATORS["normalize per sample"]):
        with pytest.raises(TypeError, match=r"layout Sparse arrived.*sparse=False"):
            run()
    else:
        run()
        assert weight.grad.is_sparse
        torch.testing.assert_close(weight.grad.to_dense(), through(operator, whole))


def test_sparse_gradients_of_linear_operators():
    weight = torch.randn(5, 2, requires_grad=True)
    indices = torch.tensor([1, 3, 1])
    for scale in (0.5, 0.0, -1.0):
        weight.grad = None
        torch.nn.functional.embedding(indices, gs.scale_gradient(weight, scale), sparse=True).sum().backward()
        dense = torch.zeros(5, 2).index_add_(0, indices, torch.full((3, 2), scale))
        torch.testing.assert_close(weight.grad.to_dense(), dense)
    y = torch.nn.functional.embedding(indices, gs.scale_gradient(weight, torch.ones(2)), sparse=True).sum()
    with pytest.raises(TypeError, match="scale_gradient: a gradient of layout Sparse arrived"):
        y.backward()


# ---- Wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: gs.clip_gradient_norm(x, -1.0), ValueError, "max_norm must not be negative or NaN, but it is -1.0"),
        (lambda x: gs.clip_gradient_norm(x, NAN), ValueError, "max_norm must not be negative or NaN, but it is nan"),
        (lambda x: gs.normalize_gradient(x, -1), ValueError, "norm must not be negative or NaN, but it is -1"),
        (lambda x: gs.clip_gradient_norm(x, torch.tensor(-1.0)), ValueError, "max_norm must not be negative"),
        (lambda x: gs.clip_gradient_norm(x, -torch.ones(2), batch_dims=1), ValueError, "max_norm must not be negative"),
        (lambda x: gs.normalize_gradient(x, torch.tensor(NAN)), ValueError, "norm must not be negative or NaN"),
        (lambda x: gs.clip_gradient_norm(x, "1"), TypeError, "max_norm must be a real number or tensor.*type str"),
        (lambda x: gs.clip_gradient_norm(x, 1j), TypeError, "max_norm must be a real number or tensor.*type complex"),
        (lambda x: gs.clip_gradient_norm(x, torch.tensor(1j)), TypeError, "max_norm must be real.*complex64"),
        (
            lambda x: gs.clip_gradient_norm(x, 1.0, batch_dims=3),
            ValueError,
            "batch_dims must be between 0 and .* 2, but",
        ),
        (lambda x: gs.clip_gradient_norm(x, 1.0, batch_dims=-1), ValueError, "batch_dims must not be negative.* -1"),
        (lambda x: gs.normalize_gradient(x, 1.0, batch_dims=1.0), TypeError, "batch_dims must be an integer.*float"),
        (lambda x: gs.clip_gradient_norm(x, 1.0, norm_type=0), ValueError, "norm_type must be greater than 0"),
        (lambda x: gs.clip_gradient_norm(x, 1.0, norm_type=-INF), ValueError, "norm_type must be greater than 0"),
        (lambda x: gs.clip_gradient_norm(x, 1.0, norm_type="fro"), TypeError, "norm_type must be a real number"),
        (
            lambda x: gs.clip_gradient_norm(x, torch.ones(3), batch_dims=1),
            ValueError,
            r"max_norm must broadcast to the first batch_dims dimensions of x, \[2\], but its shape is \[3\]",
        ),
        (lambda x: gs.clip_gradient_norm(x, torch.ones(2)), ValueError, r"max_norm must broadcast.*\[\], but.*\[2\]"),
        (lambda x: gs.clip_gradient_norm(x, torch.ones((), requires_grad=True)), ValueError, "requires grad.*detach"),
        (lambda x: gs.normalize_gradient(x, torch.ones((), device="meta")), ValueError, "on the device of x, cpu"),
        (lambda x: gs.clip_gradient_value(x, 1.0, -1.0), ValueError, "min must not be greater than max.* 1.0 and -1.0"),
        (lambda x: gs.clip_gradient_value(x, NAN, 1.0), ValueError, "min must not be greater than max"),
        (lambda x: gs.clip_gradient_value(x, torch.tensor(1.0), 0.0), ValueError, "min must not be greater than max"),
        (lambda x: gs.clip_gradient_value(x, None, None), ValueError, "min and max are both None"),
        (lambda x: gs.clip_gradient_value(x, torch.ones(3), None), ValueError, r"min must broadcast to the shape of x"),
        (
            lambda x: gs.clip_gradient_value(x.to(torch.complex64), -1.0, 1.0),
            TypeError,
            "complex numbers have no order",
        ),
        (lambda x: gs.clip_gradient_norm(x.int(), 1.0), TypeError, r"dtype is torch\.int32"),
        (lambda x: gs.normalize_gradient(x.bool(), 1.0), TypeError, r"dtype is torch\.bool"),
        (lambda x: gs.clip_gradient_value((x, None), -1.0, 1.0), TypeError, "holds a value of type NoneType"),
        (lambda x: gs.ClipGradientNorm(-1.0), ValueError, "ClipGradientNorm: max_norm must not be negative"),
        (lambda x: gs.NormalizeGradient(1.0, batch_dims=-1), ValueError, "NormalizeGradient: batch_dims must not be"),
        (lambda x: gs.ClipGradientValue(2.0, 1.0), ValueError, "ClipGradientValue: min must not be greater than max"),
        (
            lambda x: gs.ClipGradientNorm(1.0).to("meta")(x),
            ValueError,
            "max_norm must be on the device|counters must be",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(2, 2))


def test_numbers_of_numpy():
    numpy = pytest.importorskip("numpy")
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    result = through(lambda x: gs.clip_gradient_norm(x, numpy.float32(1), batch_dims=numpy.int64(1)), g)
    torch.testing.assert_close(result, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


def test_negative_batch_dims_are_rejected_under_vmap():
    with pytest.raises(ValueError, match="batch_dims must not be negative"):
        torch.func.vmap(lambda x: gs.clip_gradient_norm(x, 1.0, batch_dims=-1))(torch.ones(2, 2))


def test_an_invalid_limit_that_cannot_be_checked_gives_nan():
    """The value of a tensor is not known while the compiler traces."""
    g = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.1, 0.1]])
    limits = torch.tensor([-1.0, NAN, 1.0])
    for rule in ("clip", "normalize"):
        function = torch.compile(with_norm(rule, limits, batch_dims=1), fullgraph=True, backend=BACKEND)
        result = through(function, g)
        assert result[:2].isnan().all()
        assert result[2].isfinite().all()
    clamp = torch.compile(lambda x, low: gs.clip_gradient_value(x, low, 0.5), fullgraph=True, backend=BACKEND)
    result = through(lambda x: clamp(x, torch.tensor([[1.0], [NAN], [0.0]])), g)
    assert result[:2].isnan().all()
    assert torch.equal(result[2], g[2])


# ---- Structures and modules -----------------------------------------------------------------------------------------


@operators
def test_structures(operator):
    a, b = torch.zeros(2, 3), torch.zeros(4, 2)
    structure = {"state": (a.requires_grad_(), b.requires_grad_()), "more": [a]}
    result = operator(structure)
    g = torch.arange(6.0).view(2, 3)
    (from_state,) = torch.autograd.grad(result["state"][0], a, g)
    assert torch.equal(from_state, through(operator, g))
    assert isinstance(result["more"], list)
    by_default = operator(defaultdict(list, x=a))
    assert type(by_default) is defaultdict
    assert by_default.default_factory is list


MODULES = {
    "clip_norm per sample": lambda: gs.ClipGradientNorm(1.0, batch_dims=1),
    "normalize": lambda: gs.NormalizeGradient(),
    "clip_value": lambda: gs.ClipGradientValue(-0.5, 0.5),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    g = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    module = MODULES[name]()
    expected = through(OPERATORS[name], g)
    torch.testing.assert_close(through(module, g), expected, rtol=0, atol=0)
    other = copy.deepcopy(module).half()
    other.load_state_dict(module.state_dict(), strict=True)
    assert all(b.dtype in (torch.float64, torch.int64) for b in other.buffers())
    torch.testing.assert_close(through(other, g), expected, rtol=0, atol=0)


def test_reprs():
    assert repr(gs.ClipGradientNorm(5, batch_dims=1)) == "ClipGradientNorm(max_norm=5.0, batch_dims=1, norm_type=2.0)"
    assert repr(gs.NormalizeGradient(norm_type=INF)) == "NormalizeGradient(norm=1.0, batch_dims=0, norm_type=inf)"
    assert repr(gs.ClipGradientValue(None, 0.5)) == "ClipGradientValue(min=None, max=0.5)"
    assert "max_norm=tensor([1., 2.])" in repr(gs.ClipGradientNorm(torch.tensor([1.0, 2.0]), batch_dims=1))


@pytest.mark.parametrize("name", MODULES)
def test_a_schedule_does_not_recompile(name):
    module = MODULES[name]()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    argument = next(iter(module.state_dict()))
    g = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    sign = -1 if argument == "min" else 1
    through(compiled, g)
    first = counter.frame_count
    for value in (0.5, 0.25, 0.125):
        getattr(module, argument).fill_(sign * value)
        torch.testing.assert_close(through(compiled, g), through(module, g), rtol=1e-6, atol=1e-7)
    assert counter.frame_count == first


def test_scalars_are_read_in_the_forward_pass():
    """A buffer acts like a number: DDP may broadcast it, and a schedule may advance, before the backward pass."""
    for module, argument in (
        (gs.ScaleGradient(0.5), "scale"),
        (gs.ReverseGradient(0.5), "scale"),
        (gs.ClipGradientNorm(0.5), "max_norm"),
        (gs.NormalizeGradient(0.5), "norm"),
        (gs.ClipGradientValue(-0.5, 0.5), "max"),
    ):
        g = torch.tensor([3.0, 4.0])
        expected = through(module, g)
        x = torch.zeros(2, requires_grad=True)
        y = module(x)
        getattr(module, argument).fill_(0.25)
        y.backward(g)
        assert torch.equal(x.grad, expected)


# ---- Counters -------------------------------------------------------------------------------------------------------

COUNTED = torch.tensor([[3.0, 4.0], [0.3, 0.4], [NAN, 1.0]])


def _count(run) -> list[int]:
    module = gs.ClipGradientNorm(1.0, batch_dims=1)
    run(module)
    assert module.seen.item() == module.counts[0].item()
    assert module.clipped.item() == module.counts[1].item()
    return module.counts.tolist()


def test_counters():
    loss = lambda module, x: (module(x * 1) * COUNTED).sum()
    zeros = torch.zeros(3, 2)
    assert _count(lambda m: through(m, COUNTED)) == [3, 2]
    assert _count(lambda m: m(zeros.requires_grad_())) == [0, 0]
    assert _count(lambda m: [through(m, COUNTED) for _ in range(4)]) == [12, 8]
    assert _count(lambda m: through(m, COUNTED, create_graph=True)) == [3, 2]
    assert _count(lambda m: torch.func.grad(lambda x: loss(m, x))(zeros)) == [3, 2]
    assert _count(lambda m: torch.func.grad(lambda x: torch.func.functional_call(m, {}, (x,)).sum())(zeros)) == [3, 3]
    batch = torch.zeros(5, 3, 2)
    assert _count(lambda m: torch.func.vmap(torch.func.grad(lambda x: loss(m, x)))(batch)) == [15, 10]
    assert _count(lambda m: torch.func.grad(lambda x: torch.func.vmap(lambda x: loss(m, x))(x).sum())(batch)) == [
        15,
        10,
    ]
    large = torch.ones(2, 40_000)
    assert _count(lambda m: through(m, large)) == [2, 2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", True), (BACKEND, False)])
def test_counters_compiled(backend, dynamic):
    def run(module):
        compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
        for _ in range(3):
            through(compiled, COUNTED)

    assert _count(run) == [9, 6]


def test_counters_of_an_ensemble_raise():
    modules = [gs.ClipGradientNorm(1.0) for _ in range(2)]
    _, buffers = torch.func.stack_module_state(modules)

    def loss(buffers, x):
        return torch.func.functional_call(modules[0], buffers, (x,)).sum()

    with pytest.raises(RuntimeError, match="vmap maps the counters"):
        torch.func.vmap(loss)(buffers, torch.zeros(2, 3))


def test_counters_are_not_in_the_state_dict():
    assert list(gs.ClipGradientNorm(1.0).state_dict()) == ["max_norm"]


def test_opcheck():
    x = torch.randn(3, 2, requires_grad=True)
    operations = torch.ops.gradscale_ext
    for operation, arguments in (
        (operations.clip_gradient_norm.default, (1.0, 1, 2.0, "", 1, None)),
        (operations.clip_gradient_norm.tensor, (torch.ones(3), 1, 2.0, "", 1, None)),
        (operations.normalize_gradient.default, (1.0, 0, 2.0)),
        (operations.normalize_gradient.tensor, (torch.ones(()), 0, 2.0)),
        (operations.clip_gradient_value.default, (-1.0, 1.0)),
        (operations.clip_gradient_value.tensor, (-torch.ones(()), torch.ones(2))),
        (operations.reverse_gradient.default, (1.0,)),
        (operations.reverse_gradient.tensor, (torch.ones(()),)),
    ):
        torch.library.opcheck(operation, (x, *arguments))


# ---- Layouts of the gradient ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [gs.clip_gradient_norm, gs.normalize_gradient])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(
    ("batch_dims", "shape"), [(0, ()), (1, (1,)), (1, (8,)), (2, (5,)), (2, (8, 1)), (2, (1, 1)), (2, (8, 5))]
)
def test_broadcast_limits_with_transposed_gradients(rule, dtype, batch_dims, shape):
    limit = torch.linspace(0.01, 0.02, math.prod(shape)).reshape(shape)
    for seed in range(20):  # a view into freed memory reads unpredictable values
        gradient = torch.randn(5, 8, 16, dtype=dtype, generator=torch.Generator().manual_seed(seed)).transpose(0, 1)
        (result,) = torch.autograd.grad(
            rule(x := torch.zeros(8, 5, 16, dtype=dtype, requires_grad=True), limit, batch_dims=batch_dims), x, gradient
        )
        wide = torch.complex128 if dtype.is_complex else torch.float64
        expected = limit.double().reshape([*shape, *[1] * (3 - batch_dims)])
        expected = gradient.to(wide) * expected / norms(gradient, batch_dims, 2)
        torch.testing.assert_close(result.to(wide), expected, rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=0)


def test_a_clipped_sequence_of_an_lstm():
    lstm = torch.nn.LSTM(16, 16)
    clip = gs.ClipGradientNorm(torch.tensor([0.01]), batch_dims=1)
    x = torch.randn(8, 5, 16, requires_grad=True)
    lstm(clip(x).transpose(0, 1))[0].sum().backward()
    torch.testing.assert_close(norms(x.grad, 1, 2).flatten().float(), torch.full((8,), 0.01))


@paths
@pytest.mark.parametrize("rule", [gs.clip_gradient_norm, gs.normalize_gradient])
@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, INF])
@pytest.mark.parametrize("scale", [2.8e-45, 1e-40, 1e-30, 1.0, 1e38])
def test_complex_numbers_of_every_size(rule, p, scale, create_graph):
    gradient = (torch.tensor([[1 - 1.5j, 2 + 1j], [0j, 3j]]) * 1.0).to(torch.complex64)
    gradient = torch.view_as_complex(torch.view_as_real(gradient) * scale)
    gradient = gradient[:, :1] if scale == 2.8e-45 else gradient  # values below the smallest number are rounded
    limit = 0.5
    result = through(lambda x: rule(x, limit, batch_dims=1, norm_type=p), gradient, create_graph)
    norm = norms(gradient, 1, p)
    factor = torch.where(norm > 0, limit / norm, 1)
    expected = gradient.to(torch.complex128) * (factor.clamp(max=1) if rule is gs.clip_gradient_norm else factor)
    torch.testing.assert_close(result.to(torch.complex128), expected, rtol=1e-5, atol=2e-45)


@paths
@pytest.mark.parametrize("rule", [gs.clip_gradient_norm, gs.normalize_gradient])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
def test_complex_numbers_whose_modulus_overflows(rule, p, create_graph):
    parts = torch.tensor([-1.425e308, 1.69e308], dtype=torch.float64)
    result = through(lambda x: rule(x, 1.0, norm_type=p), torch.view_as_complex(parts)[None], create_graph)
    expected = torch.complex(*(parts / 1e308 / torch.linalg.vector_norm(parts / 1e308)))[None]
    torch.testing.assert_close(result, expected)


@paths
@pytest.mark.parametrize("rule", [gs.clip_gradient_norm, gs.normalize_gradient])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_limit_that_is_a_negative_view(rule, dtype, shape, create_graph):
    limit = torch._neg_view(torch.full(shape, -0.5, dtype=dtype))
    result = through(lambda x: rule(x, limit, batch_dims=len(shape)), torch.ones(3, 2), create_graph)
    torch.testing.assert_close(result, torch.full((3, 2), 0.5 / (6 if not shape else 2) ** 0.5))


@paths
@pytest.mark.parametrize("rule", [gs.clip_gradient_norm, gs.normalize_gradient])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("value", [1.7e308, 1e300, 1e-300, 1e-310, complex(1e-310, 1e-310), complex(1e308, -1e308)])
def test_norms_beyond_double(rule, p, value, create_graph):
    gradient = torch.full((3,), value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)
    result = through(lambda x: rule(x, 1.0, norm_type=p), gradient, create_graph)
    if rule is gs.clip_gradient_norm and abs(value) < 1:
        assert torch.equal(result, gradient)
    else:
        parts = [math.copysign(1, part) if part else 0 for part in (complex(value).real, complex(value).imag)]
        unit = complex(*parts) / math.hypot(*parts)
        expected = torch.full_like(gradient, unit if gradient.is_complex() else unit.real) * 3.0 ** (-1 / p)
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=0)


def test_a_limit_of_infinity_has_a_second_derivative():
    x = torch.zeros(3, requires_grad=True)
    g = torch.randn(3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (result,) = torch.autograd.grad(gs.clip_gradient_norm(x, INF), x, g, create_graph=True)
    assert torch.equal(torch.autograd.grad(result.sum(), g)[0], torch.ones(3))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("layout", [lambda g: g, lambda g: torch._neg_view(-g)], ids=["contiguous", "negative"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "kind", [float, lambda limit: torch.tensor(limit, dtype=torch.float64)], ids=["number", "tensor"]
)
def test_numbers_beyond_float_are_infinite(kind, dtype, layout, create_graph):
    x = torch.zeros(3, dtype=dtype, requires_grad=True)
    g = layout(torch.tensor([2.0, -1.0, 3.0], dtype=dtype))
    infinite = torch.tensor([INF, -INF, INF], dtype=dtype)

    def gradient(y):
        return torch.autograd.grad(y, x, g, create_graph=create_graph)[0]

    assert torch.equal(gradient(gs.clip_gradient_norm(x, kind(1e40))), g)
    assert torch.equal(gradient(gs.clip_gradient_value(x, kind(-1e40), kind(1e40))), g)
    assert torch.equal(gradient(gs.scale_gradient(x, kind(1e40))), infinite)
    assert torch.equal(gradient(gs.normalize_gradient(x, kind(1e40))), infinite)
