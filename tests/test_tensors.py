"""`l2_loss`, a pass over many tensors."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import gradscale_ext as gs


def _parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (0,), (1,), (3, 5), (17000,), (0, 4), (2, 3, 4, 5), (64, 600)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_l2_loss(dtype):
    parameters = _parameters(dtype)
    loss = gs.l2_loss(parameters, weight=1e-4)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = 0.5e-4 * sum(p.detach().double().square().sum() for p in parameters)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-14 if dtype == torch.float64 else 1e-6)
    (loss * 3).backward()
    for p in parameters:
        # The product is computed in float32 or float64, and rounded once.
        expected = (p.detach().double() * 3e-4).to(dtype)
        torch.testing.assert_close(
            p.grad, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-7 if dtype == torch.float16 else 0
        )


def test_derivatives():
    parameters = [p for p in _parameters(torch.float64) if p.numel() < 20]
    assert torch.autograd.gradcheck(lambda *p: gs.l2_loss(p, 0.3), parameters)
    assert torch.autograd.gradgradcheck(lambda *p: gs.l2_loss(p, 0.3), parameters)


def test_gradient_of_a_tensor_weight():
    weight, p = torch.tensor(0.5, requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
    weight_gradient, p_gradient = torch.autograd.grad(gs.l2_loss([p], weight), [weight, p])
    assert weight_gradient == 12.5
    assert torch.equal(p_gradient, 0.5 * p)


def test_a_constant_weight_on_the_cpu_is_read(monkeypatch):
    monkeypatch.setattr(gs.statistics.l2.reference, "l2_loss", None)
    p = torch.tensor([3.0, 4.0], requires_grad=True)
    for weight in (
        torch.tensor(0.5),
        torch.tensor(0.5, dtype=torch.float64),
        torch.inference_mode()(torch.tensor)(0.5),
    ):
        (gradient,) = torch.autograd.grad(gs.l2_loss([p], weight), p)
        assert torch.equal(gradient, torch.tensor([1.5, 2.0]))
    assert gs.l2_loss([p], torch.tensor(2)).item() == 25


def test_lazily_negated_parameters_are_fused(monkeypatch):
    monkeypatch.setattr(gs.statistics.l2.reference, "l2_loss", None)
    p = torch.tensor([3.0, 4.0], requires_grad=True)
    lazy = torch.complex(p, -p).conj().imag
    assert lazy.is_neg()
    loss = gs.l2_loss([lazy, p], 2.0)
    assert loss.item() == 50
    assert torch.autograd.grad(loss, p)[0].tolist() == [12, 16]


def test_arguments_of_the_l2_loss_that_the_kernels_do_not_accept_are_named_once():
    gs._context.say_once.cache_clear()
    p, weight = torch.ones(2), torch.tensor(0.5, requires_grad=True)
    for parameters, factor, words in (
        (
            [p, TwoTensor(p, p)],
            0.5,
            r"parameters\[1\] is of type TwoTensor, not a plain torch.Tensor: convert it; plain",
        ),
        (
            [p, p.to(torch.float8_e4m3fn)],
            0.5,
            r"parameters\[1\] is torch.float8_e4m3fn: write .float\(\); plain PyTorch",
        ),
        ([p, p], weight, "weight is a tensor: give a number"),
    ):
        with pytest.warns(UserWarning, match=f"^l2_loss: {words}"):
            assert gs.l2_loss(parameters, factor) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gs.l2_loss(parameters, factor)


@pytest.mark.parametrize("create_graph", [False, True])
def test_parameters_made_in_inference_mode(create_graph):
    p, constant = torch.tensor([3.0, 4.0], requires_grad=True), torch.inference_mode()(torch.ones)(3)
    (gradient,) = torch.autograd.grad(gs.l2_loss([p, constant], 2.0), p, create_graph=create_graph)
    assert gradient.tolist() == [6, 8]


@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [
        (10**400, ValueError, "but it is too large"),
        ("1", TypeError, "but it is of type str"),
        (None, TypeError, "but it is of type NoneType"),
        (torch.ones(2), ValueError, r"but it has shape \[2\]"),
        (torch.tensor(1j), TypeError, "real, but it is a tensor of dtype torch.complex64"),
    ],
)
def test_wrong_weights(weight, error, words):
    with pytest.raises(error, match=f"^l2_loss: weight must be .*{words}"):
        gs.l2_loss([torch.ones(2)], weight)


def test_module_frozen_and_strided_parameters():
    module = torch.nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    gs.l2_loss(module, 2.0).backward()
    torch.testing.assert_close(module.weight.grad, 2 * module.weight.detach())
    assert module.bias.grad is None
    base = torch.arange(12.0).reshape(3, 4)
    for strided in (base.T, base[:, 1:3], base[:, ::2], base[0].expand(5, 4)):
        torch.testing.assert_close(gs.l2_loss([strided]), 0.5 * strided.square().sum())


def test_contexts():
    x = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(torch.func.grad(lambda p: gs.l2_loss([p], 0.5))(x), 0.5 * x)
    torch.testing.assert_close(torch.func.vmap(lambda p: gs.l2_loss([p]))(x), 0.5 * x * x)
    torch.testing.assert_close(torch.func.jvp(lambda p: gs.l2_loss([p]), (x,), (x,))[1], torch.tensor(25.0))
    torch._dynamo.reset()
    leaf = x.clone().requires_grad_()
    torch.compile(lambda p: gs.l2_loss([p]), backend="aot_eager", fullgraph=True)(leaf).backward()
    torch.testing.assert_close(leaf.grad, x)
    torch._dynamo.reset()


def test_no_parameters_and_errors():
    assert gs.l2_loss([]).item() == 0
    with pytest.raises(TypeError, match=r"parameters\[1\] must be a floating tensor, but it is torch.int64"):
        gs.l2_loss([torch.ones(1), torch.ones(1, dtype=torch.int64)])
    p = torch.ones(2, requires_grad=True)
    loss = gs.l2_loss([p])
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = gs.l2_loss([p])
    with torch.no_grad():
        p.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_a_sum_beyond_float_is_infinite():
    parameters = [torch.full((2,), 3e38, requires_grad=True)]
    loss = gs.l2_loss(parameters)
    assert loss.item() == float("inf")
    assert gs.reference.l2_loss(parameters, 1.0).item() == float("inf")
    assert torch.equal(torch.autograd.grad(loss, parameters)[0], parameters[0])
