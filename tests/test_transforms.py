"""Value transforms: numbers of other software, error bounds over the whole range, derivatives at zero."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mpmath
import pytest
import torch

import gradscale_ext as gs

ORACLE = json.loads((Path(__file__).parent / "oracles" / "transforms.json").read_text())
PAIRS = {"hyperbolic": (gs.signed_hyperbolic, gs.signed_parabolic), "symlog": (gs.symlog, gs.symexp)}


@pytest.mark.parametrize("name", ["signed_hyperbolic", "signed_parabolic", "symlog"])
def test_oracle(name):
    x = torch.tensor(ORACLE[name]["x"], dtype=torch.float64)
    y = torch.tensor(ORACLE[name]["y"], dtype=torch.float64)
    torch.testing.assert_close(getattr(gs, name)(x), y, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (1, 0.41521356237309515),
        (10, 2.3266247903553996),
        (100, 9.14987562112089),
        (-3012.33, -56.90613657232653),
        (-1000, -31.638584039112747),
    ],
)
def test_known_values_of_h(x, y):
    assert gs.signed_hyperbolic(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(y, rel=1e-12)


@pytest.mark.parametrize(("y", "x"), [(1, 2.988056701676148), (300, 58705.58401669221)])
def test_known_values_of_the_inverse(y, x):
    assert gs.signed_parabolic(torch.tensor(y, dtype=torch.float64)).item() == pytest.approx(x, rel=1e-12)


def _whole_range(limit):
    magnitudes = torch.logspace(-30, math.log10(limit), 20001, dtype=torch.float64)
    return torch.cat([-magnitudes, torch.zeros(1, dtype=torch.float64), magnitudes]).float()


def _exact(name, x):
    """The transform with 60 digits."""
    mpmath.mp.dps = 60
    x = mpmath.mpf(x)
    eps = mpmath.mpf("0.001")
    sign, a = mpmath.sign(x), abs(x)
    if name == "signed_hyperbolic":
        return sign * (mpmath.sqrt(a + 1) - 1) + eps * x
    if name == "signed_parabolic":
        return sign * (((mpmath.sqrt(1 + 4 * eps * (a + 1 + eps)) - 1) / (2 * eps)) ** 2 - 1)
    return sign * (mpmath.log1p(a) if name == "symlog" else mpmath.expm1(a))


@pytest.mark.parametrize(
    ("name", "limit"), [("signed_hyperbolic", 1e38), ("signed_parabolic", 1e15), ("symlog", 1e38), ("symexp", 88)]
)
def test_relative_error_in_float32(name, limit):
    x = _whole_range(limit)[::97]
    y = getattr(gs, name)(x).double()
    exact = torch.tensor([float(_exact(name, v)) for v in x.double().tolist()], dtype=torch.float64)
    assert ((y - exact).abs() <= 4e-7 * exact.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pair", PAIRS)
def test_round_trip_and_derivative_at_zero(pair, dtype):
    forward, inverse = PAIRS[pair]
    x = torch.linspace(-4, 4, 33, dtype=dtype)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 0.05)
    assert forward(x).dtype == dtype
    torch.testing.assert_close(inverse(forward(x)), x, rtol=tolerance, atol=tolerance)
    slope = 0.501 if pair == "hyperbolic" else 1.0
    for function, expected in ((forward, slope), (inverse, 1 / slope)):
        zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
        function(zero).backward()
        assert zero.grad.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("function", [gs.signed_hyperbolic, gs.signed_parabolic, gs.symlog, gs.symexp])
def test_derivatives_and_special_values(function):
    x = torch.tensor([-3.0, -0.1, 0.2, 5.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)
    special = function(torch.tensor([float("inf"), -float("inf"), float("nan")]))
    assert special[0] == float("inf")
    assert special[1] == -float("inf")
    assert special[2].isnan()


@pytest.mark.parametrize("eps", [0.0, 1e-3, 1e-2, 1.0, 3.0, 1e10])
@pytest.mark.parametrize("x", [1e-30, 1.0, 1e15, 1e19, 9e37, 3.4e38])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_inverse_overflows_where_its_value_does_alone(x, eps, sign):
    mpmath.mp.dps = 60
    y = torch.tensor(sign * x, requires_grad=True)
    a, e = mpmath.mpf(abs(y.item())), mpmath.mpf(eps)
    u = a / (mpmath.sqrt(mpmath.mpf(0.25) + e * (a + 1 + e)) + mpmath.mpf(0.5) + e)
    value, slope = u * (u + 2), 2 * (u + 1) / (1 + 2 * e * (u + 1))
    result = gs.signed_parabolic(y, eps)
    result.backward()
    largest = torch.finfo(torch.float32).max
    assert result.item() == (pytest.approx(sign * float(value), rel=4e-7) if value < largest else sign * math.inf)
    if value < largest:
        assert y.grad.item() == pytest.approx(float(slope), rel=2e-6)
    assert not y.grad.isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("eps", [0.0, 1e-3, 1.0])
def test_derivatives_at_infinity_are_their_limits(eps, dtype):
    for function, slope in (
        (lambda x: gs.signed_hyperbolic(x, eps), eps),
        (lambda x: gs.signed_parabolic(x, eps), 1 / eps if eps else math.inf),
        (gs.symlog, 0.0),
        (gs.symexp, math.inf),
    ):
        x = torch.tensor([math.inf, -math.inf, 1.0, math.nan], dtype=dtype, requires_grad=True)
        y = function(x)
        y.sum().backward()
        assert y[:2].tolist() == [math.inf, -math.inf]
        torch.testing.assert_close(x.grad[:2].double(), torch.full((2,), slope).double(), rtol=1e-3, atol=0)
        assert x.grad[2].isfinite()
        assert x.grad[3].isnan()


def test_decoding_over_a_support_of_large_numbers():
    support = gs.Support(-9e37, 9e37, 3, eps=1.0)
    logits = torch.tensor([-50.0, 0.0, 50.0], requires_grad=True)
    value = support.decode(logits)
    value.backward()
    assert value.item() == pytest.approx(9e37, rel=1e-6)
    assert gs.reference.decode(logits, support).item() == pytest.approx(9e37, rel=1e-6)
    assert logits.grad.isfinite().all()
