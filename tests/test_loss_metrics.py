"""`head_gradient_norms` and `max_abs_logit` in contexts; fuzz/test_loss.py checks them against formulas."""

from __future__ import annotations

import functools

import pytest
import torch
from test_loss import ALL_HEADS, arguments
from torch.autograd import forward_ad

import gradscale_ext as gs


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_predictions_some_of_which_have_no_gradient(impl):
    heads = {"distance": ALL_HEADS["distance"]}
    predictions, targets = arguments(heads=heads)
    predictions["distance"][1:] = [entry.detach() for entry in predictions["distance"][1:]]
    out = gs.multi_step_loss(heads, predictions, targets, impl=impl)
    (gradient,) = torch.autograd.grad(out.loss, predictions["distance"][0])
    torch.testing.assert_close(out.head_gradient_norms["distance"], gradient.norm(), rtol=1e-12, atol=0)


@pytest.mark.untraced
@pytest.mark.parametrize(("impl", "only_metrics"), [("auto", False), ("auto", True), ("reference", False)])
def test_compiled_graphs(impl, only_metrics):
    """In one graph, also if the graph returns nothing that has a gradient."""
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


@pytest.mark.untraced
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


@pytest.mark.untraced
def test_transforms():
    """Inside `torch.func.grad`, under `torch.vmap` and in forward mode."""
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
    with forward_ad.dual_level():  # not every gradient of PyTorch's has a forward mode
        dual = {name: [forward_ad.make_dual(e, e.detach()) for e in entries] for name, entries in predictions.items()}
        out = gs.multi_step_loss(heads, dual, targets)
        assert forward_ad.unpack_dual(out.loss).tangent is not None
        for name, expected in truth.items():
            torch.testing.assert_close(out.head_gradient_norms[name], expected, rtol=1e-12, atol=1e-12)
