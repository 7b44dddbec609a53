"""All gradient-flow operators, and the norms of gradients. fuzz/test_flow.py checks values, layouts and dtypes."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from contexts import BACKEND
from digests import OPERATORS, through
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_ext as gs

INF = math.inf
NAN = math.nan
ALL_OPERATORS = OPERATORS | {
    "scale": lambda x: gs.scale_gradient(x, 0.5),
    "scale by a tensor": lambda x: gs.scale_gradient(x, torch.tensor([-0.5])),
    "reverse": lambda x: gs.reverse_gradient(x, 0.25),
}
operators = pytest.mark.parametrize("operator", ALL_OPERATORS.values(), ids=ALL_OPERATORS.keys())
# With create_graph=True, tensor operations compute the gradient, otherwise the fused kernels do.
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
def test_within_the_limit_passes_bit_identical(create_graph):
    g = torch.tensor([[3.0, 4.0, -0.0], [1e-45, 0.0, -0.0], [1 / 3, 0.1, 0.7]])
    for limit in (5.0, INF, torch.tensor([5.0, 1e-45, 1.0])):
        result = through(lambda x, m=limit: gs.clip_gradient_norm(x, m, batch_dims=1), g, create_graph)
        assert torch.equal(result.view(torch.int32), g.view(torch.int32))
    result = through(lambda x: gs.clip_gradient_value(x, -0.5, 4.0), g, create_graph)
    assert torch.equal(result.view(torch.int32)[:, 2], g.view(torch.int32)[:, 2])


@paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_small_element_next_to_a_large_one_counts_with_p_below_1(dtype, create_graph):
    g = torch.tensor([3.8e33, 7.3, 2.6e-15, -1e-28], dtype=dtype)
    truth = 0.5 * g.to(torch.complex128) / g.abs().double().pow(0.1).sum().pow(10)
    for layout in (g, g.conj().clone().conj()):
        x = torch.zeros(4, dtype=dtype, requires_grad=True)
        y = gs.clip_gradient_norm(x, 0.5, norm_type=0.1)
        (found,) = torch.autograd.grad(y, x, layout, create_graph=create_graph)
        torch.testing.assert_close(found.to(torch.complex128), truth, rtol=1e-6, atol=1e-44)


@paths
@pytest.mark.parametrize("p", [300.0, 520.0, 5000.0, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_large_p(dtype, p, create_graph):
    g = torch.tensor([1e-3, 1020.0, -3.0, 1019.0], dtype=dtype)
    g = g * (1 + 1j) if dtype.is_complex else g
    largest = g.abs().double().max()
    norm = largest * (g.abs().double() / largest).pow(p).sum().pow(1 / p)
    x = torch.zeros(4, dtype=dtype, requires_grad=True)
    y = gs.normalize_gradient(x, 1.0, norm_type=p)
    (unit,) = torch.autograd.grad(y, x, g, create_graph=create_graph)
    torch.testing.assert_close(unit, (g / norm).to(dtype))
    (found,) = torch.autograd.grad(gs.reference.normalize_gradient(x, 1.0, norm_type=p), x, g)
    torch.testing.assert_close(found, (g / norm).to(dtype))
    parameters = [torch.zeros(4, dtype=dtype, requires_grad=True) for _ in range(2)]
    for parameter, factor in zip(parameters, (1.0, 1e-3), strict=True):
        parameter.grad = factor * g
    statistics = gs.clip_gradients_(parameters, 1.0, norm_type=p)
    torch.testing.assert_close(statistics.norm, torch.stack([norm, 1e-3 * norm]), rtol=1e-6, atol=0)
    torch.testing.assert_close(parameters[0].grad, (g / norm).to(dtype), rtol=2e-6, atol=0)


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
    """Large groups are summed in chunks of 32768 elements. A chunk whose sum would overflow or underflow is scaled."""
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


def test_second_derivative_of_a_clamp():
    x = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    g = torch.tensor([-2.0, -1.0, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(gs.clip_gradient_value(x, -1.0, 0.5), x, g, create_graph=True)
    assert torch.equal(torch.autograd.grad(first.sum(), g)[0], torch.tensor([0.0, 1, 1, 1, 0], dtype=torch.float64))


def test_batched_gradients():
    x = torch.zeros(2, 3, requires_grad=True)
    g = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    for operator in ALL_OPERATORS.values():
        (result,) = torch.autograd.grad(operator(x), x, g, is_grads_batched=True)
        torch.testing.assert_close(result, torch.stack([through(operator, one) for one in g]))


@pytest.mark.parametrize("rule", ["clip", "normalize"])
def test_vmap_over_limits_alone(rule):
    g = torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    limits = torch.rand(4, 3, dtype=torch.float64)
    x = torch.zeros(4, 3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.func.vmap(lambda m: with_norm(rule, m)(x[0]))(limits[:, 0])
    expected = sum(through(with_norm(rule, float(m)), one) for m, one in zip(limits[:, 0], g, strict=True))
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0][0], expected)


class _NoReading(TorchDispatchMode):
    """Rejects operations that would synchronize: converting a tensor to a Python or C++ number."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function)
        assert "nonzero" not in str(function)
        return function(*args, **(kwargs or {}))


def test_tensor_arguments_are_never_read_by_the_host():
    """Under the mode, tensor operations compute the gradient, as on devices without kernels."""
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
    """The operator is applied to the values of a sparse gradient, or raises if the dense result would differ."""
    weight = torch.randn(5, 2, requires_grad=True)
    indices = torch.tensor([1, 3, 1])
    g = torch.arange(6.0).view(3, 2) + 1
    torch.nn.functional.embedding(indices, weight * 1).backward(g)
    whole = weight.grad.clone()
    weight.grad = None

    def run():
        torch.nn.functional.embedding(indices, operator(weight), sparse=True).backward(g)

    if operator in (
        ALL_OPERATORS[name] for name in ("clip_norm per sample", "normalize per sample", "scale by a tensor")
    ):
        with pytest.raises(TypeError, match=r"its layout is Sparse"):
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
    with pytest.raises(TypeError, match="scale_gradient: the gradient must be dense here, but its layout is Sparse"):
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
        (
            lambda x: gs.clip_gradient_norm(x, 1.0, batch_dims=-1),
            ValueError,
            "batch_dims must be .*at least 0, but it is -1",
        ),
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
        (
            lambda x: gs.clip_gradient_value((x, None), -1.0, 1.0),
            TypeError,
            r"x\[1\] must be a tensor.* is of type NoneType",
        ),
        (lambda x: gs.ClipGradientNorm(-1.0), ValueError, "ClipGradientNorm: max_norm must not be negative"),
        (
            lambda x: gs.NormalizeGradient(1.0, batch_dims=-1),
            ValueError,
            "NormalizeGradient: batch_dims must be .*at least 0",
        ),
        (lambda x: gs.ClipGradientValue(2.0, 1.0), ValueError, "ClipGradientValue: min must not be greater than max"),
        (
            lambda x: gs.ClipGradientNorm(1.0).to("meta")(x),
            ValueError,
            "max_norm must be on the device",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(2, 2))


def test_numbers_of_other_types():
    numpy = pytest.importorskip("numpy")
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    result = through(lambda x: gs.clip_gradient_norm(x, numpy.float32(1), batch_dims=numpy.int64(1)), g)
    torch.testing.assert_close(result, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
    assert torch.equal(through(lambda x: gs.reverse_gradient(x, torch.tensor(2, dtype=torch.uint8)), g), -2 * g)


def test_negative_batch_dims_are_rejected_under_vmap():
    with pytest.raises(ValueError, match="batch_dims must be an integer of at least 0"):
        torch.func.vmap(lambda x: gs.clip_gradient_norm(x, 1.0, batch_dims=-1))(torch.ones(2, 2))


def test_an_invalid_limit_that_cannot_be_checked_gives_nan():
    """The value of a tensor is not known while the compiler traces."""
    g = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.1, 0.1]])
    limits = torch.tensor([-1.0, NAN, 1.0])
    for rule in ("clip", "normalize"):
        function = torch.compile(with_norm(rule, limits, batch_dims=1), fullgraph=True, backend="aot_eager")
        result = through(function, g)
        assert result[:2].isnan().all()
        assert result[2].isfinite().all()
    clamp = torch.compile(lambda x, low: gs.clip_gradient_value(x, low, 0.5), fullgraph=True, backend="aot_eager")
    result = through(lambda x: clamp(x, torch.tensor([[1.0], [NAN], [0.0]])), g)
    assert result[:2].isnan().all()
    assert torch.equal(result[2], g[2])


# ---- Structures and modules -----------------------------------------------------------------------------------------


MODULES = {
    "clip_norm per sample": lambda: gs.ClipGradientNorm(1.0, batch_dims=1),
    "normalize": lambda: gs.NormalizeGradient(),
    "clip_value": lambda: gs.ClipGradientValue(-0.5, 0.5),
    "scale": lambda: gs.ScaleGradient(0.5),
    "reverse": lambda: gs.ReverseGradient(0.25),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    g = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    module = MODULES[name]()
    expected = through(ALL_OPERATORS[name], g)
    torch.testing.assert_close(through(module, g), expected, rtol=0, atol=0)
    other = copy.deepcopy(module).half()
    other.load_state_dict(module.state_dict(), strict=True)
    assert all(b.dtype in (torch.float64, torch.int64) for b in other.buffers())
    torch.testing.assert_close(through(other, g), expected, rtol=0, atol=0)


def test_reprs():
    assert "scale=" in repr(gs.ScaleGradient(0.5))
    assert repr(gs.ClipGradientNorm(5, batch_dims=1)) == "ClipGradientNorm(max_norm=5.0, batch_dims=1, norm_type=2.0)"
    assert repr(gs.NormalizeGradient(norm_type=INF)) == "NormalizeGradient(norm=1.0, batch_dims=0, norm_type=inf)"
    assert repr(gs.ClipGradientValue(None, 0.5)) == "ClipGradientValue(min=None, max=0.5)"
    assert "max_norm=tensor([1., 2.])" in repr(gs.ClipGradientNorm(torch.tensor([1.0, 2.0]), batch_dims=1))


@pytest.mark.compiled
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


NORM_TYPES = [2.0, 1.0, 3.0, 0.5, 1.5, 2.0, 300.0, 5000.0, INF, 0.1, *(1 + k / 8 for k in range(10))]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(
    "limit", [0.5, "varies", torch.tensor([0.1, 2.0, 0.5, 0.0])], ids=["number", "varies", "tensor"]
)
@pytest.mark.parametrize("function", [gs.clip_gradient_norm, gs.normalize_gradient])
def test_a_norm_type_that_varies_compiles_two_graphs(function, limit, dtype):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    operator = lambda x, limit, p: function(x, limit, batch_dims=1, norm_type=p)
    compiled = torch.compile(operator, backend=counter, fullgraph=True)
    g = torch.randn(4, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    g[1] = 0
    for k, p in enumerate(NORM_TYPES):
        of_call = 0.1 * (k + 1) if limit == "varies" else limit
        expected = through(lambda x, m=of_call, p=p: operator(x, m, p), g)
        torch.testing.assert_close(through(lambda x, m=of_call, p=p: compiled(x, m, p), g), expected)
    assert counter.frame_count <= 2


@pytest.mark.filterwarnings("ignore")
def test_second_derivatives_of_a_norm_type_that_varies():
    weights = torch.tensor([3.0, 0.0, -4.0, 1.0], dtype=torch.float64)

    def second(x, p):
        first = torch.func.grad(lambda x: (gs.clip_gradient_norm(x * x, 0.5, norm_type=p) * weights * x).sum())
        return torch.func.grad(lambda x: first(x).square().sum())(x)

    compiled = torch.compile(second, backend="aot_eager", fullgraph=True)
    x = torch.tensor([0.5, 2.0, 0.0, -1.0], dtype=torch.float64)
    for p in (2.0, 3.0, 1.5, 2.5, 1.0):
        torch.testing.assert_close(compiled(x, p), second(x, p))


def test_scalars_are_read_in_the_forward_pass():
    """DDP or a schedule may change the buffer before the backward pass, which uses the value of the forward pass."""
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


# ---- Several calls in compiled graphs --------------------------------------------------------------------------------

INPUT = torch.linspace(-1, 2, 20).view(5, 4)


def _two_calls(clip, compiled):
    step = compiled(lambda x: clip((2 * x).tanh()))
    return lambda x: step(step(x)).sum().backward()


def _two_graphs(clip, compiled):
    step = compiled(lambda x: clip((2 * x).tanh()))

    def run(x):
        losses = [step(x).sum(), step(3 * x).sum()]
        for loss in losses:
            loss.backward()

    return run


def _graph_break(clip, compiled):
    def step(x):
        x = clip((2 * x).tanh())
        torch._dynamo.graph_break()
        return clip((3 * x).sin())

    function = compiled(step, fullgraph=False)
    return lambda x: function(x).sum().backward()


def _two_backward_passes(clip, compiled):
    step = compiled(lambda x: clip((2 * x).tanh()))

    def run(x):
        loss = step(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    return run


def _equal_calls(clip, compiled):
    step = compiled(lambda x: clip(x) + clip(x) + clip(2 * x))
    return lambda x: step(x).sum().backward()


def _steps_of_unroll(clip, compiled):
    """The last hidden state gets no gradient."""
    recurrent = compiled(lambda hidden, action: ({"value": hidden.sum(1)}, clip((2 * hidden + action).tanh())))

    def run(x):
        outputs = gs.unroll(lambda x: ({"value": x.sum(1)}, x), recurrent, x, torch.ones(5, 3, 1))
        sum(value.sum() for value in outputs["value"]).backward()

    return run


def _checkpointed(clip, compiled):
    step = compiled(lambda x: torch.utils.checkpoint.checkpoint(lambda x: clip((2 * x).tanh()), x, use_reentrant=False))
    return lambda x: step(step(x)).sum().backward()


def _copied_module(clip, compiled):
    steps = [compiled(copy.deepcopy(clip)), compiled(clip)]
    return lambda x: steps[1](2 * steps[0](2 * steps[1](2 * x))).sum().backward()


def _two_batch_sizes(clip, compiled):
    step = compiled(lambda x: clip((2 * x).tanh()))
    return lambda x: (step(step(x)).sum() + step(step(x[:3])).sum() + step(step(x[:2])).sum()).backward()


def _mapped_calls(clip, compiled):
    step = compiled(torch.func.vmap(lambda x: clip((2 * x).tanh().unsqueeze(0))))
    return lambda x: step(step(x)[:, 0]).sum().backward()


def _gradients_in_the_function(clip, compiled):
    step = compiled(lambda x: clip(torch.func.grad(lambda x: clip(x**3).sum())(x)))
    return lambda x: step(step(x)).sum().backward()


#: Functions of a module and of a function that compiles. They return a function that runs backward passes to an input.
COMPILED_CALLS = (
    _two_calls,
    _two_graphs,
    _graph_break,
    _two_backward_passes,
    _equal_calls,
    _steps_of_unroll,
    _checkpointed,
    _copied_module,
    _two_batch_sizes,
    _mapped_calls,
    _gradients_in_the_function,
)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("calls", "backend"),
    [*((calls, "aot_eager") for calls in COMPILED_CALLS), (_two_calls, BACKEND), (_equal_calls, BACKEND)],
)
def test_compiled_calls(calls, backend):
    """Gradients equal eager mode."""
    gradients = []
    for compiled in (lambda function, **_: function, functools.partial(_compiled, backend=backend)):
        x, clip = INPUT.clone().requires_grad_(), gs.ClipGradientNorm(0.3, batch_dims=1)
        calls(clip, compiled)(x)
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def _compiled(function, *, backend, fullgraph=True):
    return torch.compile(function, backend=backend, fullgraph=fullgraph)


def test_an_ensemble():
    """Each member has its own limit."""
    modules = [gs.ClipGradientNorm(limit) for limit in (1.0, 2.0)]
    _, buffers = torch.func.stack_module_state(modules)

    def loss(x, buffers):
        return (3 * torch.func.functional_call(modules[0], buffers, (x,))).sum()

    gradient = torch.func.vmap(torch.func.grad(loss))(torch.zeros(2, 4), buffers)
    torch.testing.assert_close(gradient, torch.tensor([[0.5], [1.0]]).expand(2, 4))


def test_opcheck():
    x = torch.randn(3, 2, requires_grad=True)
    operations = torch.ops.gradscale_ext
    for operation, arguments in (
        (operations.clip_gradient_norm.default, (1.0, 1, 2.0, "", 1)),
        (operations.clip_gradient_norm.tensor, (torch.ones(3), 1, 2.0, "", 1)),
        (operations.normalize_gradient.default, (1.0, 0, 2.0)),
        (operations.normalize_gradient.tensor, (torch.ones(()), 0, 2.0)),
        (operations.clip_gradient_value.default, (-1.0, 1.0)),
        (operations.clip_gradient_value.tensor, (-torch.ones(()), torch.ones(2))),
        (operations.scale_gradient.default, (0.5,)),
        (operations.scale_gradient.tensor, (torch.ones(3, 1),)),
        (operations.reverse_gradient.default, (1.0,)),
        (operations.reverse_gradient.tensor, (torch.ones(()),)),
    ):
        torch.library.opcheck(operation, (x, *arguments))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("layout", [lambda g: g, lambda g: torch._neg_view(-g)], ids=["contiguous", "negative"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "kind", [float, lambda limit: torch.tensor(limit, dtype=torch.float64)], ids=["number", "tensor"]
)
def test_arguments_beyond_float32(kind, dtype, layout, create_graph):
    x = torch.zeros(3, dtype=dtype, requires_grad=True)
    g = layout(torch.tensor([2.0, -1.0, 3.0], dtype=dtype))
    infinite = torch.tensor([INF, -INF, INF], dtype=dtype)

    def gradient(y):
        return torch.autograd.grad(y, x, g, create_graph=create_graph)[0]

    assert torch.equal(gradient(gs.clip_gradient_norm(x, kind(1e40))), g)
    assert torch.equal(gradient(gs.clip_gradient_value(x, kind(-1e40), kind(1e40))), g)
    assert torch.equal(gradient(gs.scale_gradient(x, kind(1e40))), infinite)
    assert torch.equal(gradient(gs.normalize_gradient(x, kind(1e40))), infinite)


def _eager_gradient(operator, x, g, create_graph=False):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(operator(x), x, g, create_graph=create_graph)[0].detach()


GRADIENT_PATHS = {
    "kernel": _eager_gradient,
    "operations": functools.partial(_eager_gradient, create_graph=True),
    "transform": lambda operator, x, g: torch.func.vjp(operator, x)[1](g)[0],
    "compiled": lambda operator, x, g: _eager_gradient(_compiled(operator, backend="aot_eager"), x, g),
}
every_gradient_path = pytest.mark.parametrize(
    "path", ["kernel", "operations", "transform", pytest.param("compiled", marks=pytest.mark.compiled)]
)


@every_gradient_path
@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_limits_are_float64_numbers(dtype, kind, path):
    """A limit may be out of the gradient's range. Only the result is rounded to the gradient's dtype."""
    largest = torch.finfo(dtype).max
    for rule, elements, limit in (
        ("clip", [largest, largest], 1.2 * largest),
        ("clip", [largest, largest], 1.5 * largest),
        ("clip", [1.0, 2.0], 1e39),
        ("clip", [2.0, 0.0], 1e-50),
        ("clip", [1e30, 1e-30], 1e-42),
        ("normalize", [1.0, -1e-5, 0.0], 1e39),
        ("normalize", [1e-30, 3e-40], 1e40),
        ("normalize", [2.0], 1e39),
        ("normalize", [1e30, 1.0], 1e-42),
    ):
        g = torch.tensor(elements).to(dtype)
        given = torch.tensor(limit, dtype=torch.float64) if kind == "tensor" else limit
        operator = with_norm(rule, given)
        found = GRADIENT_PATHS[path](operator, torch.zeros_like(g), g)
        for module in (gs.reference.clip_gradient_norm, gs.reference.normalize_gradient):
            if module.__name__.startswith(rule):
                torch.testing.assert_close(
                    _eager_gradient(lambda x, f=module, m=given: f(x, m), torch.zeros_like(g), g), found
                )
        wide = g.to(torch.complex128 if dtype.is_complex else torch.float64)
        expected = (wide * coefficient(rule, norms(g, 0, 2.0), torch.tensor(limit, dtype=torch.float64))).to(dtype)
        smallest = torch.finfo(dtype).smallest_normal
        torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=2e-7 * smallest)


@every_gradient_path
def test_bounds_are_float64_numbers(path):
    """Equal numbers in float32 may be different bounds."""
    g = torch.tensor([2.0, 2.0, INF, 0.0])
    low = torch.tensor([1.0 + 1e-12, 1.0, -1e40, -1e40], dtype=torch.float64)
    high = torch.tensor([1.0, 1.0 + 1e-12, 1e39, 1e40], dtype=torch.float64)
    found = GRADIENT_PATHS[path](lambda x: gs.clip_gradient_value(x, low, high), torch.zeros(4), g)
    torch.testing.assert_close(found, torch.tensor([NAN, 1.0, INF, 0.0]), rtol=0, atol=0, equal_nan=True)


@every_gradient_path
@pytest.mark.parametrize("scale", [1e-50, 1e-42, 1e40, 1 / 3])
def test_scales_are_rounded_to_the_type_of_the_product(path, scale):
    g = torch.tensor([0.0, 2.0, INF, 3e38])
    rounded = torch.tensor(scale, dtype=torch.float64).float()
    expected = torch.where(rounded == 0, 0, g * rounded)
    for kind in (scale, torch.tensor(scale, dtype=torch.float64), torch.tensor([scale], dtype=torch.float64)):
        found = GRADIENT_PATHS[path](lambda x, s=kind: gs.scale_gradient(x, s), torch.zeros(4), g)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "operator",
    [
        gs.clip_gradient_norm,
        gs.normalize_gradient,
        gs.reference.clip_gradient_norm,
        gs.reference.normalize_gradient,
    ],
)
@pytest.mark.parametrize("view", [lambda g: g, lambda g: torch._neg_view(-g)], ids=["contiguous", "negative"])
def test_small_elements_beside_large_ones_keep_their_digits(operator, view, create_graph):
    """A quotient of element and norm is subnormal here, and the result is not."""
    x = torch.zeros(2, requires_grad=True)
    gradient = torch.tensor([1e37, 3.3e-3])
    (found,) = torch.autograd.grad(operator(x, 1e4), x, view(gradient), create_graph=create_graph)
    torch.testing.assert_close(found.double(), gradient.double() * (1e4 / gradient.double().norm()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, 300.0, math.inf])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("source", [gs, gs.reference], ids=["operator", "reference"])
def test_moduli_beyond_float64(source, norm_type, create_graph):
    """1.5e308 (1 + i) has finite parts, and a modulus that no float64 holds."""
    x = torch.zeros(1, dtype=torch.complex128, requires_grad=True)
    gradient = torch.tensor([complex(1.5e308, -1.5e308)], dtype=torch.complex128)
    clipped = source.clip_gradient_norm(x, 1e308, norm_type=norm_type)
    (found,) = torch.autograd.grad(clipped, x, gradient, create_graph=create_graph)
    expected = torch.tensor([complex(1, -1)], dtype=torch.complex128) * (1e308 / math.sqrt(2))
    torch.testing.assert_close(torch.view_as_real(found), torch.view_as_real(expected), rtol=1e-13, atol=0)
