"""The policy losses of test_policy_kernels.py on a GPU. Runs where test_cuda.py runs."""

from __future__ import annotations

import pytest
import torch
from policies import (
    CASES,
    EXTREMES,
    assert_extremes_are_right,
    assert_large_ratios_are_right,
    assert_right,
    inputs_of,
    leaves_of,
)
from test_cuda import device

import gradscale_ext as gs

__all__ = ["device"]

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results(name, dtype, device):
    assert_right(name, (9, 3), dtype, device)
    mask = torch.rand(70, generator=torch.Generator().manual_seed(1)) > 0.3
    assert_right(name, (70,), dtype, device, steps=False, mask=mask, reduction="none")


@pytest.mark.parametrize("name", ["ppo 4", "choices", "normal 6", "shared 6", "few classes", "clipped value"])
def test_other_gradients_of_the_loss(name, device):
    head, prediction, target = inputs_of(name, (40, 2), device=device)
    leaves = leaves_of(prediction)
    for options in ({}, {"reduction": "none"}, {"nonfinite": "skip"}):
        out = gs.multi_step_loss({"p": head}, {"p": prediction}, {"p": target}, impl="fused", **options)
        expected = gs.multi_step_loss({"p": head}, {"p": prediction}, {"p": target}, impl="reference", **options)
        weight = torch.full_like(out.loss, -2.5)
        found = torch.autograd.grad(out.loss, leaves, weight)
        torch.testing.assert_close(found, torch.autograd.grad(expected.loss, leaves, weight), rtol=1e-9, atol=1e-12)


def test_large_ratios(device):
    assert_large_ratios_are_right(device)


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name, device):
    assert_extremes_are_right(name, device)


def test_infinite_clipped_values(device):
    """Losses and gradients are as in the reference: NaN where an error is inf - inf."""
    value, returns, old = torch.cartesian_prod(*[torch.tensor([torch.inf, -torch.inf, 1.0])] * 3).unbind(-1)
    results = []
    for impl, where in (("fused", device), ("reference", "cpu")):
        x = value.detach().to(where).requires_grad_()
        fields = {"returns": returns.to(where), "values": old.to(where)}
        heads = {"v": gs.ClippedSquaredError()}
        out = gs.multi_step_loss(heads, {"v": x}, {"v": fields}, steps=False, reduction="sum", impl=impl)
        results.append((out.per_step["v"].cpu(), *(gradient.cpu() for gradient in torch.autograd.grad(out.loss, x))))
    torch.testing.assert_close(*results, equal_nan=True)
    assert results[0][0].isnan().sum() > 5
