"""Derivatives and special values of the reference's operators; fuzz/test_flow.py checks their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import forward_ad

import gradscale_ext as gs
from gradscale_ext import reference

TENSOR = torch.tensor([0.5, -2.0, 0.0], dtype=torch.float64)
LIMITS = torch.tensor([[0.3], [4.0]], dtype=torch.float64)[:, 0]
CALLS = {
    "scale": ("scale_gradient", (0.5,), {}),
    "scale of 0": ("scale_gradient", (0.0,), {}),
    "scale by a tensor": ("scale_gradient", (TENSOR,), {}),
    "reverse": ("reverse_gradient", (), {}),
    "clip norm": ("clip_gradient_norm", (1.0,), {}),
    "clip norms": ("clip_gradient_norm", (LIMITS,), {"batch_dims": 1}),
    "clip norm 1": ("clip_gradient_norm", (1.0,), {"norm_type": 1}),
    "clip norm inf": ("clip_gradient_norm", (0.25,), {"norm_type": math.inf, "batch_dims": 1}),
    "clip to nothing": ("clip_gradient_norm", (0.0,), {}),
    "clip without limit": ("clip_gradient_norm", (math.inf,), {}),
    "normalize": ("normalize_gradient", (3.0,), {"batch_dims": 1}),
    "normalize 3": ("normalize_gradient", (LIMITS,), {"batch_dims": 1, "norm_type": 3.0}),
    "clip value": ("clip_gradient_value", (-0.5, TENSOR.abs()), {}),
    "clip value above": ("clip_gradient_value", (None, 0.5), {}),
}
LINEAR = [name for name, call in CALLS.items() if call[0] in ("scale_gradient", "reverse_gradient")]
X = torch.tensor([[0.3, -1.2, 0.7], [2.0, 0.1, -0.4]], dtype=torch.float64)
G = torch.tensor([[1.5, -0.25, 0.125], [0.0, -3.0, 2.0]], dtype=torch.float64)


def called(module, name, x):
    operator, arguments, options = CALLS[name]
    return getattr(module, operator)(x, *arguments, **options)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives(name):
    def function(module):
        return lambda x: (called(module, name, x * x) * G).sin().sum()

    found = []
    for module in (reference, gs):
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(module)(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), x)
        found.append((first.detach(), second))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("size", [1e-310, 1e-308, 1e-200, 1e200, 1e308])
def test_complex_numbers_of_any_magnitude(size):
    g = torch.tensor([[complex(size, -size)], [complex(0, size)]], dtype=torch.complex128)
    for module in (reference, gs):
        x = torch.zeros(2, 1, dtype=torch.complex128, requires_grad=True)
        (unit,) = torch.autograd.grad(module.normalize_gradient(x, batch_dims=1), x, g)
        root = math.sqrt(0.5)
        torch.testing.assert_close(unit, torch.tensor([[complex(root, -root)], [1j]], dtype=torch.complex128))


@pytest.mark.parametrize("name", [name for name in CALLS if "norms" not in name and name != "normalize 3"])
def test_transforms(name):
    def function(module):
        return lambda x: (called(module, name, x * x) * torch.ones_like(x).cumsum(0)).sum()

    x = X.unsqueeze(-1) * torch.ones(3, dtype=torch.float64) if "tensor" not in name and "value" not in name else X
    mapped = [torch.func.vmap(torch.func.grad(function(module)))(x) for module in (reference, gs)]
    torch.testing.assert_close(*mapped)


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in LINEAR), ("scale by a tensor", True)])
def test_tangents_and_compiled_transforms_of_linear_operators(name, compiled):
    def compile(function):
        return torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function

    def function(x):
        return (called(reference, name, x * x) * G).sum()

    torch._dynamo.reset()
    expected = torch.func.grad(lambda x: (called(gs, name, x * x) * G).sum())(X)
    torch.testing.assert_close(compile(torch.func.grad(function))(X), expected)
    _, tangent = compile(lambda x: torch.func.jvp(function, (x,), (G,)))(X)
    torch.testing.assert_close(tangent, (expected * G).sum())


@pytest.mark.parametrize("name", [name for name in CALLS if name not in LINEAR])
def test_nonlinear_operators_raise_in_unsupported_contexts(name):
    with pytest.raises(RuntimeError), forward_ad.dual_level():
        called(reference, name, forward_ad.make_dual(X, G))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="use the operator of gradscale_ext"):
        torch.compile(torch.func.grad(lambda x: called(reference, name, x).sum()), backend="eager", fullgraph=True)(X)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0])
def test_infinite_values_keep_their_gradient(scale):
    x = torch.tensor([math.inf, -math.inf, math.nan, 3e38], requires_grad=True)
    y = reference.scale_gradient(x, scale)
    y.sum().backward()
    torch.testing.assert_close(y.detach(), x.detach(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x.grad, torch.full((4,), scale))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_nonfinite_scales_appear_in_the_gradient(scale):
    x = X.clone().requires_grad_()
    y = reference.scale_gradient(x, scale)
    assert torch.equal(y.detach(), X)
    assert not torch.autograd.grad(y, x, G)[0].isfinite().any()


def test_an_infinite_element_times_a_negative_scale_appears_in_the_gradient():
    x = torch.tensor([math.inf, 2.0, 1e300], dtype=torch.float64, requires_grad=True)
    y = reference.scale_gradient(x, -1e10)
    assert torch.equal(y.detach(), x.detach())
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient[0].isnan()
    assert torch.equal(gradient[1:], torch.full((2,), -1e10, dtype=torch.float64))


def test_a_scale_gets_no_gradient():
    scale = torch.tensor(0.5, requires_grad=True)
    (gradient,) = torch.autograd.grad(reference.scale_gradient(X, scale).sum() + 0 * scale, scale)
    assert gradient == 0
