"""scale_gradient and reverse_gradient: exact zeros, memory, arguments, structures.

test_matrix.py tests them under transforms, compilers and other contexts of PyTorch.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import pytest
import torch
import torch._dynamo.testing
from torch.autograd import forward_ad

import gradscale_ext as gs

SCALE = 1 / 3
WEIGHTS = torch.linspace(-2, 3, 5, dtype=torch.float64)
POINT = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)


def test_a_compiled_scale_of_zero_gives_exact_zeros():
    x, g = torch.zeros(4, requires_grad=True), torch.tensor([float("nan"), float("inf"), -0.0, 3.4e38])
    y = torch.compile(gs.scale_gradient, backend="aot_eager", fullgraph=True)(x, 0.0)
    assert torch.equal(torch.autograd.grad(y, x, g)[0], torch.zeros(4))


def test_forward_mode_under_no_grad_is_still_scaled():
    with torch.no_grad(), forward_ad.dual_level():
        dual = gs.scale_gradient(forward_ad.make_dual(POINT, WEIGHTS), SCALE)
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, WEIGHTS * SCALE)


@pytest.mark.parametrize("modified", ["result", "input"])
def test_in_place_with_a_later_graph_raises(modified):
    x = torch.zeros(5, dtype=torch.float64)
    y = gs.scale_gradient(x, SCALE)
    y.add_(1)  # nothing requires grad yet, so that y is an ordinary view of x
    assert torch.equal(x, torch.ones(5, dtype=torch.float64))
    source = POINT.clone().requires_grad_()

    def modify_and_use():
        (y if modified == "result" else x).copy_(source)
        (y * WEIGHTS).sum().backward()

    with pytest.raises(RuntimeError, match="modified inplace"):
        modify_and_use()


def test_in_place_on_the_result_invalidates_a_saved_input():
    x = POINT.clone().requires_grad_()
    a = x * 1
    saved = a * a
    y = gs.scale_gradient(a.detach(), SCALE)
    y.mul_(2)  # writes to the memory of `a`, which the backward pass of `saved` needs
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


# ---- The gradient's memory ------------------------------------------------------------------------------------------


def test_views_of_one_gradient_are_not_modified():
    x = torch.ones(8, requires_grad=True)
    halves = [gs.scale_gradient(x[:4], 0.5), x[4:]]
    joined = torch.cat(halves)
    joined.retain_grad()
    (joined * torch.arange(8.0)).sum().backward()
    assert torch.equal(joined.grad, torch.arange(8.0))
    assert torch.equal(x.grad, torch.arange(8.0) * torch.tensor([0.5] * 4 + [1.0] * 4))


def test_numpy_memory_is_not_modified():
    numpy = pytest.importorskip("numpy")
    memory = numpy.full(8, 3.0)

    class FromNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return torch.from_numpy(memory)

    x = torch.ones(8, dtype=torch.float64, requires_grad=True)
    FromNumpy.apply(gs.scale_gradient(x, 0.5)).sum().backward()
    assert (memory == 3.0).all()
    assert torch.equal(x.grad, torch.full((8,), 1.5, dtype=torch.float64))


# ---- Wrong arguments ------------------------------------------------------------------------------------------------


def test_arrays_as_arguments_say_how_to_convert_them():
    """Under torch.compile, NumPy scalars are arrays too."""
    numpy = pytest.importorskip("numpy")
    words = r"scale_gradient: scale must be a real number or tensor.*ndarray; convert scale: torch\.as_tensor\(scale\)"
    with pytest.raises(TypeError, match=words):
        gs.scale_gradient(torch.ones(2), numpy.ones(2))
    with pytest.raises(TypeError, match=r"norm_type must be a real number or tensor, but it is of type ndarray$"):
        gs.clip_gradient_norm(torch.ones(2), 1.0, norm_type=numpy.ones(2))
    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(lambda x, s: gs.scale_gradient(x, s) * 1, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        compiled(x, numpy.float64(0.5))
    convert = torch.compile(
        lambda x, s: gs.scale_gradient(x, torch.as_tensor(s)) * 1, backend="aot_eager", fullgraph=True
    )
    convert(x, numpy.float64(0.5)).sum().backward()
    assert x.grad.tolist() == [0.5, 0.5]


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"dtype is torch\.int32"):
        gs.scale_gradient(torch.ones(2, dtype=torch.int32), 0.5)
    with pytest.raises(TypeError, match=r"dtype is torch\.bool"):
        gs.scale_gradient(torch.ones(2, dtype=torch.bool), 0.5)
    with pytest.raises(TypeError, match="holds a value of type float"):
        gs.scale_gradient([1.0], 0.5)
    with pytest.raises(TypeError, match="type str"):
        gs.scale_gradient(torch.ones(2), "0.5")
    with pytest.raises(TypeError, match="type complex"):
        gs.scale_gradient(torch.ones(2), 0.5j)


def test_sparse_tensors_are_rejected():
    with pytest.raises(TypeError, match="x must be dense, but its layout is Sparse"):
        gs.scale_gradient(torch.eye(3).to_sparse().requires_grad_(), 0.5)


def test_subclasses_are_preserved():
    class Subclass(torch.Tensor):
        pass

    x = torch.ones(2).as_subclass(Subclass).requires_grad_()
    y = gs.scale_gradient(x, 0.5)
    assert type(y) is Subclass
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 0.5))


def _kernels(function) -> tuple[list[str], str]:
    """The kernels that Inductor writes for forward and backward, and its complete output. The C++ is not compiled."""
    from torch._inductor.utils import get_code

    x = POINT.clone().requires_grad_()
    # get_code would leave graphs without code in the caches.
    with (
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        codes = get_code(torch.compile(function, fullgraph=True), x)
    return [line for code in codes for line in code.splitlines() if " = async_compile.cpp" in line], "\n".join(codes)


@pytest.mark.any_version
def test_inductor_fuses_scale_gradient_with_its_neighbours():
    """Forward and backward have as many kernels as without the operator, and do not call it by name."""
    plain, _ = _kernels(lambda x: ((x * x).sin() * WEIGHTS).sum())
    assert len(plain) >= 2
    for scale in (SCALE, torch.tensor(SCALE, dtype=torch.float64)):
        ours, code = _kernels(lambda x, scale=scale: (gs.scale_gradient(x * x, scale).sin() * WEIGHTS).sum())
        assert len(ours) == len(plain)
        assert "gradscale" not in code
        assert str(SCALE)[:6] in code or isinstance(scale, torch.Tensor)


# ---- Tensor scales --------------------------------------------------------------------------------------------------

TENSOR_SCALE = torch.tensor([0.5, 0.0, -2.0, 1.0, 0.25], dtype=torch.float64)


MAPPED = {
    "x and scale mapped": lambda: torch.func.grad(
        lambda x: (torch.func.vmap(gs.scale_gradient)(x * x, TENSOR_SCALE) * WEIGHTS).sum()
    )(POINT),
    "only the scale mapped": lambda: torch.func.grad(
        lambda x: (torch.func.vmap(gs.scale_gradient, (None, 0))(x * x, TENSOR_SCALE).diagonal() * WEIGHTS).sum()
    )(POINT),
}


@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap_over_scales(mapped):
    torch.testing.assert_close(MAPPED[mapped](), TENSOR_SCALE * 2 * WEIGHTS * POINT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("create_graph", [False, True])
def test_zeros_of_a_tensor_scale_are_exact(create_graph):
    """With create_graph=True, tensor operations compute the gradient, and their 0 * inf would be NaN."""
    x, g = torch.zeros(2, 4, requires_grad=True), torch.tensor([[float("nan"), float("inf"), -float("inf"), 3e38]] * 2)
    scaled = gs.scale_gradient(x, torch.tensor([[0.0], [1.0]]))
    (result,) = torch.autograd.grad(scaled, x, g, create_graph=create_graph)
    assert torch.equal(result[0], torch.zeros(4))
    torch.testing.assert_close(result[1], g[1], rtol=0, atol=0, equal_nan=True)


#: Operators with a tensor [4] or [4, 3] as argument.
WITH_TENSORS = {
    "scale_gradient": lambda x, a, b: gs.scale_gradient(x, b),
    "reverse_gradient": lambda x, a, b: gs.reverse_gradient(x, b),
    "clip_gradient_norm": lambda x, a, b: gs.clip_gradient_norm(x, a, batch_dims=1),
    "clip_gradient_value": lambda x, a, b: gs.clip_gradient_value(x, -b, b),
    "normalize_gradient": lambda x, a, b: gs.normalize_gradient(x, a, batch_dims=1),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("operator", WITH_TENSORS)
def test_arguments_made_in_inference_mode(operator, create_graph):
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    a, b = torch.rand(4, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)
    with torch.inference_mode():
        arguments = a.clone(), b.clone()
    results = []
    for given in ((a, b), arguments):
        y = WITH_TENSORS[operator](x * x, *given)
        (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=create_graph)
        results.append(torch.autograd.grad(gradient.square().sum(), x) if create_graph else gradient)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_tensor_scale_that_changes_before_the_backward_pass_raises():
    x = POINT.clone().requires_grad_()
    scale = TENSOR_SCALE.clone()
    y = gs.scale_gradient(x, scale).sum()
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_wrong_tensor_scales():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="requires grad"):
        gs.scale_gradient(x, torch.ones((), requires_grad=True))
    with pytest.raises(ValueError, match="requires grad"):
        gs.reverse_gradient(x, torch.ones((), requires_grad=True))
    with pytest.raises(ValueError, match=r"broadcast to the shape of x, \[2, 3\], but its shape is \[2\]"):
        gs.scale_gradient(x, torch.ones(2))
    with pytest.raises(ValueError, match=r"\[1, 2, 3\]"):
        gs.scale_gradient(x, torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match="on the device of x, cpu, but it is on meta"):
        gs.scale_gradient(x, torch.ones((), device="meta"))
    with pytest.raises(TypeError, match="complex64"):
        gs.scale_gradient(x, torch.ones((), dtype=torch.complex64))


# ---- Reversal, structures, modules ----------------------------------------------------------------------------------


class State(NamedTuple):
    hidden: torch.Tensor
    cell: torch.Tensor


@pytest.mark.parametrize("compiled", [False, True])
def test_structures_are_preserved(compiled):
    function = (
        torch.compile(lambda x: gs.scale_gradient(x, 0.5), backend="aot_eager", fullgraph=True)
        if compiled
        else (lambda x: gs.scale_gradient(x, 0.5))
    )
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    structure = {"lstm": (a, b), "state": State(a, b), "list": [a, [b]]}
    result = function(structure)
    assert isinstance(result["lstm"], tuple)
    assert isinstance(result["state"], State)
    assert isinstance(result["list"], list)
    assert isinstance(result["list"][1], list)
    sum(t.sum() for t in (*result["lstm"], *result["state"], result["list"][0], result["list"][1][0])).backward()
    assert torch.equal(a.grad, torch.full((2,), 1.5))
    assert torch.equal(b.grad, torch.full((3,), 1.5))
    assert list(gs.scale_gradient(OrderedDict(z=a, y=b), 0.5)) == ["z", "y"]
    by_default = gs.clip_gradient_norm(defaultdict(list, x=a), 0.5)
    assert type(by_default) is defaultdict
    assert by_default.default_factory is list


def test_other_leaves_are_rejected():
    with pytest.raises(TypeError, match="holds a value of type NoneType"):
        gs.scale_gradient((torch.ones(1), None), 0.5)
    with pytest.raises(TypeError, match=r"dtype is torch\.int64"):
        gs.reverse_gradient([torch.ones(1, dtype=torch.int64)])


# ---- Found by the fuzzer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "operator", [lambda x: gs.scale_gradient(x, torch.ones(1)), lambda x: gs.reverse_gradient(x, -torch.ones(1))]
)
def test_a_tensor_of_ones_does_not_change_complex_gradients(operator, create_graph):
    gradient = torch.tensor([complex("inf+1j"), complex(1, -0.0), complex("2+nanj")], dtype=torch.complex64).conj()
    x = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    (result,) = torch.autograd.grad(operator(x), x, gradient, create_graph=create_graph)
    result, expected = (torch.view_as_real(g.detach().resolve_conj()) for g in (result, gradient))
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result.signbit(), expected.signbit())


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_gradients_of_eight_bits(dtype, scale):
    x = torch.tensor([1.0, -2.0], dtype=dtype, requires_grad=True)
    gs.scale_gradient(x, scale).float().sum().backward()
    assert x.grad.float().tolist() == [0.5, 0.5]


@pytest.mark.parametrize("scale", [3e-6, torch.tensor(3e-6), torch.tensor([3e-6])], ids=["number", "tensor", "vector"])
@pytest.mark.parametrize("owned", [True, False])
def test_a_scale_keeps_its_digits_for_half_complex_gradients(scale, owned):
    x = torch.zeros(1, dtype=torch.complex32, requires_grad=True)
    y = gs.scale_gradient(x, scale)
    incoming = torch.tensor([complex(1000, torch.inf)], dtype=torch.complex32)
    (gradient,) = torch.autograd.grad(y.clone() if owned else y, x, incoming)
    real, imaginary = torch.view_as_real(gradient)[0].tolist()
    assert real == torch.tensor(3e-3).half().item()
    assert imaginary == torch.inf


def test_symbolic_trace_keeps_the_operators():
    traced = torch.fx.symbolic_trace(lambda x: gs.reverse_gradient({"h": gs.scale_gradient(x, 0.5)}, 3.0)["h"] * 2)
    x = torch.ones(2, requires_grad=True)
    traced(x).sum().backward()
    assert x.grad.tolist() == [-3.0, -3.0]


COMPILED_AUTOGRAD = {
    "scale_gradient": lambda x: gs.scale_gradient(x, 0.5),
    "scale_gradient by a tensor": lambda x: gs.scale_gradient(x, torch.tensor([0.0, 2.0, 3.0])),
    "reverse_gradient": lambda x: gs.reverse_gradient(x, 0.5),
    "clip_gradient_norm": lambda x: gs.clip_gradient_norm(x, 0.5, batch_dims=1),
    "normalize_gradient": lambda x: gs.normalize_gradient(x, torch.tensor([0.5]), batch_dims=1, norm_type=1.0),
    "clip_gradient_value": lambda x: gs.clip_gradient_value(x, -0.1, torch.tensor([0.1, 0.2, 0.3])),
}


@pytest.mark.untraced
@pytest.mark.parametrize("name", COMPILED_AUTOGRAD)
def test_compiled_autograd(name):
    """Compiled autograd traces the backward passes of two eager calls, which get different gradients."""
    torch._dynamo.reset()
    for seed in (0, 1):
        gradient = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        expected, x = (torch.zeros(2, 3, requires_grad=True) for _ in range(2))
        COMPILED_AUTOGRAD[name](expected).backward(gradient)
        y = COMPILED_AUTOGRAD[name](x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward(gradient)
        torch.testing.assert_close(x.grad, expected.grad)
