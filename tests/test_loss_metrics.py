"""`head_gradient_norms` and `max_abs_logit` at extremes and in transforms; fuzz/test_loss.py checks the formulas."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from test_loss import ALL_HEADS, arguments
from torch.autograd import forward_ad

import gradscale_ext as gs


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_some_predictions_without_gradient(impl):
    heads = {"distance": ALL_HEADS["distance"]}
    predictions, targets = arguments(heads=heads)
    predictions["distance"][1:] = [entry.detach() for entry in predictions["distance"][1:]]
    out = gs.multi_step_loss(heads, predictions, targets, impl=impl)
    (gradient,) = torch.autograd.grad(out.loss, predictions["distance"][0])
    torch.testing.assert_close(out.head_gradient_norms["distance"], gradient.norm(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("weight", [1e-25, 1e25])
def test_norms_of_gradients_whose_squares_overflow_or_underflow_float32(weight, impl):
    shapes = {
        gs.MeanSquaredError(): (20, 30),
        gs.Huber(): (20,),
        gs.NegativeCosine(): (20, 30),
        gs.SoftCrossEntropy(): (20, 30),
        gs.SoftCrossEntropy(entropy_weight=0.1): (20, 6),
        gs.CategoricalKL(): (20, 3, 6),
        gs.QuantileHuber(): (20, 5),
    }
    generator = torch.Generator().manual_seed(0)
    heads = {str(head): head for head in shapes}
    predictions, targets = ({str(h): [torch.rand(s, generator=generator)] for h, s in shapes.items()} for _ in range(2))
    leaves = [entry.requires_grad_() for (entry,) in predictions.values()]
    weights = torch.full((20,), weight)
    out = gs.multi_step_loss(heads, predictions, targets, importance_weights=weights, impl=impl)
    for name, gradient in zip(heads, torch.autograd.grad(out.loss, leaves), strict=True):
        torch.testing.assert_close(out.head_gradient_norms[name], gradient.double().norm().float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("distance", [1e20, 1e25, 1e-25])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_norms_of_large_and_small_distances(distance, weight, impl):
    x = torch.full((3, 4), distance, requires_grad=True)
    heads, head_weights = {"a": gs.MeanSquaredError()}, {"a": weight}
    out = gs.multi_step_loss(heads, {"a": [x]}, {"a": [torch.zeros(3, 4)]}, head_weights=head_weights, impl=impl)
    expected = torch.tensor(weight * distance / 12**0.5 * 2)
    torch.testing.assert_close(out.head_gradient_norms["a"], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("width", [7, 18, 40])
@pytest.mark.parametrize("illegal", [math.nan, -math.nan, math.inf, -math.inf])
def test_largest_logit_next_to_logits_that_are_not_finite(illegal, width, impl):
    """On x86, inf - inf is a NaN with a sign bit. As an unsigned integer, it exceeds every other float."""
    logits = torch.zeros(8, width)
    logits[3, :3] = torch.tensor([1.0, -5.0, illegal])
    targets = torch.full((8, width), 1 / width)
    out = gs.multi_step_loss({"a": gs.SoftCrossEntropy()}, {"a": [logits]}, {"a": [targets]}, impl=impl)
    assert out.max_abs_logit["a"] == 5


@pytest.mark.compiled
@pytest.mark.parametrize(("impl", "only_metrics"), [("auto", False), ("auto", True), ("reference", False)])
def test_compiled_graphs(impl, only_metrics):
    """The loss compiles into one graph, even if the graph returns nothing that has a gradient."""
    heads = {name: ALL_HEADS[name] for name in ("value", "policy", "distance", "prior")}
    predictions, targets = arguments(heads=heads)
    predictions["policy"] = [entry.detach() for entry in predictions["policy"]]
    eager = gs.multi_step_loss(heads, predictions, targets)

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def compiled(predictions, targets):
        out = gs.multi_step_loss(heads, predictions, targets, impl=impl)
        return (out.head_gradient_norms, out.max_abs_logit) if only_metrics else out

    out = compiled(predictions, targets)
    norms, largest = out if only_metrics else (out.head_gradient_norms, out.max_abs_logit)
    assert norms.keys() == eager.head_gradient_norms.keys() == {"value", "distance", "prior"}
    for ours, theirs in ((norms, eager.head_gradient_norms), (largest, eager.max_abs_logit)):
        for name, expected in theirs.items():
            torch.testing.assert_close(ours[name], expected, rtol=1e-12, atol=0)
    if not only_metrics:
        out.loss.backward()


@pytest.mark.compiled
def test_exported_programs():
    heads = {name: ALL_HEADS[name] for name in ("value", "policy")}
    predictions, targets = arguments(heads=heads)

    class Model(torch.nn.Module):
        def forward(self, predictions, targets):
            out = gs.multi_step_loss(heads, predictions, targets)
            return out.loss, out.head_gradient_norms, out.max_abs_logit

    exported = torch.export.export(Model(), (predictions, targets)).module()
    eager = gs.multi_step_loss(heads, predictions, targets)
    _, norms, largest = exported(predictions, targets)
    assert norms == eager.head_gradient_norms
    assert largest == eager.max_abs_logit


@pytest.mark.compiled
def test_transforms():
    """The norms are right inside `torch.func.grad`, under `torch.vmap` and in forward mode."""
    heads = {name: ALL_HEADS[name] for name in ALL_HEADS if name not in ("classes", "smooth_classes")}
    predictions, targets = arguments(heads=heads)
    truth = gs.multi_step_loss(heads, predictions, targets).head_gradient_norms
    plain = {name: [entry.detach() for entry in entries] for name, entries in predictions.items()}

    def loss(predictions):
        out = gs.multi_step_loss(heads, predictions, targets)
        return out.loss, out.head_gradient_norms

    _, norms = torch.func.grad(loss, has_aux=True)(plain)
    for name, expected in truth.items():
        torch.testing.assert_close(norms[name], expected, rtol=1e-12, atol=1e-12)
    twice = {name: [torch.stack([entry, entry]) for entry in entries] for name, entries in plain.items()}
    _, norms = torch.vmap(torch.func.grad(loss, has_aux=True))(twice)
    for name, expected in truth.items():
        torch.testing.assert_close(norms[name], expected.expand(2), rtol=1e-12, atol=1e-12)
    assert not loss(plain)[1]
    # The norms ignore tangents, because some backward formulas of PyTorch have no forward-mode derivative.
    with forward_ad.dual_level():
        dual = {name: [forward_ad.make_dual(e, e.detach()) for e in entries] for name, entries in predictions.items()}
        out = gs.multi_step_loss(heads, dual, targets)
        assert forward_ad.unpack_dual(out.loss).tangent is not None
        for name, expected in truth.items():
            torch.testing.assert_close(out.head_gradient_norms[name], expected, rtol=1e-12, atol=1e-12)
