"""The reference on a device without float64, such as MPS, simulated by a mode that rejects float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradscale_ext as gs
from gradscale_ext import _context
from gradscale_ext.monitor import _open
from gradscale_ext.reference.tensors import clip_units, clipping_of, histograms, tensor_statistics

STEPS, BATCH, ACTIONS, WIDTH = 3, 4, 5, 6
HEADS: dict[str, gs.Head] = {
    "value": gs.TwoHot(gs.Support.muzero(10), label_smoothing=0.1),
    "raw": gs.TwoHot(gs.Support.dreamer_v3()),
    "reward": gs.HLGauss(gs.Support.tdmpc2(), first_step=1),
    "policy": gs.SoftCrossEntropy(entropy_weight=0.1, subtract_target_entropy=True),
    "error": gs.MeanSquaredError(transform="symlog"),
    "end": gs.BinaryCrossEntropy(),
    "hidden": gs.NegativeCosine(),
    "own": gs.PerStepLoss(),
}


class RejectFloat64(TorchDispatchMode):
    """Rejects operations that make float64 from other dtypes.

    Operations on float64 arguments pass, because a user's tensors on the CPU may be float64.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if not contains_float64(args):
            assert not contains_float64(out), f"{function}: this device has no float64"
        return out


def contains_float64(values: Any) -> bool:
    wide = (torch.float64, torch.complex128)
    return any(isinstance(value, torch.Tensor) and value.dtype in wide for value in tree_leaves(values))


def without_float64(monkeypatch: pytest.MonkeyPatch, function: Callable[[], Any]) -> Any:
    monkeypatch.setattr(_context, "widest", lambda device=None: torch.float32)
    with RejectFloat64():
        return function()


def assert_same_without(monkeypatch: pytest.MonkeyPatch, function: Callable[[], Any]) -> None:
    """Check that the results of `function` with and without float64 are equal up to the rounding of float32."""
    expected = function()
    found = without_float64(monkeypatch, function)
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, check_dtype=False)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_devices_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=device.index == 1))
    assert _context.widest(torch.device("mps")) == _context.widest(torch.device("xpu", 0)) == torch.float32
    assert _context.widest(torch.device("xpu", 1)) == _context.widest(torch.device("cuda")) == torch.float64
    assert _context.widest() == torch.float64


@pytest.mark.parametrize("reduction", ["mean", "valid_mean", "none"])
def test_loss(reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = {"value": 21, "raw": 255, "reward": 101, "policy": ACTIONS, "hidden": WIDTH}
    shapes = {
        name: (BATCH, STEPS - head.first_step, *([widths[name]] if name in widths else []))
        for name, head in HEADS.items()
    }
    targets = {name: random(*shapes[name][:2]) for name in shapes if name != "own"}
    targets |= {"hidden": random(*shapes["hidden"]), "policy": random(*shapes["policy"]).softmax(-1)}
    targets["end"] = targets["end"].sigmoid()
    mask = random(BATCH, STEPS) < 1

    def loss() -> Any:
        predictions = {name: random(*shape).requires_grad_() for name, shape in shapes.items()}
        out = gs.multi_step_loss(
            HEADS,
            predictions,
            targets,
            step_weights=[1.0, 0.5, 0.25],
            step_gradient_scale="unroll",
            importance_weights=random(BATCH).abs(),
            normalize_importance_weights=True,
            mask=mask,
            reduction=reduction,
            nonfinite="skip",
            check=True,
            impl="reference",
        )
        gradients = torch.autograd.grad(out.loss.sum(), list(predictions.values()))
        priorities = gs.priorities(out.expected["value"], targets["value"], alpha=0.6)
        return out.loss.detach(), out.per_sample, out.per_step, out.expected, out.entropy, gradients, priorities

    assert_same_without(monkeypatch, loss)


@pytest.mark.parametrize("number", [0.3, torch.tensor(0.3, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("x", [random(3, 4), random(3, 4).to(torch.complex64)], ids=["real", "complex"])
def test_flow(x: torch.Tensor, number: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> Any:
        operators = [gs.reference.scale_gradient, gs.reference.reverse_gradient]
        operators += [gs.reference.normalize_gradient, gs.reference.clip_gradient_norm]
        if not x.is_complex():
            operators += [lambda x, number: gs.reference.clip_gradient_value(x, -number, number)]
        found = []
        for operator in operators:
            leaf = x.detach().clone().requires_grad_()
            found.append(torch.autograd.grad(operator(leaf, number), leaf, x.flip(0))[0])
        return found

    assert_same_without(monkeypatch, gradients)


def test_moving_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's float64 numbers become float32 on a device without float64, also if it is the default device."""
    modules = [gs.ScaleGradient(0.1), gs.ClipGradientNorm(0.1), gs.ClipGradientValue(-0.1, 0.1)]

    def move() -> None:
        for module in modules:
            module.to("cpu", torch.float16)
            assert {b.dtype for b in module.buffers() if b.is_floating_point()} == {torch.float32}
        assert gs.ScaleGradient(0.1).scale.dtype == torch.float32
        assert gs.Support.muzero(10).centers().dtype == torch.float32

    assert modules[0].to(torch.float16).scale.dtype == torch.float64
    without_float64(monkeypatch, move)


def test_moving_modules_with_another_default_device() -> None:
    with torch.device("meta"):
        module = gs.ScaleGradient(torch.tensor(0.1, device="cpu")).to("cpu", torch.float16)
    assert module.scale.device.type == "cpu"
    assert module.scale.dtype == torch.float32


def test_statistics_and_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [random(3, 4), None, random(5), random(2, 2).to(torch.complex64)]

    def clip() -> Any:
        values, counts = tensor_statistics(gradients, 2.0)
        histogram = histograms(gradients, counts)
        clipping = clipping_of(values, counts, 2.0, 1.0, True)
        tensors = [gradient.clone() for gradient in gradients if gradient is not None]
        clip_units(tensors, clipping[1:2], False, True)
        pytorch_result = _open._norm_result(tensors, 1.0, values.norm())
        return values, counts, histogram, clipping, tensors, pytorch_result, gs.reference.l2_loss(tensors[:2], 0.1)

    assert_same_without(monkeypatch, clip)
