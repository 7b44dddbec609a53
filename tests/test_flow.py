"""scale_gradient and reverse_gradient: the rules of the contract. The contexts are in test_matrix.py."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch._dynamo.testing
from torch.autograd import forward_ad

import gradscale_ext as gs

SCALE = 1 / 3
WEIGHTS = torch.linspace(-2, 3, 5, dtype=torch.float64)
POINT = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)


def model(x: torch.Tensor) -> torch.Tensor:
    """sum of w * x^2, with the gradient of x^2 scaled: the true gradient is SCALE * 2 w x."""
    return (gs.scale_gradient(x * x, SCALE) * WEIGHTS).sum()


def gradient_of_model(x: torch.Tensor) -> torch.Tensor:
    return SCALE * 2 * WEIGHTS * x


def gradient(function, x: torch.Tensor = POINT) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    function(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, 3.4e38]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_forward_is_the_same_bits_and_the_same_memory(dtype, compiled):
    x = torch.tensor(SPECIAL, dtype=dtype).requires_grad_()
    function = torch.compile(gs.scale_gradient, backend="aot_eager", fullgraph=True) if compiled else gs.scale_gradient
    y = function(x, SCALE)
    assert y.dtype == x.dtype
    assert torch.equal(_bits(y), _bits(x))
    if not compiled:
        assert y.data_ptr() == x.data_ptr()


def _bits(x: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    return real.detach().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[real.dtype.itemsize])


def test_strides_are_kept():
    x = torch.randn(4, 6, 2).transpose(0, 2)[:, ::2].requires_grad_()
    y = gs.scale_gradient(x, 0.5)
    assert y.stride() == x.stride()
    assert y.shape == x.shape
    y.sum().backward()


@pytest.mark.parametrize("scale", [0.5, -2.0, 3, 1e-3, 0.0, 1.0, float("inf")])
def test_gradient_is_multiplied(scale):
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    g = torch.randn(7, dtype=torch.float64)
    gs.scale_gradient(x, scale).backward(g)
    assert torch.equal(x.grad, g * scale)


@pytest.mark.parametrize(("compiled", "create_graph"), [(False, False), (False, True), (True, False)])
def test_zero_gives_exact_zeros_also_for_inf_and_nan(create_graph, compiled):
    x = torch.zeros(len(SPECIAL), requires_grad=True)
    function = torch.compile(gs.scale_gradient, fullgraph=True) if compiled else gs.scale_gradient
    y = function(x, 0.0)
    (g,) = torch.autograd.grad(y, x, torch.tensor(SPECIAL), create_graph=create_graph)
    assert torch.equal(g, torch.zeros(len(SPECIAL)))


def test_one_passes_the_gradient_bit_identical():
    x = torch.zeros(len(SPECIAL), requires_grad=True)
    g = torch.tensor(SPECIAL)
    (result,) = torch.autograd.grad(gs.scale_gradient(x, 1.0), x, g)
    assert torch.equal(result.view(torch.int32), g.view(torch.int32))


def test_half_gradients_are_scaled_in_float32():
    x = torch.ones(3, dtype=torch.float16, requires_grad=True)
    gs.scale_gradient(x, 1e-9).backward(torch.full((3,), 60000.0, dtype=torch.float16))
    assert torch.allclose(x.grad.double(), torch.tensor(6e-5, dtype=torch.float64), rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("operator", "sign"), [(gs.scale_gradient, 1), (gs.reverse_gradient, -1)])
def test_half_gradients_are_scaled_in_float32_in_place(operator, sign, dtype):
    """The scale itself is not rounded to half, where it would be 0 or lose digits."""
    for scale, value in ((1e-9, 60000.0), (1 / 3, 3.0)):
        x = torch.ones(3, dtype=dtype, requires_grad=True)
        (gradient,) = torch.autograd.grad(operator(x, scale) * value, x, torch.ones(3, dtype=dtype))
        expected = torch.full((3,), sign * scale * torch.tensor(value, dtype=dtype).item(), dtype=torch.float64)
        assert torch.equal(gradient, expected.to(dtype))


def test_without_gradients():
    x = POINT.clone().requires_grad_()
    with torch.no_grad():
        y = gs.scale_gradient(x, SCALE)
    assert not y.requires_grad
    assert torch.equal(y, x)
    with torch.inference_mode():
        z = gs.scale_gradient(x, SCALE)
    assert not z.requires_grad
    assert torch.equal(z, x)


def test_forward_mode_under_no_grad_is_still_scaled():
    with torch.no_grad(), forward_ad.dual_level():
        dual = gs.scale_gradient(forward_ad.make_dual(POINT, WEIGHTS), SCALE)
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, WEIGHTS * SCALE)


def test_gradgradcheck():
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: gs.scale_gradient(x * x, 1.0) * x, (x,))


@pytest.mark.parametrize("modified", ["result", "input"])
def test_in_place_afterwards_raises_instead_of_losing_the_scale(modified):
    x = POINT.clone().requires_grad_()
    a = x * 1
    y = gs.scale_gradient(a, SCALE)

    def modify_and_use():
        (y if modified == "result" else a).mul_(2)
        (y * WEIGHTS).sum().backward()

    with pytest.raises(RuntimeError, match="modified inplace"):
        modify_and_use()


@pytest.mark.parametrize("modified", ["result", "input"])
def test_in_place_with_a_later_graph_raises(modified):
    x = torch.zeros(5, dtype=torch.float64)
    y = gs.scale_gradient(x, SCALE)
    y.add_(1)  # nothing requires grad yet: an ordinary view
    assert torch.equal(x, torch.ones(5, dtype=torch.float64))
    source = POINT.clone().requires_grad_()

    def modify_and_use():
        (y if modified == "result" else x).copy_(source)
        (y * WEIGHTS).sum().backward()

    with pytest.raises(RuntimeError, match="modified inplace"):
        modify_and_use()


def test_in_place_before_is_right():
    x = POINT.clone().requires_grad_()
    a = x * 1
    a.mul_(2)
    (gs.scale_gradient(a, SCALE) * WEIGHTS).sum().backward()
    torch.testing.assert_close(x.grad, 2 * SCALE * WEIGHTS)


def test_in_place_on_the_result_invalidates_a_saved_input():
    x = POINT.clone().requires_grad_()
    a = x * 1
    saved = a * a
    y = gs.scale_gradient(a.detach(), SCALE)
    y.mul_(2)  # memory of a, which saved needs
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


# ---- The gradient's memory ------------------------------------------------------------------------------------------


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


def test_an_unshared_gradient_is_scaled_in_place():
    before, after = [], []
    x = torch.ones(64, requires_grad=True)
    y = _Receive.apply(gs.scale_gradient(_Receive.apply(x, after), 0.5), before)
    (y * 2).sum().backward()
    assert before == after
    assert torch.equal(x.grad, torch.ones(64))


def test_a_held_gradient_is_not_modified():
    held = []
    x = torch.ones(8, requires_grad=True)
    y = gs.scale_gradient(x * 1, 0.5)
    z = y * 1
    z.register_hook(held.append)
    y.register_hook(held.append)
    (z * 3).sum().backward()
    assert all(torch.equal(g, torch.full((8,), 3.0)) for g in held)
    assert torch.equal(x.grad, torch.full((8,), 1.5))


def test_the_users_gradient_is_not_modified():
    x = torch.ones(8, requires_grad=True)
    g = torch.full((8,), 3.0)
    gs.scale_gradient(x, 0.5).backward(g)
    assert torch.equal(g, torch.full((8,), 3.0))


def test_a_gradient_shared_by_two_branches_is_not_modified():
    x = torch.ones(8, requires_grad=True)
    z = torch.ones(8, requires_grad=True)
    (gs.scale_gradient(x, 0.5) + z).mul(3).sum().backward()
    assert torch.equal(x.grad, torch.full((8,), 1.5))
    assert torch.equal(z.grad, torch.full((8,), 3.0))


def test_views_of_one_gradient_are_not_modified():
    x = torch.ones(8, requires_grad=True)
    halves = [gs.scale_gradient(x[:4], 0.5), x[4:]]
    joined = torch.cat(halves)
    joined.retain_grad()
    (joined * torch.arange(8.0)).sum().backward()
    assert torch.equal(joined.grad, torch.arange(8.0))
    assert torch.equal(x.grad, torch.arange(8.0) * torch.tensor([0.5] * 4 + [1.0] * 4))


def test_expanded_gradient():
    x = torch.ones(4, 3, requires_grad=True)
    gs.scale_gradient(x, 0.5).sum().backward()  # its gradient has stride 0
    assert torch.equal(x.grad, torch.full((4, 3), 0.5))


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


def test_retain_graph():
    x = torch.ones(8, requires_grad=True)
    y = gs.scale_gradient(x, 0.5).mul(3).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert torch.equal(x.grad, torch.full((8,), 3.0))


# ---- Wrong arguments ------------------------------------------------------------------------------------------------


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


def test_opcheck():
    x = torch.randn(3, requires_grad=True)
    torch.library.opcheck(torch.ops.gradscale_ext.scale_gradient.default, (x, 0.5))
    torch.library.opcheck(torch.ops.gradscale_ext.scale_gradient.default, (x.detach(), 0.5))


def _kernels(function) -> tuple[list[str], str]:
    """The kernels that Inductor generates for forward and backward, and its complete output."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch._dynamo.reset()
    x = POINT.clone().requires_grad_()
    _, codes = run_fw_bw_and_get_code(lambda: torch.compile(function, fullgraph=True)(x))
    return [line for code in codes for line in code.splitlines() if " = async_compile.cpp" in line], "\n".join(codes)


@pytest.mark.any_version
@pytest.mark.parametrize("scale", [SCALE, torch.tensor(SCALE, dtype=torch.float64)])
def test_the_compiler_fuses_it_with_its_neighbours(scale):
    """No extra kernel, forward or backward: the same number as without the operator, and no call by name."""
    plain, _ = _kernels(lambda x: ((x * x).sin() * WEIGHTS).sum())
    ours, code = _kernels(lambda x: (gs.scale_gradient(x * x, scale).sin() * WEIGHTS).sum())
    assert len(plain) >= 2
    assert len(ours) == len(plain)
    assert "gradscale" not in code
    assert str(SCALE)[:6] in code or isinstance(scale, torch.Tensor)


# ---- Tensor scales --------------------------------------------------------------------------------------------------

TENSOR_SCALE = torch.tensor([0.5, 0.0, -2.0, 1.0, 0.25], dtype=torch.float64)


def tensor_model(x: torch.Tensor, scale: torch.Tensor = TENSOR_SCALE) -> torch.Tensor:
    return (gs.scale_gradient(x * x, scale) * WEIGHTS).sum()


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (3, 1), (3, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("create_graph", [False, True])
def test_tensor_scales(shape, dtype, create_graph):
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn(shape, generator=generator, dtype=torch.float64).float()
    x = torch.randn(3, 5, generator=generator).to(dtype).requires_grad_()
    g = torch.randn(3, 5, generator=generator).to(dtype)
    y = gs.scale_gradient(x, scale)
    assert y.data_ptr() == x.data_ptr()
    (result,) = torch.autograd.grad(y, x, g, create_graph=create_graph)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = (g.to(wide) * scale.double()).to(dtype)
    real = torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, rtol=real, atol=0)


@pytest.mark.parametrize("create_graph", [False, True])
def test_zeros_of_a_tensor_scale_are_exact(create_graph):
    x = torch.zeros(2, len(SPECIAL), requires_grad=True)
    g = torch.tensor([SPECIAL, SPECIAL])
    scale = torch.tensor([[0.0], [1.0]])
    (result,) = torch.autograd.grad(gs.scale_gradient(x, scale), x, g, create_graph=create_graph)
    assert torch.equal(result[0], torch.zeros(len(SPECIAL)))
    assert torch.equal(_bits(result[1]), _bits(g[1]))


MAPPED = {
    "scale shared": lambda: torch.func.vmap(torch.func.grad(tensor_model), (0, None))(POINT[None], TENSOR_SCALE)[0],
    "scale mapped": lambda: torch.func.vmap(torch.func.grad(tensor_model))(
        POINT.expand(2, 5), torch.stack([torch.ones(5, dtype=torch.float64), TENSOR_SCALE])
    )[1],
    "scalar scale mapped": lambda: torch.func.grad(
        lambda x: (torch.func.vmap(gs.scale_gradient)(x * x, TENSOR_SCALE) * WEIGHTS).sum()
    )(POINT),
    "only the scale mapped": lambda: torch.func.grad(
        lambda x: (torch.func.vmap(gs.scale_gradient, (None, 0))(x * x, TENSOR_SCALE).diagonal() * WEIGHTS).sum()
    )(POINT),
}


@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap_over_scales(mapped):
    torch.testing.assert_close(MAPPED[mapped](), TENSOR_SCALE * 2 * WEIGHTS * POINT, rtol=1e-12, atol=1e-12)


def test_tensor_scale_is_read_in_the_forward_pass():
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


@pytest.mark.parametrize(
    "scale", [1.0, 0.25, 0.0, 2, torch.tensor(0.25), torch.tensor([0.25, 0.0, 1.0]), torch.tensor(1, dtype=torch.uint8)]
)
def test_reverse_gradient(scale):
    x = torch.randn(2, 3, requires_grad=True)
    g = torch.randn(2, 3)
    y = gs.reverse_gradient(x, scale)
    assert torch.equal(y, x)
    y.backward(g)
    assert torch.equal(x.grad, -(scale * g))


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


def test_other_leaves_are_rejected():
    with pytest.raises(TypeError, match="holds a value of type NoneType"):
        gs.scale_gradient((torch.ones(1), None), 0.5)
    with pytest.raises(TypeError, match=r"dtype is torch\.int64"):
        gs.reverse_gradient([torch.ones(1, dtype=torch.int64)])


@pytest.mark.parametrize("module", [gs.ScaleGradient(SCALE), gs.ReverseGradient(-SCALE)])
def test_modules(module):
    torch.testing.assert_close(
        gradient(lambda x: (module(x * x) * WEIGHTS).sum()), gradient_of_model(POINT), rtol=1e-12, atol=0
    )
    assert "scale=" in repr(module)
    restored = copy.deepcopy(module)
    restored.load_state_dict(module.state_dict())
    assert module.half().bfloat16().scale.dtype == torch.float64
    assert abs(module.scale.item()) == SCALE


def test_a_schedule_does_not_recompile():
    module = gs.ScaleGradient(1.0)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    first = 0
    for scale in (1.0, 0.5, 0.0, -3.0):
        module.scale.fill_(scale)
        x = torch.ones(3, requires_grad=True)
        compiled(x).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), scale))
        first = counter.frame_count if scale == 1.0 else first
    assert counter.frame_count == first


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
    """The backward pass of an eager call, traced; twice, with different gradients."""
    torch._dynamo.reset()
    for seed in (0, 1):
        gradient = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        expected, x = (torch.zeros(2, 3, requires_grad=True) for _ in range(2))
        COMPILED_AUTOGRAD[name](expected).backward(gradient)
        y = COMPILED_AUTOGRAD[name](x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward(gradient)
        torch.testing.assert_close(x.grad, expected.grad)
