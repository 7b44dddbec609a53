"""Value transforms: values from other software, error bounds over the whole range, derivatives at zero."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mpmath
import pytest
import torch

import gradscale_ext as gs

ORACLE = json.loads((Path(__file__).parent / "oracles" / "transforms.json").read_text())


@pytest.mark.parametrize("name", ["signed_hyperbolic", "signed_parabolic", "symlog"])
def test_oracle(name):
    x = torch.tensor(ORACLE[name]["x"], dtype=torch.float64)
    y = torch.tensor(ORACLE[name]["y"], dtype=torch.float64)
    torch.testing.assert_close(getattr(gs, name)(x), y, rtol=1e-13, atol=1e-15)


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


@pytest.mark.parametrize("function", [gs.signed_hyperbolic, gs.signed_parabolic, gs.symlog, gs.symexp])
def test_second_derivatives(function):
    assert torch.autograd.gradgradcheck(function, torch.tensor([-3.0, -0.1, 0.2, 5.0]).double().requires_grad_())


@pytest.mark.parametrize("eps", [0.0, 1e-3, 1e-2, 1.0, 3.0, 1e10])
@pytest.mark.parametrize("x", [1e-30, 1.0, 1e15, 1e19, 9e37, 3.4e38])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_inverse_overflows_only_where_its_exact_value_does(x, eps, sign):
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


@pytest.mark.parametrize("function", [gs.signed_hyperbolic, gs.signed_parabolic])
def test_wrong_eps(function):
    for eps, error, words in (
        (-0.1, ValueError, r"at least 0 and finite in float32, but it is -0\.1"),
        (math.nan, ValueError, "at least 0 and finite in float32, but it is nan"),
        (1e39, ValueError, r"at least 0 and finite in float32, but it is 1e\+39"),
        (torch.ones(2), TypeError, "a number, but it is of type Tensor"),
    ):
        with pytest.raises(error, match=f"^{function.__name__}: eps must be {words}"):
            function(torch.ones(1), eps)


def test_decoding_over_a_support_of_large_numbers():
    support = gs.Support(-9e37, 9e37, 3, eps=1.0)
    logits = torch.tensor([-50.0, 0.0, 50.0], requires_grad=True)
    value = support.decode(logits)
    value.backward()
    assert value.item() == pytest.approx(9e37, rel=1e-6)
    assert gs.reference.decode(logits, support).item() == pytest.approx(9e37, rel=1e-6)
    assert logits.grad.isfinite().all()
