"""The fused multi-step loss against the reference, results of other software, and finite differences.

fuzz/test_loss.py checks heads, dtypes, widths, layouts, masks and reductions against formulas.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import json
import math
import pickle
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from digests import loss_digest
from policies import CASES
from torch.multiprocessing.reductions import StorageWeakRef

import gradscale_ext as gs

ORACLES = json.loads((Path(__file__).parent / "oracles" / "muzero_update.json").read_text())["cases"]
SUPPORT = gs.Support(-5, 5, 11)
NAN, INF = float("nan"), float("inf")
RAW = gs.Support(-4, 6, 9, transform="symlog", space="raw")
HEADS = {
    "value": gs.TwoHot(SUPPORT, weight=0.25),
    "reward": gs.TwoHot(gs.Support(-3, 4, 9, transform="symlog"), first_step=1),
    "policy": gs.SoftCrossEntropy(weight=1.5),
    "distance": gs.MeanSquaredError(),
    "features": gs.MeanSquaredError(transform="signed_hyperbolic", weight=0.7),
}
MORE_HEADS = {
    "smooth": gs.TwoHot(SUPPORT, label_smoothing=0.1),
    "raw": gs.TwoHot(RAW, first_step=1),
    "gauss": gs.HLGauss(SUPPORT, weight=0.5),
    "wide_gauss": gs.HLGauss(RAW, sigma_ratio=4.0),
    "bonus": gs.SoftCrossEntropy(label_smoothing=0.2, entropy_weight=0.3, subtract_target_entropy=True, weight=2.0),
    "classes": gs.SoftCrossEntropy(first_step=1),
    "smooth_classes": gs.SoftCrossEntropy(label_smoothing=0.1, entropy_weight=-0.2),
    "huber": gs.Huber(delta=0.7, transform="symlog"),
    "end": gs.BinaryCrossEntropy(),
    "quantiles": gs.QuantileHuber(kappa=0.5, weight=0.5),
    "mean_quantiles": gs.QuantileHuber(kappa=0.0, sum_over_quantiles=False, first_step=1),
    "prior": gs.CategoricalKL(free_nats=0.5),
    "posterior": gs.CategoricalKL(unimix=0.0, prediction="p"),
    "consistency": gs.NegativeCosine(weight=2.0, first_step=1),
    "own": gs.PerStepLoss(weight=0.1),
}
ALL_HEADS = {**HEADS, **MORE_HEADS}


SIZES = {"A": 4, "D": 3, "N": 5, "M": 3, "G": 2, "C": 4}
"""Sizes for the letters in `Head.forms`."""


def sizes_of(name, head):
    """Sizes of a prediction after the batch dimensions."""
    if hasattr(head, "support"):
        return (head.support.num_bins,)
    return tuple(
        SIZES[letter]
        for letter in head.forms[0 if name == "distance" or len(head.forms[-1].targets) > 1 else -1]
        .predictions[0]
        .shape
    )


def target_of(name, head, shape, generator):
    batch = shape[0]
    if hasattr(head, "support"):
        return torch.randn(batch, generator=generator, dtype=torch.float64).mul(9)
    if "classes" in name:
        return torch.randint(SIZES["A"], (batch,), generator=generator)
    if isinstance(head, gs.SoftCrossEntropy | gs.BinaryCrossEntropy):
        return torch.rand(shape, generator=generator, dtype=torch.float64)
    if isinstance(head, gs.QuantileHuber):
        shape = (batch, SIZES["M"])
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def arguments(batch=3, steps=4, dtype=torch.float64, seed=0, heads=HEADS, requires_grad=True):
    """Predictions and targets as lists of per-step tensors."""
    generator = torch.Generator().manual_seed(seed)
    target_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    predictions, targets = {}, {}
    for name, head in heads.items():
        shape = (batch, *sizes_of(name, head))
        count = steps - head.first_step
        predictions[name] = [
            torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).to(dtype).requires_grad_(requires_grad)
            for _ in range(count)
        ]
        if not isinstance(head, gs.PerStepLoss):
            entries = [target_of(name, head, shape, generator) for _ in range(count)]
            targets[name] = [t.to(target_dtype) if t.is_floating_point() else t for t in entries]
    return predictions, targets


def leaves(predictions):
    return [
        t for entries in predictions.values() for t in ([entries] if isinstance(entries, torch.Tensor) else entries)
    ]


def gradients(out, predictions, grad_output=None):
    return torch.autograd.grad(out.loss, leaves(predictions), grad_output)


OUTPUTS = [field.name for field in dataclasses.fields(gs.MultiStepLossOutput)]


def compare(out, expected, predictions, rtol=1e-12, grad_output=None):
    """Compare all outputs and gradients."""
    for field in OUTPUTS:
        a, b = getattr(out, field), getattr(expected, field)
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m, f=field: f"{f}: {m}")
    for a, b in zip(
        gradients(out, predictions, grad_output), gradients(expected, predictions, grad_output), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, equal_nan=True)


@pytest.fixture
def fused_only(monkeypatch):
    """Fail the test if a call uses the reference. The value of the fixture is the reference, for expected results."""
    original = gs.reference.multi_step_loss

    def refuse(*args, **kwargs):
        raise AssertionError("the reference was called where the fused kernel was expected")

    for name in ("multi_step_loss", "loss_of"):
        monkeypatch.setattr(gs.reference, name, refuse)
    return original


# ---- Results of other software --------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["fused", "reference"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("case", ORACLES, ids=lambda case: f"K={case['unroll_steps']}")
def test_oracle_of_whole_updates(case, dtype, tolerance, implementation):
    numbers = case["support"]
    support = gs.Support(
        numbers["minimum"], numbers["maximum"], numbers["num_bins"], numbers["transform"], numbers["eps"]
    )
    heads = {
        "value": gs.TwoHot(support, weight=case["value_weight"]),
        "reward": gs.TwoHot(support, weight=case["reward_weight"]),
        "policy": gs.SoftCrossEntropy(weight=case["policy_weight"]),
    }
    predictions = {
        name: [torch.tensor(step, dtype=dtype).requires_grad_() for step in entries]
        for name, entries in case["predictions"].items()
    }
    targets = {
        name: [torch.tensor(entries, dtype=dtype)[:, k] for k in range(case["unroll_steps"] + 1)]
        if name != "policy"
        else [torch.tensor(step, dtype=dtype) for step in entries]
        for name, entries in case["targets"].items()
    }
    if torch.tensor(case["targets"]["policy"]).shape[0] != case["unroll_steps"] + 1 or (
        torch.tensor(case["targets"]["policy"]).shape[:2] == torch.tensor(case["mask"]).shape
    ):
        targets["policy"] = list(torch.tensor(case["targets"]["policy"], dtype=dtype).unbind(1))
    function = gs.multi_step_loss if implementation == "fused" else gs.reference.multi_step_loss
    out = function(
        heads,
        predictions,
        targets,
        step_gradient_scale="unroll",
        importance_weights=torch.tensor(case["importance_weights"], dtype=dtype),
        mask=torch.tensor(case["mask"]),
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(case["loss"], rel=tolerance)
    for name, entries in case["gradients"].items():
        expected = torch.tensor(entries, dtype=torch.float64)
        actual = torch.stack([p.grad.double() for p in predictions[name]])
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


# ---- Fused against reference ----------------------------------------------------------------------------------------

SEEDED = torch.Generator().manual_seed(1)
#: fuzz/test_loss.py tests other weights and masks.
OPTIONS = {
    "numbers": {"step_weights": [1.0, 0.5, 0.25, 0.125], "step_gradient_scale": (1, 2, 3, 4)},
    "half weights": {"importance_weights": torch.tensor([0.5, 2.0, 1.0], dtype=torch.bfloat16)},
    "weights by head": {
        "step_weights": {"value": [1.0, 0.5, 0.25, 0.125], "reward": torch.rand(3, 4, generator=SEEDED), "own": None},
        "step_gradient_scale": {
            "reward": "unroll",
            "policy": torch.tensor([0.5, 1.0, 2.0, 3.0]),
            "classes": (1, 0, 2, 3),
        },
        "importance_weights": {
            "value": torch.tensor([0.3, 2.0, 1.0]),
            "features": torch.tensor([1.0, 0.0, 4.0]).half(),
        },
    },
    "head weights": {"head_weights": {"value": 0.5, "policy": torch.tensor(1.5), "end": torch.tensor(0.0), "raw": 0}},
    "everything by head": {
        "step_weights": {"value": torch.rand(3, 4, generator=SEEDED), "policy": [1.0, 2.0, 0.5, 0.25]},
        "step_gradient_scale": {"policy": "unroll"},
        "importance_weights": {"policy": torch.tensor([0.3, 2.0, 1.0])},
        "mask": {"policy": torch.tensor([[0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)},
        "head_weights": {"policy": torch.tensor(0.75, dtype=torch.float64), "reward": 2},
        "nonfinite": "skip",
    },
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "valid_mean"])
@pytest.mark.parametrize("options", OPTIONS)
def test_matches_the_reference(options, reduction, fused_only):
    predictions, targets = arguments(heads=ALL_HEADS)
    keywords = {**OPTIONS[options], "reduction": reduction}
    grad_output = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) if reduction == "none" else None
    compare(
        gs.multi_step_loss(ALL_HEADS, predictions, targets, **keywords),
        fused_only(ALL_HEADS, predictions, targets, **keywords),
        predictions,
        grad_output=grad_output,
    )


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("reduction", ["mean", "none", "valid_mean"])
def test_many_samples(reduction, nonfinite, fused_only):
    """Samples are added up in blocks."""
    batch, steps = 2500, 2
    heads = {name: HEADS[name] for name in ("value", "policy", "distance")} | {"actor": gs.PolicyGradient()}
    predictions, targets = arguments(batch, steps, heads={name: HEADS[name] for name in list(heads)[:3]})
    targets["distance"][1][[3, 1024, 2499]] = math.inf
    generator = torch.Generator().manual_seed(3)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    predictions["actor"] = normal(batch, steps, 4).requires_grad_()
    actions = torch.randint(4, (batch, steps), generator=generator)
    targets["actor"] = {"actions": actions, "advantages": normal(batch, steps), "log_probs": -normal(batch, steps) - 2}
    by_sample = {
        "step_weights": torch.rand(batch, steps, generator=generator),
        "importance_weights": {"policy": torch.rand(batch, generator=generator)},
        "mask": {"value": torch.rand(batch, steps, generator=generator) < 0.7},
    }
    for options in ({}, by_sample):
        keywords = {"reduction": reduction, "nonfinite": nonfinite, **options}
        compare(
            gs.multi_step_loss(heads, predictions, targets, **keywords),
            fused_only(heads, predictions, targets, **keywords),
            predictions,
            grad_output=torch.rand(batch, generator=generator).double() if reduction == "none" else None,
        )


def turned(given):
    """Exchange samples and steps, the first two dimensions."""
    if isinstance(given, dict):
        return {name: turned(value) for name, value in given.items()}
    return given.transpose(0, 1) if isinstance(given, torch.Tensor) and given.dim() >= 2 else given


def test_masked_classes_follow_batch_first():
    """A class may be out of range where the mask is False."""
    mask = torch.ones(2, 2, dtype=torch.bool)
    mask[0, 1] = False  # step 0, sample 1
    logits, classes = torch.zeros(2, 2, 3), torch.tensor([[0, -100], [1, 2]])
    out = gs.multi_step_loss({"p": gs.SoftCrossEntropy()}, {"p": logits}, {"p": classes}, mask=mask, batch_first=False)
    assert out.per_step["p"][0, 1] == 0
    with pytest.raises(ValueError, match=r"step 0 must be classes .* sample 1 has -100"):
        gs.multi_step_loss({"p": gs.SoftCrossEntropy()}, {"p": logits}, {"p": classes}, mask=mask.T, batch_first=False)


def test_every_finite_half_is_converted_as_by_pytorch():
    """A squared error of width 1 converts from half and back; the bits must equal PyTorch's."""
    bits = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        values = bits.view(dtype)
        values = values[values.isfinite()].unsqueeze(1).contiguous().requires_grad_()
        out = gs.multi_step_loss(
            {"x": gs.MeanSquaredError()},
            {"x": [values]},
            {"x": [torch.zeros_like(values, dtype=torch.float32)]},
            reduction="sum",
            step_weights=[0.25],
        )
        (g,) = torch.autograd.grad(out.loss, values, torch.ones(()))
        assert torch.equal(g.view(torch.int16), (values.float() * 0.5).to(dtype).view(torch.int16))


def test_inference_mode_is_fused(fused_only):
    predictions, targets = arguments(heads=ALL_HEADS)
    truth = fused_only(ALL_HEADS, predictions, targets)
    with torch.inference_mode():
        for module in (gs.MultiStepLoss(**ALL_HEADS), functools.partial(gs.multi_step_loss, ALL_HEADS)):
            made_here = {name: [p.clone() for p in entries] for name, entries in predictions.items()}
            for given in (predictions, made_here):
                out = module(given, targets)
                torch.testing.assert_close(out.loss, truth.loss.detach(), rtol=1e-12, atol=1e-12)
                assert not out.loss.requires_grad


def test_outputs_are_detached():
    predictions, targets = arguments()
    out = gs.multi_step_loss(HEADS, predictions, targets)
    rest = [getattr(out, field) for field in OUTPUTS[1:]]
    tensors = [t for value in rest for t in (value.values() if isinstance(value, dict) else [value])]
    assert out.loss.requires_grad
    assert not any(t.requires_grad for t in tensors)
    assert set(out.expected) == {"value", "reward"}
    assert set(out.entropy) == {"policy"}
    assert out.per_step["reward"].shape == (3, 3)


# ---- Derivatives ----------------------------------------------------------------------------------------------------


def test_a_vector_as_long_as_eps_has_a_direction():
    """A vector is divided by its length if that is at least eps, otherwise by eps."""
    x = torch.tensor([[3.0, 0.0], [0.0, -3.0], [2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[1.0, 5.0], [2.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    lengths = x.norm(dim=-1), target.norm(dim=-1)
    x_length, target_length = (torch.where(length >= 3.0, length, 3.0) for length in lengths)
    (expected,) = torch.autograd.grad(-((x * target).sum(-1) / (x_length * target_length)).mean(), x)
    for function in (gs.multi_step_loss, gs.reference.multi_step_loss):
        loss = function({"c": gs.NegativeCosine(eps=3.0)}, {"c": [x]}, {"c": [target]}).loss
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], expected, rtol=1e-14, atol=1e-15)


def test_the_cosine_of_subnormal_vectors_is_a_number():
    """The reciprocal of a vector's largest element is infinite."""
    x = torch.full((1, 4), 5e-324, dtype=torch.float64, requires_grad=True)
    loss = gs.multi_step_loss({"c": gs.NegativeCosine()}, {"c": [x]}, {"c": [x.detach()]}).loss
    assert loss.item() == 0
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], -x.detach() * 1e16, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("dtype", "scales", "least", "tolerance"),
    [
        (torch.float64, (1e-160, 1.0, 1e160), 1e-300, 1e-13),
        (torch.float32, (1e-30, 1e-20, 1.0, 1e20, 1e30), 1e-37, 2e-6),
    ],
)
def test_the_cosine_of_long_and_short_vectors(dtype, scales, least, tolerance):
    """Squares of the lengths, and products of two lengths, overflow or underflow."""
    x, target = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for x_scale, target_scale, eps in itertools.product(scales, scales, (1e-8, least)):
        heads = {"c": gs.NegativeCosine(eps=eps)}
        t = (target * target_scale).to(dtype)
        given = (x * x_scale).to(dtype).requires_grad_()
        exact = given.detach().double().requires_grad_()
        found = gs.multi_step_loss(heads, {"c": [given]}, {"c": [t]}, impl="fused")
        expected = gs.reference.multi_step_loss(heads, {"c": [exact]}, {"c": [t.double()]})
        tiny = torch.finfo(dtype).tiny
        torch.testing.assert_close(found.loss.double(), expected.loss, rtol=tolerance, atol=tiny)
        (gradient,) = torch.autograd.grad(found.loss, given)
        (truth,) = torch.autograd.grad(expected.loss, exact)
        atol = tolerance * float(truth.abs().max()) + tiny
        torch.testing.assert_close(gradient.double(), truth, rtol=0, atol=atol)
        if dtype == torch.float32:
            norms = [out.head_gradient_norms["c"].double() for out in (found, expected)]
            torch.testing.assert_close(*norms, rtol=tolerance, atol=tiny)


@pytest.mark.parametrize("function", [gs.multi_step_loss, gs.reference.multi_step_loss])
@pytest.mark.parametrize("kappa", [0.0, 1e-46, 1e-39])
def test_quantiles_next_to_their_targets(kappa, function):
    """The derivative of |u| is 1 for subnormal u too, and 0 at 0."""
    x = torch.zeros(1, 2, requires_grad=True)
    for target, expected in ((1e-40, [-0.25, -0.75]), (-1e-45, [0.75, 0.25]), (0.0, [0.0, 0.0])):
        loss = function({"q": gs.QuantileHuber(kappa=kappa)}, {"q": [x]}, {"q": [torch.tensor([[target]])]}).loss
        assert torch.autograd.grad(loss, x)[0].tolist() == [expected]


@pytest.mark.any_version
def test_gradcheck_and_gradgradcheck(fused_only, monkeypatch):
    predictions, targets = arguments(batch=2, steps=2, heads=ALL_HEADS)
    inputs = leaves(predictions)
    weights = torch.tensor([0.5, 2.0], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])

    def function(*tensors):
        remaining = iter(tensors)
        rebuilt = {name: [next(remaining) for _ in entries] for name, entries in predictions.items()}
        options = {"importance_weights": weights, "mask": mask, "reduction": "none"}
        return gs.multi_step_loss(ALL_HEADS, rebuilt, targets, **options).loss

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    monkeypatch.setattr(gs.reference, "multi_step_loss", fused_only)  # the reference computes the second derivative
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_second_derivative_of_stacked_and_repeated_predictions():
    heads = {"value": gs.TwoHot(SUPPORT)}
    target = torch.randn(2, 3, dtype=torch.float64)
    stacked = torch.randn(2, 3, 11, dtype=torch.float64, requires_grad=True)
    row = torch.randn(2, 11, dtype=torch.float64, requires_grad=True)
    for x, entries in ((stacked, stacked), (row, [row, row, row])):
        results = []
        for function in (gs.multi_step_loss, gs.reference.multi_step_loss):
            loss = function(heads, {"value": entries}, {"value": target}, step_gradient_scale=[1, 2, 3]).loss
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            results.append((first, *torch.autograd.grad(first.square().sum(), x)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("changed", [0, 1], ids=["prediction", "target"])
def test_second_derivative_after_in_place_raises(changed):
    predictions, targets = given = arguments()
    out = gs.multi_step_loss(HEADS, predictions, targets)
    with torch.no_grad():
        given[changed]["policy"][0].add_(1)
    with pytest.raises(RuntimeError, match="in-place"):
        torch.autograd.grad(out.loss, leaves(predictions), create_graph=True)


# ---- Masks, illegal actions, NaN ------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
class TestWeightsThatAreNotFinite:
    """NaN and infinite weights have no effect where an entry is skipped, masked or scaled by 0."""

    LOSSES = torch.tensor([1.0, 2.0, 3.0])

    def run(self, impl, losses=LOSSES, **options):
        x = losses.clone().requires_grad_()
        out = gs.multi_step_loss({"own": gs.PerStepLoss()}, {"own": [x, x]}, {}, impl=impl, **options)
        out.loss.sum().backward()
        return out, x.grad

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none", "valid_mean"])
    def test_step_weight_of_a_skipped_sample(self, reduction, bad, impl):
        weights = torch.tensor([[1.0, 1.0], [1.0, bad], [1.0, 1.0]])
        out, gradient = self.run(impl, step_weights=weights, nonfinite="skip", reduction=reduction)
        divisor = {"mean": 3, "valid_mean": 6}.get(reduction, 1)
        torch.testing.assert_close(out.loss.sum(), torch.tensor(8.0) / divisor)
        torch.testing.assert_close(out.head_losses["own"], torch.tensor(8.0) / divisor)
        torch.testing.assert_close(gradient, torch.tensor([2.0, 0.0, 2.0]) / divisor, rtol=1e-6, atol=0)
        assert out.num_nonfinite.item() == 1

    def test_importance_weight_of_a_skipped_sample(self, bad, impl):
        losses = torch.tensor([1.0, bad, 3.0])
        weights = torch.tensor([1.0, bad, 0.5])
        out, gradient = self.run(impl, losses, importance_weights=weights, nonfinite="skip", reduction="sum")
        assert out.loss.item() == 5.0
        assert gradient.tolist() == [2.0, 0.0, 1.0]

    def test_importance_weights_do_not_affect_skipping(self, bad, impl):
        weights = torch.tensor([1.0, bad, 1.0])
        out, gradient = self.run(impl, importance_weights=weights, nonfinite="skip", reduction="none")
        assert out.num_nonfinite.item() == 0
        assert out.loss[[0, 2]].tolist() == [2.0, 6.0]
        assert not out.loss[1].isfinite()
        assert gradient[[0, 2]].tolist() == [2.0, 2.0]

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_weights_of_a_masked_sample(self, reduction, bad, impl):
        out, gradient = self.run(
            impl,
            mask=torch.tensor([[True, True], [False, False], [True, False]]),
            importance_weights=torch.tensor([1.0, bad, 1.0]),
            step_weights=torch.tensor([[1.0, 1.0], [bad, bad], [1.0, bad]]),
            reduction=reduction,
        )
        divisor = 3 if reduction == "mean" else 1
        torch.testing.assert_close(out.loss.sum(), torch.tensor(5.0) / divisor)
        torch.testing.assert_close(out.head_losses["own"], torch.tensor(5.0) / divisor)
        torch.testing.assert_close(gradient, torch.tensor([2.0, 0.0, 1.0]) / divisor, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_gradient_scale_of_0(self, as_tensor, bad, impl):
        scale = [0.0, 1.0]
        weights = torch.tensor([[1.0, 1.0], [bad, 1.0], [1.0, 1.0]])
        x, y = (self.LOSSES.clone().requires_grad_() for _ in range(2))
        out = gs.multi_step_loss(
            {"own": gs.PerStepLoss()},
            {"own": [x, y]},
            {},
            step_gradient_scale=torch.tensor(scale) if as_tensor else scale,
            step_weights=weights,
            importance_weights=torch.tensor([1.0, 1.0, bad]),
            reduction="none",
            impl=impl,
        )
        out.loss.backward(torch.tensor([bad, 1.0, 1.0]))
        assert x.grad.tolist() == [0.0, 0.0, 0.0]
        assert y.grad[1].item() == 1.0


def with_zeros_in_gradients(dtype, width=11):
    """Heads, predictions and targets of five samples at one step, some of whose gradients have zeros among others."""
    support = gs.Support(-10, 10, width)
    heads = {
        "two_hot": gs.TwoHot(support),
        "smooth": gs.TwoHot(support, label_smoothing=0.1),
        "gauss": gs.HLGauss(support),
        "policy": gs.SoftCrossEntropy(),
        "entropy": gs.SoftCrossEntropy(entropy_weight=0.1),
        "quantiles": gs.QuantileHuber(),
        "vector": gs.MeanSquaredError(),
        "divergence": gs.CategoricalKL(),
    }
    generator = torch.Generator().manual_seed(width)
    predictions, targets = {}, {}
    for name, head in heads.items():
        sizes = (2, width) if name == "divergence" else (width,)
        x = torch.randn(5, 1, *sizes, generator=generator).to(dtype)
        if name != "vector":
            x[1:3, ..., 0] = 3000.0
        predictions[name] = x.requires_grad_()
        targets[name] = torch.rand(5, 1, *(() if head.decodes else sizes), generator=generator)
    targets["vector"] = predictions["vector"].detach().float() + torch.arange(width) % 2
    targets["quantiles"] = predictions["quantiles"].detach()[..., 1:2].float()
    return heads, predictions, targets


def norm_of_gradients(*gradients):
    return torch.cat([gradient.double().flatten() for gradient in gradients]).square().sum().sqrt()


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [INF, -INF, NAN, 1e30])
@pytest.mark.parametrize("argument", ["importance_weights", "step_weights", "head_weights", "step_gradient_scale"])
def test_norms_of_gradients_that_are_not_finite(argument, weight, dtype, impl):
    """A norm is NaN where its gradient has NaN, inf where it has inf, and else finite. 0 times inf is NaN."""
    for width in (5, 40):
        heads, predictions, targets = with_zeros_in_gradients(dtype, width)
        weights = torch.ones(5, 1, dtype=torch.float64)
        weights[2] = weight
        if argument == "head_weights":
            weights = dict.fromkeys(heads, torch.tensor(weight, dtype=torch.float64))
        elif argument == "importance_weights":
            weights = weights.squeeze(1)
        out = gs.multi_step_loss(heads, predictions, targets, **{argument: weights}, reduction="sum", impl=impl)
        gradients = torch.autograd.grad(out.loss, list(predictions.values()))
        found = torch.stack(list(out.head_gradient_norms.values())).double()
        expected = torch.stack([norm_of_gradients(gradient) for gradient in gradients])
        rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)
        if impl == "fused" and weight == INF and argument != "head_weights" and dtype != torch.bfloat16:
            names = [name for name, norm in zip(heads, found, strict=True) if norm.isnan()]
            assert {"two_hot", "vector", "quantiles"} <= set(names)


def test_classes_at_one_step_and_strided_probabilities_at_another():
    logits = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    targets = [torch.tensor([0, 3, 1]), torch.rand(4, 3, dtype=torch.float64).t()]
    heads = {"policy": gs.SoftCrossEntropy()}
    losses = [
        function(heads, {"policy": logits}, {"policy": targets}).loss
        for function in (gs.multi_step_loss, gs.reference.multi_step_loss)
    ]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits) for loss in losses))


def test_an_illegal_bin():
    x = torch.zeros(1, 11, dtype=torch.float64)
    x[0, 0] = -float("inf")
    x.requires_grad_()
    gs.multi_step_loss({"v": gs.TwoHot(SUPPORT)}, {"v": [x]}, {"v": [torch.zeros(1).double()]}).loss.backward()
    assert x.grad.isfinite().all()
    assert x.grad[0, 0] == 0


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.parametrize("illegal", [math.nan, math.inf, -math.inf])
def test_logits_without_a_softmax(illegal, width, impl):
    """A row with NaN or inf, or of -inf alone, has a loss of NaN, also if all targets are 0."""
    logits = torch.zeros(8, width)
    logits[1, : 1 if illegal != -math.inf else width] = illegal
    heads, predictions, targets = {"p": gs.SoftCrossEntropy()}, {"p": [logits]}, {"p": [torch.zeros(8, width)]}
    out = gs.multi_step_loss(heads, predictions, targets, nonfinite="skip", impl=impl)
    assert out.per_sample.isnan().tolist() == [False, True] + [False] * 6
    assert out.num_nonfinite == 1


def test_peaked_logits():
    logits = torch.tensor([[1e4, 0.0, -1e4], [88.0, 88.0, 88.0], [-3e38, 0.0, 3e38]], requires_grad=True)
    target = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    out = gs.multi_step_loss({"p": gs.SoftCrossEntropy()}, {"p": [logits]}, {"p": [target]}, reduction="none")
    torch.testing.assert_close(out.loss, torch.tensor([1e4, 1.0986123, 0.0]))
    out.loss.sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - target)


# ---- Faults that reviews found --------------------------------------------------------------------------------------


def _gradients_by_every_path(function, x):
    leaf = x.clone().requires_grad_()
    return [
        torch.autograd.grad(function(leaf), leaf)[0],
        torch.autograd.grad(function(leaf), leaf, create_graph=True)[0].detach(),
        torch.func.grad(function)(x),
        torch.func.vmap(torch.func.grad(function))(x.unsqueeze(0))[0],
    ]


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize(
    ("kappa", "target", "expected"),
    [(1.0, INF, [-0.25, -0.75]), (0.0, NAN, [NAN, NAN]), (1.0, NAN, [NAN, NAN]), (0.0, 0.0, [0.0, 0.0])],
)
def test_quantiles_of_samples_that_are_not_finite(kappa, target, expected, impl):
    x, head = torch.zeros(1, 2, requires_grad=True), gs.QuantileHuber(kappa=kappa)
    loss = gs.multi_step_loss({"q": head}, {"q": [x]}, {"q": [torch.tensor([[target]])]}, impl=impl).loss
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], torch.tensor([expected]), equal_nan=True)


@pytest.mark.parametrize("eps", [1e-50, 1e300])
def test_the_eps_of_a_cosine_is_a_double(eps):
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0]], requires_grad=True)
    targets = {"c": [torch.tensor([[1.0, 0.0], [0.0, 0.0]])]}
    found = []
    for impl in ("fused", "reference"):
        loss = gs.multi_step_loss({"c": gs.NegativeCosine(eps=eps)}, {"c": [x]}, targets, impl=impl).loss
        found.append((loss, *torch.autograd.grad(loss, x)))
        assert not found[-1][1].isnan().any()
    torch.testing.assert_close(found[0], found[1])


def test_gradient_scale_of_an_infinite_loss():
    x = torch.tensor([[float("inf")], [1.0]])
    for scale in (0.5, 0.0, 2.0):
        function = lambda y, s=scale: gs.reduce_multi_step(y, step_gradient_scale=[s], reduction="sum").loss
        for g in _gradients_by_every_path(function, x):
            assert torch.equal(g, torch.tensor([[scale], [scale]]))


def test_gradient_scale_leaves_the_value():
    mask = torch.tensor([[True, True], [True, False]])
    scale = torch.tensor([[1.0, 1.0], [1.0, float("nan")]])
    x = torch.ones(2, 2)
    masked = lambda y: gs.reduce_multi_step(y, step_gradient_scale=scale, mask=mask).loss
    unmasked = lambda y: gs.reduce_multi_step(y, step_gradient_scale=scale).loss
    for function, value in ((masked, 1.5), (unmasked, 2.0)):
        assert function(x) == value
        assert torch.vmap(function)(x.unsqueeze(0)) == value
    for g in _gradients_by_every_path(masked, x):
        torch.testing.assert_close(g, torch.tensor([[0.5, 0.5], [0.5, 0.0]]))


def test_numbers_of_any_kind_take_the_fused_path(fused_only):
    np = pytest.importorskip("numpy")
    losses = torch.ones(2, 3)
    for numbers in (list(np.float32([1, 0.5, 2])), range(3), [True, False, 2], [torch.tensor(1.0)] * 3, (1, 2.5, 3)):
        expected = sum(float(number) for number in numbers)
        assert gs.reduce_multi_step(losses, step_weights=numbers).loss == expected


def test_fractions_are_accepted_as_numbers():
    third, x, t = Fraction(1, 3), torch.tensor([[0.5, 2.0]], requires_grad=True), torch.tensor([[0.5, 0.25]])

    def results(number, impl):
        support = gs.Support(-number, number, 2, "identity", eps=number)
        heads = {
            "square": gs.MeanSquaredError(weight=number),
            "policy": gs.SoftCrossEntropy(label_smoothing=number, entropy_weight=number),
            "bins": gs.HLGauss(support, sigma_ratio=number),
            "cosine": gs.NegativeCosine(eps=number),
        }
        targets = {**dict.fromkeys(heads, (t,)), "bins": [t[:, 0]]}
        head_weights = {"square": number}
        loss = gs.multi_step_loss(heads, dict.fromkeys(heads, (x,)), targets, head_weights=head_weights, impl=impl).loss
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss, gradient, support.two_hot(t), gs.reference.hl_gauss(t, support, 0.5)

    for impl in ("fused", "reference"):
        for ours, expected in zip(results(third, impl), results(1 / 3, impl), strict=True):
            assert torch.equal(ours, expected)


def test_a_tensor_is_rejected_as_weight_of_a_head():
    for make in (
        lambda: gs.PerStepLoss(weight=torch.tensor(1.0)),
        lambda: gs.TwoHot(SUPPORT, label_smoothing=torch.tensor(0.1)),
        lambda: gs.NegativeCosine(eps="a"),
    ):
        with pytest.raises(TypeError, match="must be a number, but it is of type"):
            make()


# ---- Determinism and memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [64, 5000])
def test_bitwise_the_same_from_run_to_run_and_for_any_number_of_threads(batch):
    threads = torch.get_num_threads()
    try:
        first, second, one = loss_digest(batch), loss_digest(batch), loss_digest(batch, threads=1)
    finally:
        torch.set_num_threads(threads)
    for a, b, c in zip(first, second, one, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def _peak_extra_bytes(function):
    """Peak bytes of PyTorch's CPU allocator during a call, above the bytes held before it."""
    gs.empty_cache()  # larger memory of an earlier call would be used
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 0
    return peak


def test_peak_memory_is_the_size_of_the_gradients():
    loss_fn = gs.MultiStepLoss.muzero()
    batch, steps = 64, 6
    predictions = {
        name: [torch.randn(batch, 18 if name == "policy" else 601, requires_grad=True) for _ in range(steps)]
        for name in loss_fn.heads
    }
    targets = {
        name: [torch.rand(batch, 18) if name == "policy" else torch.randn(batch) for _ in range(steps)]
        for name in loss_fn.heads
    }
    size = sum(4 * p.numel() for p in leaves(predictions))
    assert _peak_extra_bytes(lambda: loss_fn(predictions, targets).loss.backward()) <= size + 2**17
    with torch.no_grad():
        assert _peak_extra_bytes(lambda: loss_fn(predictions, targets)) <= 2**17


# ---- Wrong arguments ------------------------------------------------------------------------------------------------


def _break(change):
    predictions, targets = arguments()
    module = gs.MultiStepLoss(**HEADS)
    given = leaves(predictions)
    before = [p.detach().clone() for p in given]
    options: dict = {}
    change(predictions, targets, options)
    messages = set()
    for function in (gs.multi_step_loss, gs.reference.multi_step_loss, lambda heads, *a, **k: module(*a, **k)):
        with pytest.raises((ValueError, TypeError)) as info:
            function(HEADS, predictions, targets, **options)
        messages.add(str(info.value))
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))
    (message,) = messages
    return message


WRONG = {
    "missing head": (lambda p, t, o: p.pop("value"), ["predictions", "'value'", "value, reward, policy"]),
    "missing target": (lambda p, t, o: t.pop("value"), ["targets", "'value'"]),
    "unknown head": (lambda p, t, o: p.update(vlaue=p["value"]), ["predictions", "'vlaue'", "not a head"]),
    "number of steps": (lambda p, t, o: p["value"].pop(), ["prediction", "'value'", "4 entries", "it has 3"]),
    "number of targets": (lambda p, t, o: t["reward"].pop(), ["target", "'reward'", "3 entries", "it has 2"]),
    "wrong width": (
        lambda p, t, o: p["value"].__setitem__(2, torch.zeros(3, 10)),
        ["prediction", "'value'", "step 2", "[3, 11]", "[3, 10]"],
    ),
    "wrong batch": (
        lambda p, t, o: p["policy"].__setitem__(1, torch.zeros(2, 4)),
        ["prediction", "'policy'", "step 1", "[3, A]", "[2, 4]"],
    ),
    "width that changes": (
        lambda p, t, o: (p["policy"].__setitem__(1, torch.zeros(3, 5)), t["policy"].__setitem__(1, torch.zeros(3, 5))),
        ["prediction", "'policy'", "step 1", "[3, 5]"],
    ),
    "target shape": (
        lambda p, t, o: t["reward"].__setitem__(0, torch.zeros(3, 1)),
        ["target", "'reward'", "step 1", "[3]", "[3, 1]"],
    ),
    "policy target shape": (
        lambda p, t, o: t["policy"].__setitem__(3, torch.zeros(3, 5)),
        ["target", "'policy'", "step 3", "[3, 4]", "[3, 5]"],
    ),
    "dtype": (
        lambda p, t, o: p["value"].__setitem__(0, torch.zeros(3, 11, dtype=torch.int64)),
        ["prediction", "'value'", "step 0", "float32", "int64"],
    ),
    "target dtype": (
        lambda p, t, o: t["policy"].__setitem__(0, torch.zeros(3, 4, dtype=torch.int64)),
        ["target", "'policy'", "step 0", "int64"],
    ),
    "device": (
        lambda p, t, o: t["value"].__setitem__(0, torch.zeros(3, device="meta")),
        ["target", "'value'", "step 0", "meta", "cpu"],
    ),
    "target requires grad": (
        lambda p, t, o: t["value"].__setitem__(1, torch.zeros(3, requires_grad=True)),
        ["target", "'value'", "step 1", "requires grad", "detach"],
    ),
    "not a tensor": (
        lambda p, t, o: p["value"].__setitem__(1, [0.0]),
        ["prediction", "'value'", "step 1", "tensor", "list"],
    ),
    "no entries": (lambda p, t, o: p.update(value=[]), ["prediction", "'value'", "no entries"]),
    "not a list": (lambda p, t, o: p.update(value=3.0), ["prediction", "'value'", "float"]),
    "stacked without steps": (lambda p, t, o: p.update(value=torch.zeros(3)), ["prediction", "'value'", "[B, T, 11]"]),
    "step weights of bytes": (lambda p, t, o: o.update(step_weights=b"\x01" * 4), ["step_weights", "of type bytes"]),
    "strings as weights": (lambda p, t, o: o.update(step_weights=["0.5"] * 4), ["step_weights", "it holds '0.5'"]),
    "importance shape": (
        lambda p, t, o: o.update(importance_weights=torch.ones(4)),
        ["importance_weights", "[3]", "[4]"],
    ),
    "importance type": (lambda p, t, o: o.update(importance_weights=[1.0] * 3), ["importance_weights", "list"]),
    "importance requires grad": (
        lambda p, t, o: o.update(importance_weights=torch.ones(3, requires_grad=True)),
        ["importance_weights", "requires grad"],
    ),
    "step weights length": (lambda p, t, o: o.update(step_weights=[1.0, 2.0]), ["step_weights", "4 numbers", "has 2"]),
    "step weights shape": (
        lambda p, t, o: o.update(step_weights=torch.ones(4, 3)),
        ["step_weights", "[4]", "[3, 4]", "[4, 3]"],
    ),
    "step weights type": (lambda p, t, o: o.update(step_weights=2.0), ["step_weights", "float"]),
    "gradient scale name": (lambda p, t, o: o.update(step_gradient_scale="unrol"), ["step_gradient_scale", "'unrol'"]),
    "step weights require grad": (
        lambda p, t, o: o.update(step_weights=[1.0, 1.0, 1.0, torch.ones((), requires_grad=True)]),
        ["step_weights requires grad", "detach()"],
    ),
    "gradient scales require grad": (
        lambda p, t, o: o.update(step_gradient_scale=[torch.ones((), requires_grad=True)] * 4),
        ["step_gradient_scale requires grad", "detach()"],
    ),
    "step weights too many": (lambda p, t, o: o.update(step_weights=range(2**63)), ["step_weights", "4 numbers"]),
    "step weights many": (lambda p, t, o: o.update(step_weights=range(10**12)), ["step_weights", "has 1000000000000"]),
    "step weights too large": (
        lambda p, t, o: o.update(step_weights=[10**400, 1, 1, 1]),
        ["step_weights", "range of a float"],
    ),
    "step weights words": (lambda p, t, o: o.update(step_weights=["a"] * 4), ["step_weights", "numbers", "'a'"]),
    "mask dtype": (lambda p, t, o: o.update(mask=torch.ones(3, 4)), ["mask", "bool", "float32"]),
    "mask shape": (lambda p, t, o: o.update(mask=torch.ones(4, 3) > 0), ["mask", "[3, 4]", "[4, 3]"]),
    "mask head": (lambda p, t, o: o.update(mask={"vlaue": torch.ones(3, 4) > 0}), ["mask", "'vlaue'"]),
    "reduction": (lambda p, t, o: o.update(reduction="avg"), ["reduction", "'mean'", "'avg'"]),
    "reduction type": (lambda p, t, o: o.update(reduction=None), ["reduction", "'mean'", "None"]),
    "batch_first type": (lambda p, t, o: o.update(batch_first=None), ["batch_first", "NoneType"]),
    "stacked without entries": (
        lambda p, t, o: (p.update(value=torch.zeros(3, 0, 11)), t.update(value=torch.zeros(3, 0))),
        ["prediction", "'value'", "no entries"],
    ),
    "head with a step too many": (
        lambda p, t, o: (p["reward"].append(p["reward"][0]), t["reward"].append(t["reward"][0])),
        ["'value'", "5 entries", "'reward'", "first_step = 1", "it has 4"],
    ),
    "without a batch": (
        lambda p, t, o: p["value"].__setitem__(0, torch.zeros(11)),
        ["prediction", "'value'", "step 0", "[B, 11]", "[11]"],
    ),
    "nonfinite": (lambda p, t, o: o.update(nonfinite="drop"), ["nonfinite", "'skip'", "'drop'"]),
    "predictions": (lambda p, t, o: (p.clear()), ["predictions", "'value'"]),
}


def test_flags_and_choices_of_numpy():
    np = pytest.importorskip("numpy")
    for options, error, words in (
        ({"batch_first": np.bool_(True)}, TypeError, r"batch_first must be True or False, .* numpy\.bool"),
        ({"normalize_importance_weights": "no"}, TypeError, "normalize_importance_weights must be True or False"),
        ({"reduction": np.array(["mean", "sum"])}, ValueError, "reduction must be 'mean' or"),
    ):
        for function in (gs.multi_step_loss, gs.reference.multi_step_loss):
            with pytest.raises(error, match=f"multi_step_loss: {words}"):
                function({"a": gs.PerStepLoss()}, {"a": torch.ones(2, 1)}, {}, **options)


def test_check_is_a_flag():
    with pytest.raises(TypeError, match="multi_step_loss: check must be True or False, but it is of type str"):
        gs.multi_step_loss({"a": gs.PerStepLoss()}, {"a": torch.ones(2, 1)}, {}, check="no")


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_name_expected_and_actual(wrong):
    change, words = WRONG[wrong]
    message = _break(change)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda n: gs.PerStepLoss(weight=n), "PerStepLoss: weight"),
        (lambda n: gs.Support(-1, n, 5), "Support: maximum"),
        (lambda n: SUPPORT.hl_gauss(torch.zeros(1), n), "Support.hl_gauss: sigma_ratio"),
        (lambda n: gs.scale_gradient(torch.zeros(1), n), "scale_gradient: scale"),
        (lambda n: gs.clip_gradients_([torch.nn.Parameter(torch.zeros(1))], n), "clip_gradients_: max_norm"),
        (lambda n: gs.unroll(None, None, None, torch.zeros(1, 1), hidden_scale=n), "unroll: hidden_scale"),
    ],
)
def test_numbers_that_no_float_can_hold(call, argument):
    with pytest.raises(ValueError, match=f"^{argument} must be a number in the range of a float, but it is too large"):
        call(10**400)


def test_errors_of_an_iterator_are_raised():
    class Broken(list):
        def __iter__(self):
            raise KeyError("broken")

    predictions, targets = arguments()
    for impl in ("auto", "reference"):
        with pytest.raises(KeyError, match="broken"):
            gs.multi_step_loss(HEADS, predictions, targets, step_weights=Broken([1.0] * 4), impl=impl)


def test_errors_of_heads():
    with pytest.raises(ValueError, match="weight must be finite and at least 0, but it is -1"):
        gs.TwoHot(SUPPORT, weight=-1)
    for step in (-1, 2**31, 10**400, 1.0):
        with pytest.raises(ValueError, match="SoftCrossEntropy: first_step must be an integer"):
            gs.SoftCrossEntropy(first_step=step)
    for no in ("no", None, [], 0.5, torch.tensor(0)):
        with pytest.raises(ValueError, match="SoftCrossEntropy: subtract_target_entropy must be True or False"):
            gs.SoftCrossEntropy(subtract_target_entropy=no)
    with pytest.raises(TypeError, match="support must be a Support, but it is of type int"):
        gs.TwoHot(601)
    with pytest.raises(ValueError, match="transform"):
        gs.MeanSquaredError(transform="log")
    with pytest.raises(ValueError, match="Huber: transform"):
        gs.Huber(transform="log")
    for delta in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"Huber: delta must be finite and above 0, but it is {delta}"):
            gs.Huber(delta=delta)
    with pytest.raises(ValueError, match=r"QuantileHuber: kappa must be finite and at least 0, but it is -0\.1"):
        gs.QuantileHuber(kappa=-0.1)
    with pytest.raises(ValueError, match="QuantileHuber: sum_over_quantiles must be True or False, but it is 'mean'"):
        gs.QuantileHuber(sum_over_quantiles="mean")
    with pytest.raises(ValueError, match=r"CategoricalKL: unimix must be between 0 and 1, but it is 1\.5"):
        gs.CategoricalKL(unimix=1.5)
    with pytest.raises(ValueError, match="CategoricalKL: free_nats must be finite and at least 0, but it is -1"):
        gs.CategoricalKL(free_nats=-1)
    with pytest.raises(ValueError, match="CategoricalKL: prediction must be 'q' or 'p', but it is 'prior'"):
        gs.CategoricalKL(prediction="prior")
    with pytest.raises(ValueError, match=r"TwoHot: label_smoothing must be between 0 and 1, but it is 1\.5"):
        gs.TwoHot(SUPPORT, label_smoothing=1.5)
    with pytest.raises(ValueError, match="HLGauss: sigma_ratio must be finite and above 0, but it is 0"):
        gs.HLGauss(SUPPORT, sigma_ratio=0)
    with pytest.raises(TypeError, match="HLGauss: support must be a Support"):
        gs.HLGauss(51)
    with pytest.raises(ValueError, match="SoftCrossEntropy: entropy_weight must be finite, but it is nan"):
        gs.SoftCrossEntropy(entropy_weight=float("nan"))
    with pytest.raises(ValueError, match="NegativeCosine: eps must be finite and above 0, but it is 0"):
        gs.NegativeCosine(eps=0)
    with pytest.raises(ValueError, match="at least one head"):
        gs.MultiStepLoss()
    with pytest.raises(TypeError, match="names of heads must be strings, but 1 is of type int"):
        gs.multi_step_loss({1: gs.PerStepLoss()}, {}, {})
    with pytest.raises(TypeError, match="'value' must be one of the head dataclasses"):
        gs.MultiStepLoss(value=SUPPORT)


def test_arguments_of_heads_are_keyword_only():
    """In `TwoHot(support, 0.25)` the number could be the weight or the label smoothing."""
    for head in ALL_HEADS.values():
        support = [SUPPORT] if head.decodes else []
        type(head)(*support)
        with pytest.raises(TypeError, match="positional argument"):
            type(head)(*support, 0.25)
    assert gs.TwoHot(SUPPORT) == gs.TwoHot(support=SUPPORT)


def test_errors_of_classes():
    heads = {"policy": gs.SoftCrossEntropy(first_step=1), "value": gs.TwoHot(SUPPORT)}
    predictions = {"policy": [torch.zeros(3, 4)], "value": [torch.zeros(3, 11)] * 2}

    def message(classes, **options):
        targets = {"policy": classes if isinstance(classes, torch.Tensor) else [classes], "value": [torch.zeros(3)] * 2}
        with pytest.raises((TypeError, ValueError)) as info:
            gs.multi_step_loss(heads, predictions, {**targets, "policy": [classes]}, **options)
        return str(info.value)

    text = message(torch.tensor([0, 4, 1]))
    for word in ("target", "'policy'", "step 1", "classes from 0 to 3", "sample 1 has 4"):
        assert word in text
    assert "torch.int32" in message(torch.zeros(3, dtype=torch.int32))
    assert "shape [3]" in message(torch.zeros(3, 1, dtype=torch.int64))
    # Masked entries may hold any value.
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    out = gs.multi_step_loss(
        heads, predictions, {"policy": [torch.tensor([0, -100, 1])], "value": [torch.zeros(3)] * 2}, mask=mask
    )
    assert out.loss.isfinite()
    compiled = torch.compile(gs.multi_step_loss, backend="aot_eager")
    with pytest.raises(
        ValueError, match="the target of head 0 at step 1 must be classes from 0 to 3, but sample 1 has 4"
    ):
        compiled({"p": heads["policy"]}, {"p": predictions["policy"]}, {"p": [torch.tensor([0, 4, 1])]})
    # An invalid class whose value cannot be checked gives NaN in its own sample, and reads nothing out of bounds.
    classes = torch.tensor([0, 2**62, -1])
    losses = gs.reference.entry_loss(gs.SoftCrossEntropy(), torch.zeros(3, 4), classes)
    assert losses.isnan().tolist() == [False, True, True]


def test_per_step_loss_has_no_target():
    heads = {"own": gs.PerStepLoss()}
    losses = torch.rand(3, 2)
    for targets in ({}, {"own": None}):
        torch.testing.assert_close(gs.multi_step_loss(heads, {"own": losses}, targets).loss, losses.sum(1).mean())
    with pytest.raises(ValueError, match="PerStepLoss has no target, but targets has an entry for head 'own'"):
        gs.multi_step_loss(heads, {"own": losses}, {"own": losses})


def test_reduce_multi_step():
    """`reduce_multi_step` is the loss with one `PerStepLoss` head, whose losses the user has computed."""
    losses = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    options = {
        "step_weights": torch.tensor([1.0, 0.5, 0.25, 0.125]),
        "step_gradient_scale": "unroll",
        "importance_weights": torch.rand(3),
        "mask": torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool),
        "reduction": "sum",
    }
    expected = gs.multi_step_loss({"loss": gs.PerStepLoss()}, {"loss": losses}, {}, **options)
    (gradient,) = torch.autograd.grad(expected.loss, losses)
    across = {**options, "mask": options["mask"].T, "batch_first": False}
    for entries, given in ((losses, options), (list(losses.unbind(1)), options), (losses.T, across)):
        out = gs.reduce_multi_step(entries, **given)
        assert torch.equal(out.loss, expected.loss)
        assert torch.equal(torch.autograd.grad(out.loss, losses)[0], gradient)
        per_step = out.per_step["loss"] if given is options else out.per_step["loss"].T
        assert torch.equal(per_step, expected.per_step["loss"])
    with pytest.raises(ValueError, match=r"\[B, T\] for PerStepLoss, but it has \[3\]"):
        gs.reduce_multi_step(torch.rand(3))


# ---- The module -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "options"),
    [
        (torch.ones(3), {}),
        ([1.0, 2.0], {}),
        (None, {}),
        (torch.ones(3, 2).long(), {}),
        ([torch.ones(3), torch.ones(2)], {}),
        (torch.ones(3, 2), {"mask": torch.ones(3, 2)}),
        (torch.ones(3, 2), {"mask": {"own": torch.ones(3, 2) > 0}}),
        (torch.ones(3, 2), {"step_weights": [1.0]}),
        (torch.ones(3, 2), {"step_weights": [1.0, -1.0]}),
        (torch.ones(3, 2), {"step_gradient_scale": "unrol"}),
        (torch.ones(3, 2), {"importance_weights": torch.ones(2)}),
        (torch.ones(3, 2), {"head_weights": {"loss": -1}}),
        (torch.ones(3, 2), {"head_weights": 2.0}),
        (torch.ones(3, 2), {"reduction": "avg"}),
        (torch.ones(3, 2), {"nonfinite": "drop"}),
        (torch.ones(3, 2), {"batch_first": 1}),
        (torch.ones(3, 2), {"process_group": "all"}),
        (torch.ones(3, 2), {"normalize_importance_weights": "yes"}),
        (torch.ones(3, 2), {"check": "yes"}),
        (torch.full((3, 2), NAN), {"check": True}),
        (torch.ones(3, 2), {"check": True, "importance_weights": -torch.ones(3)}),
    ],
)
def test_errors_of_reduce_multi_step_begin_with_its_name(losses, options):
    with pytest.raises((TypeError, ValueError), match=r"^reduce_multi_step: "):
        gs.reduce_multi_step(losses, **options)


def test_errors_of_reduce_multi_step_in_transforms_begin_with_its_name():
    with pytest.raises(NotImplementedError, match=r"^reduce_multi_step: check=True reads values"):
        torch.func.vmap(lambda x: gs.reduce_multi_step(x, check=True).loss)(torch.ones(2, 3, 2))
    broken = type("Broken", (list,), {"__iter__": lambda self: {}["broken"]})
    with pytest.raises(KeyError, match=r"^'broken'$"):
        gs.reduce_multi_step(torch.ones(3, 2), step_weights=broken([1.0, 1.0]))


def test_module():
    loss_fn = gs.MultiStepLoss.muzero(SUPPORT, value_weight=0.25)
    assert loss_fn.heads == {
        "value": gs.TwoHot(SUPPORT, weight=0.25),
        "reward": gs.TwoHot(SUPPORT),
        "policy": gs.SoftCrossEntropy(),
    }
    assert "value=TwoHot(" in repr(loss_fn)
    assert gs.MultiStepLoss.muzero(SUPPORT, 0.25, root_reward=True).heads == loss_fn.heads
    assert gs.MultiStepLoss.muzero(SUPPORT, 0.25, root_reward=False).heads == {
        **loss_fn.heads,
        "reward": gs.TwoHot(SUPPORT, first_step=1),
    }
    with pytest.raises(TypeError, match=r"^MultiStepLoss.muzero: root_reward must be True or False"):
        gs.MultiStepLoss.muzero(root_reward=torch.zeros(2))
    assert gs.MultiStepLoss.muzero().heads["value"].support.num_bins == 601
    x = torch.randn(2, 4, requires_grad=True)
    values = [torch.randn(2, 11)]
    predictions = {"policy": [x], "value": values, "reward": values}
    targets = {"policy": [torch.rand(2, 4)], "value": [torch.ones(2)], "reward": [torch.ones(2)]}
    first = loss_fn(predictions, targets).loss
    for again in (copy.deepcopy(loss_fn), pickle.loads(pickle.dumps(loss_fn))):
        assert torch.equal(again(predictions, targets).loss, first)


@pytest.mark.parametrize("batch_first", [True, False])
def test_muzero_targets_without_the_reward_of_the_root(batch_first):
    """`MultiStepLoss.muzero` predicts a reward at the root; its targets have one if the caller has passed it."""
    rewards, root_values = torch.ones(2, 3), torch.ones(2, 4)
    predictions = {"value": torch.zeros(2, 3, 11), "reward": torch.zeros(2, 3, 11), "policy": torch.zeros(2, 3, 4)}
    if not batch_first:
        rewards, root_values = rewards.T, root_values.T
        predictions = {name: prediction.transpose(0, 1) for name, prediction in predictions.items()}
    policy = torch.full(predictions["policy"].shape, 0.25)
    loss_fn = gs.MultiStepLoss.muzero(SUPPORT)

    def loss(**options):
        window = {"num_unroll_steps": 2, "td_steps": 1, "discount": 0.9, "batch_first": batch_first, **options}
        targets = gs.muzero_targets(rewards, root_values, **window)
        given = {"value": targets.values, "reward": targets.rewards, "policy": policy}
        return loss_fn(predictions, given, batch_first=batch_first).loss

    message = r"target of head 'reward' must have 3 entries .*has 2; .*muzero_targets, pass root_reward= to it, or.*"
    with pytest.raises(ValueError, match=message + "first_step=1"):
        loss()
    with_root = loss(root_reward=torch.zeros(2))
    loss_fn = gs.MultiStepLoss.muzero(SUPPORT, root_reward=False)
    predictions["reward"] = predictions["reward"][:, 1:] if batch_first else predictions["reward"][1:]
    torch.testing.assert_close(loss(), with_root - math.log(11))  # uniform predictions: log S for each entry


def test_a_head_may_be_called_self():
    loss_fn = gs.MultiStepLoss(self=gs.PerStepLoss())
    assert loss_fn({"self": torch.ones(2, 3)}, {}).loss == 3


@pytest.mark.cpu_kernels
def test_the_storage_of_a_gradient_has_the_size_of_the_gradient():
    predictions, targets = arguments(batch=200)
    loss_fn = gs.MultiStepLoss(**HEADS)
    grads = gradients(loss_fn(predictions, targets), predictions)
    for g in grads:
        assert g.untyped_storage().nbytes() == g.nbytes


class Walking(Mapping):
    """A mapping with `keys()` and `items()`; iteration runs over the batch, as with a TensorDict."""

    def __init__(self, entries):
        self.entries = entries

    def __getitem__(self, name):
        return self.entries[name]

    def __len__(self):
        return len(next(iter(self.entries.values())))

    def __iter__(self):
        return iter([{}] * len(self))

    def keys(self):
        return self.entries.keys()

    def items(self):
        return self.entries.items()


@pytest.mark.parametrize("function", [gs.multi_step_loss, gs.reference.multi_step_loss])
def test_mappings_are_read_by_their_items(function):
    predictions, targets = arguments(batch=4)
    masks = {"value": torch.rand(4, 4) > 0.5, "policy": torch.rand(4, 4) > 0.5}
    expected = gs.reference.multi_step_loss(HEADS, predictions, targets, mask=masks)
    out = function(Walking(HEADS), Walking(predictions), Walking(targets), mask=Walking(masks))
    compare(out, expected, predictions)
    for wrong, wanted, words in (
        ({"value": predictions["value"]}, targets, "predictions has nothing for 'reward', 'policy'"),
        ({**predictions, "vlaue": predictions["value"]}, targets, "predictions names 'vlaue', which is not a head"),
        (
            {**predictions, "actor": predictions["value"], "critic": predictions["value"]},
            targets,
            "predictions names 'actor', 'critic', which are not heads; the heads are ",
        ),
        (predictions, {"value": targets["value"]}, "targets has nothing for 'reward'"),
    ):
        with pytest.raises(ValueError, match=words):
            function(HEADS, Walking(wrong), Walking(wanted))
    with pytest.raises(ValueError, match="mask names 'vlaue'"):
        function(HEADS, predictions, targets, mask=Walking({"vlaue": masks["value"]}))


@pytest.mark.parametrize(
    ("entries", "alpha", "error", "words"),
    [
        (torch.ones(2, 2), 10**400, ValueError, "alpha must be a number in the range of a float"),
        (torch.ones(2, 2), torch.ones(2), TypeError, "alpha must be a number, but it is of type Tensor"),
        (torch.ones(2, 2), "1", TypeError, "alpha must be a number, but it is of type str"),
        (torch.ones(2, 2) * 1j, 1.0, TypeError, r"expected must be real, .*complex64; write \.real"),
        (torch.ones(2, 2).to_sparse(), 1.0, TypeError, r"expected must be dense, .*write \.to_dense"),
    ],
)
def test_wrong_arguments_of_priorities(entries, alpha, error, words):
    with pytest.raises(error, match=f"^priorities: {words}"):
        gs.priorities(entries, entries, alpha=alpha)


def test_priorities():
    expected = torch.tensor([[1.0, 5.0], [0.0, -2.0]])
    targets = torch.tensor([[3.0, 5.0], [0.5, 2.0]])
    torch.testing.assert_close(gs.priorities(expected, targets, eps=0.0), torch.tensor([2.0, 0.5]))
    torch.testing.assert_close(gs.priorities(expected, targets, steps="all", eps=0.0), (expected - targets).abs())
    all_steps = gs.priorities(expected.T, targets.T, steps="all", batch_first=False)
    assert torch.equal(all_steps, gs.priorities(expected, targets, steps="all").T)
    with pytest.raises(ValueError, match=r"\[T, B\], T at least 1"):
        gs.priorities(torch.ones(0, 3), torch.ones(0, 3), batch_first=False)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        gs.priorities(expected, targets[:, :1])
    with pytest.raises(ValueError, match="'last'"):
        gs.priorities(expected, targets, steps="last")
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="alpha"):
            gs.priorities(expected, targets, alpha=wrong)
    with pytest.raises(ValueError, match="T at least 1"):
        gs.priorities(expected[:, :0], targets[:, :0])
    with pytest.raises(ValueError, match="all alike"):
        gs.priorities([torch.ones(2), torch.ones(3)], targets)
    with pytest.raises(TypeError, match="of type dict"):
        gs.priorities({}, targets)
    with pytest.raises(TypeError, match=r"convert expected: torch\.as_tensor\(expected\)"):
        gs.priorities(expected.numpy(), targets)
    for wrong in (0, "no", None):
        with pytest.raises(TypeError, match="priorities: batch_first must be True or False, but it is of type"):
            gs.priorities(expected, targets, batch_first=wrong)
    large = torch.full((1, 1), 6e4, dtype=torch.float16)
    assert gs.priorities(large, -large) == pytest.approx(2 * large.item())


def test_a_second_backward_pass_raises():
    """The graph is not retained. fuzz/test_loss.py tests retained graphs."""
    predictions, targets = arguments()
    out = gs.multi_step_loss(HEADS, predictions, targets)
    gradients(out, predictions)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(out, predictions)


def test_infinite_grad_output_leaves_masked_entries_alone():
    predictions, targets = arguments(heads=ALL_HEADS)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    out = gs.multi_step_loss(ALL_HEADS, predictions, targets, mask=mask, reduction="none")
    for g in torch.autograd.grad(out.loss, leaves(predictions), torch.tensor([1.0, float("inf"), 1.0]).double()):
        assert (g[1] == 0).all()


def test_changed_heads_take_effect():
    module = gs.MultiStepLoss(**HEADS)
    predictions, targets = arguments()
    module(predictions, targets)
    module.heads["policy"] = gs.SoftCrossEntropy(weight=9.0)
    expected = gs.reference.multi_step_loss(module.heads, predictions, targets).loss
    torch.testing.assert_close(module(predictions, targets).loss, expected)


def test_weights_that_change_their_list_while_they_are_read():
    class Evil:
        def __init__(self, victim):
            self.victim = victim

        def __float__(self):
            self.victim.clear()
            return 1.0

    weights = []
    weights.extend([Evil(weights), 2.0, 3.0])
    predictions, targets = {"m": torch.ones(2, 3)}, {"m": torch.zeros(2, 3)}
    out = gs.multi_step_loss({"m": gs.MeanSquaredError()}, predictions, targets, step_weights=weights)
    assert out.loss.item() == 6.0


# ---- Choosing the path ----------------------------------------------------------------------------------------------


def test_the_fused_path_on_demand(fused_only):
    predictions, targets = arguments()
    for call in (gs.MultiStepLoss(**HEADS), functools.partial(gs.multi_step_loss, HEADS)):
        expected = fused_only(HEADS, predictions, targets)
        compare(call(predictions, targets, impl="fused"), expected, predictions)


def test_the_reference_on_demand(monkeypatch):
    predictions, targets = arguments()
    asked = []
    original = gs.reference.loss_of
    monkeypatch.setattr(gs.reference, "loss_of", lambda call: asked.append(call) or original(call))
    for call in (gs.MultiStepLoss(**HEADS), functools.partial(gs.multi_step_loss, HEADS)):
        expected = gs.multi_step_loss(HEADS, predictions, targets)
        compare(call(predictions, targets, impl="reference"), expected, predictions)
    assert len(asked) == 2


def test_the_fused_path_raises_if_unsupported():
    heads = {"own": gs.PerStepLoss()}
    x = torch.ones(3, 2)

    def fused(x, impl="fused"):
        return gs.multi_step_loss(heads, {"own": x}, {}, impl=impl).loss

    with pytest.raises(NotImplementedError, match="impl='auto' computes this call by the reference"):
        torch.func.grad(fused)(x)
    with pytest.raises(NotImplementedError, match="impl='fused' accepts plain tensors on cpu"):
        fused(x.to("meta"))
    with pytest.raises(
        ValueError, match="impl must be 'auto' or 'fused' or 'compiled' or 'reference', but it is 'fast'"
    ):
        fused(x, impl="fast")
    with pytest.raises(TypeError, match="must be float64, float32"):
        fused(x.long())


# ---- Every kind of head ---------------------------------------------------------------------------------------------


def test_every_kind_of_head_is_known_everywhere():
    """A head has a name, a public dataclass, a formula in the reference, and a kind in the kernels."""
    public = [getattr(gs, name) for name in gs.__all__]
    heads = {cls.kind: cls for cls in public if isinstance(cls, type) and issubclass(cls, gs.Head) and cls.kind}
    header = (Path(__file__).parent.parent / "csrc/loss/kernels.h").read_text()
    in_kernels = dict(re.findall(r"^  kind\((\w+), (\w+)", header, re.MULTILINE))
    assert set(heads) == set(in_kernels) == set(gs.reference.formulas.LOSSES)
    assert {kind: str(heads[kind].detail).lower() for kind in in_kernels} == in_kernels
    tested = {type(head) for head in ALL_HEADS.values()} | {type(head) for head, _ in CASES.values()}
    assert tested == set(heads.values())  # the tests above and test_policy_kernels.py


@pytest.mark.parametrize(
    "file",
    [
        "gradscale_ext/loss/multi_step.py",
        "gradscale_ext/cli/check.py",
        "tests/test_cuda.py",
        "tests/fuzz/formulas.py",
        "tests/fuzz/test_loss.py",
        "README.md",
    ],
)
def test_a_file_that_lists_the_heads_lists_all_of_them(file):
    words = set(re.findall(r"\w+", (Path(__file__).parent.parent / file).read_text()))
    assert {type(head).__name__ for head in ALL_HEADS.values()} <= words


@pytest.mark.parametrize(
    ("names", "numbers", "message"),
    [
        ([], [], "names and as many numbers"),
        (["per_step_loss"], [], "names and as many numbers"),
        (["weight"], [1.0], "'weight' is not a kind of head"),
        (["per_step_loss", "wieght"], [0.0, 1.0], "no number 'wieght'"),
        (["two_hot"], [0.0], "not the numbers of a 'two_hot'"),
        (["two_hot", "detail", "num_bins"], [0.0, 1.0, 1.0], "not the numbers of a 'two_hot'"),
        (["two_hot", "detail", "num_bins"], [0.0, 0.0, 5.0], "not the numbers of a 'two_hot'"),
        (["per_step_loss", "detail", "num_bins"], [0.0, 1.0, 5.0], "not the numbers of a 'per_step_loss'"),
        (["per_step_loss", "first_step"], [0.0, -1.0], "not the numbers of a 'per_step_loss'"),
        (["per_step_loss", "first_step"], [0.0, 2.0**31], "not the numbers of a 'per_step_loss'"),
        (["per_step_loss", "first_step"], [0.0, float("nan")], "not the numbers of a 'per_step_loss'"),
        (["mean_squared_error", "transform"], [0.0, 3.0], "not the numbers of a 'mean_squared_error'"),
    ],
)
def test_invalid_records(names, numbers, message):
    with pytest.raises(RuntimeError, match=message):
        gs._native._C.Plan({}, names, numbers)


@pytest.mark.parametrize("name", ["kind", "forms", "detail", "decodes", "numbers"])
def test_a_subclass_must_not_change_how_its_base_is_read(name):
    with pytest.raises(TypeError, match=f"Mine: a subclass of TwoHot must not have its own '{name}'"):
        type("Mine", (gs.TwoHot,), {name: False})
    mine = type("Mine", (gs.TwoHot,), {"label": "a name of the user's"})(SUPPORT, weight=0.5)
    predictions, targets = arguments(heads={"value": gs.TwoHot(SUPPORT)})
    loss = gs.multi_step_loss({"value": mine}, predictions, targets).loss
    torch.testing.assert_close(loss, 0.5 * gs.multi_step_loss({"value": gs.TwoHot(SUPPORT)}, predictions, targets).loss)


def _operator(predictions, targets, prediction_counts, target_counts, heads, wants=(), **given_options):
    record = gs.heads.record_of(heads)
    options = gs.call.options.Options(*[[]] * len(gs.call.options.BY_HEAD))._replace(**given_options)
    given = (predictions, targets, prediction_counts, target_counts, *record, list(wants), *options)
    return torch.ops.gradscale_ext.multi_step_loss(*given)


X = torch.rand(4)
OPTIONS_BY_HEAD = {
    "step_weights": torch.ones(1),
    "step_gradient_scale": torch.ones(1),
    "importance_weights": torch.ones(4),
    "mask": torch.ones(4, 1, dtype=torch.bool),
    "head_weights": torch.tensor(2.0),
}
MALFORMED = {
    "no prediction": lambda: _operator([X], [], [-1], [-1], [gs.PerStepLoss()]),
    "a count above the number of predictions": lambda: _operator([X], [], [2], [-1], [gs.PerStepLoss()]),
    "a count below the number of predictions": lambda: _operator([X, X], [], [1], [-1], [gs.PerStepLoss()]),
    "fewer counts than heads": lambda: _operator([X], [], [1], [-1], [gs.PerStepLoss(), gs.PerStepLoss()]),
    "a wanted gradient of no prediction": lambda: _operator([X], [], [1], [-1], [gs.PerStepLoss()], wants=[1]),
    "a negative index of a wanted gradient": lambda: _operator([X], [], [1], [-1], [gs.PerStepLoss()], wants=[-1]),
    "a missing target": lambda: _operator([X], [], [1], [-1], [gs.BinaryCrossEntropy()]),
    "a target too many": lambda: _operator([X], [X], [1], [1], [gs.PerStepLoss()]),
    "a narrow prediction": lambda: _operator([torch.rand(4, 3)], [X], [1], [1], [gs.TwoHot(SUPPORT)]),
    "a narrow target": lambda: _operator([torch.rand(4, 9)], [X], [1], [1], [gs.NegativeCosine()]),
    "classes as targets of numbers": lambda: _operator([X], [X.long()], [1], [1], [gs.MeanSquaredError()]),
    "batches of two sizes": lambda: _operator([X, X[:2]], [], [2], [-1], [gs.PerStepLoss()]),
    **{
        f"{count} of three {name}": lambda name=name, value=value, count=count: _operator(
            [X] * 3, [], [1] * 3, [-1] * 3, [gs.PerStepLoss()] * 3, **{name: [value] * count}
        )
        for name, value in OPTIONS_BY_HEAD.items()
        for count in (1, 2, 4)
        if count != 1 or name == "head_weights"  # the others may be one for all heads
    },
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", MALFORMED)
def test_the_operator_rejects_invalid_arguments(name, requires_grad):
    X.requires_grad_(requires_grad)
    with pytest.raises((RuntimeError, ValueError), match="multi_step_loss"):
        MALFORMED[name]()
    X.requires_grad_(False)


@pytest.mark.parametrize(
    "name",
    [
        "no prediction",
        "a count above the number of predictions",
        "a count below the number of predictions",
        "fewer counts than heads",
        "a wanted gradient of no prediction",
        "2 of three head_weights",
    ],
)
def test_a_tracer_rejects_lists_that_do_not_fit(name, monkeypatch):
    monkeypatch.setitem(globals(), "X", X.to("meta"))
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        MALFORMED[name]()


def test_the_graph_of_an_exported_program_does_not_keep_targets():
    heads = {"value": gs.TwoHot(SUPPORT)}
    predictions, targets = arguments(heads=heads)
    loss_fn = gs.MultiStepLoss(**heads)

    class Loss(torch.nn.Module):
        def forward(self, predictions, targets):
            return loss_fn(predictions, targets).loss

    exported = torch.export.export(Loss(), (predictions, targets)).module()
    loss = exported(predictions, targets)
    target = StorageWeakRef(targets["value"][0].untyped_storage())
    del targets
    gc.collect()
    assert target.expired()
    loss.backward()


def test_the_reference_names_options_that_it_does_not_have():
    with pytest.raises(TypeError, match="no option 'bogus'; the options are step_weights, step_gradient_scale"):
        gs.reference.multi_step_loss(HEADS, *arguments(), bogus=1)


@pytest.mark.parametrize("width", [5, 40, 601])
@pytest.mark.parametrize("rows", [1, 20])
def test_an_illegal_action_with_an_entropy_bonus_has_no_gradient(width, rows):
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    logits[:, 1] = -math.inf
    logits.requires_grad_()
    targets = torch.zeros(rows, width)
    targets[:, 0] = 1
    heads = {"policy": gs.SoftCrossEntropy(entropy_weight=0.1)}
    out = gs.multi_step_loss(heads, {"policy": [logits]}, {"policy": [targets]})
    out.loss.backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[:, 1] == 0).all()
    assert out.head_gradient_norms["policy"].isfinite()


@pytest.mark.parametrize("classes", [32_000, 128_256])
def test_label_smoothing_over_many_classes(classes):
    """The mass of a smoothed class is 1; a sum of all masses in float32 would be off by 1e-5."""
    generator = torch.Generator().manual_seed(3)
    logits, target = torch.randn(4, classes, generator=generator), torch.randint(classes, (4,), generator=generator)
    head = {"policy": gs.SoftCrossEntropy(label_smoothing=0.1)}
    losses = gs.multi_step_loss(head, {"policy": [logits]}, {"policy": [target]}).per_step["policy"]
    expected = torch.nn.functional.cross_entropy(logits.double(), target, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(losses[:, 0].double(), expected, rtol=0, atol=1e-6)
