"""`head_gradient_norms` and `max_abs_logit`: of every head, with all weights, on every path."""

from __future__ import annotations

import functools

import pytest
import torch
from test_loss import ALL_HEADS, arguments, leaves
from torch.autograd import forward_ad

import gradscale_ext as gs

MASK = torch.tensor([[True, False, True, True], [False] * 4, [True, True, True, False]])
WEIGHTS = {
    "step_weights": [1.0, 0.5, 0.0, 2.0],
    "step_gradient_scale": "unroll",
    "importance_weights": torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64),
    "head_weights": {"value": 3.0, "policy": torch.tensor(0.25, dtype=torch.float64)},
}
OPTIONS = {
    "plain": {},
    "weights": WEIGHTS,
    "mask": {"mask": MASK, "reduction": "valid_mean", **WEIGHTS},
    "none": {"reduction": "none", "mask": MASK},
    "sum": {"reduction": "sum", "nonfinite": "skip"},
}


def truth_of(heads, predictions, targets, options):
    """Norms of the gradients that autograd computes, and the largest magnitudes of unmasked logits."""
    exact = {name: [e.detach().double().requires_grad_() for e in entries] for name, entries in predictions.items()}
    loss = gs.reference.multi_step_loss(heads, exact, targets, **options).loss.sum()
    gradients = iter(torch.autograd.grad(loss, leaves(exact)))
    norms = {name: torch.cat([next(gradients).flatten() for _ in exact[name]]).norm() for name in heads}
    largest = {}
    for name, head in heads.items():
        if isinstance(head, gs.TwoHot | gs.HLGauss | gs.SoftCrossEntropy | gs.CategoricalKL):
            stacked = torch.stack([entry.detach() for entry in exact[name]], 1)
            unmasked = options["mask"][:, head.first_step :] if "mask" in options else torch.ones(stacked.shape[:2])
            logits = stacked[unmasked.bool()]
            largest[name] = max([0.0, *logits[logits.isfinite()].abs().tolist()])
    return norms, largest


def check(out, norms, largest, rtol=1e-12, atol=1e-12):
    assert out.head_gradient_norms.keys() == norms.keys()
    assert out.max_abs_logit.keys() == largest.keys()
    for name, norm in norms.items():
        ours = out.head_gradient_norms[name]
        assert ours.shape == ()
        assert ours.dtype == out.loss.dtype
        assert not ours.requires_grad
        torch.testing.assert_close(ours.double(), norm, rtol=rtol, atol=atol, equal_nan=True, msg=name)
    assert {name: value.item() for name, value in out.max_abs_logit.items()} == largest


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_head(options, dtype, impl):
    predictions, targets = arguments(dtype=dtype, heads=ALL_HEADS)
    with torch.no_grad():
        predictions["policy"][1][0, 1] = -torch.inf
        targets["policy"][1][0, 1] = 0
    out = gs.multi_step_loss(ALL_HEADS, predictions, targets, impl=impl, **OPTIONS[options])
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    check(out, *truth_of(ALL_HEADS, predictions, targets, OPTIONS[options]), tolerance, tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 31, 33, 601])
def test_widths(width, dtype):
    """Enough rows for lanes that each have one, and rows that are longer; most of each softmax is in one bin."""
    support = gs.Support(-20, 20, width)
    heads = {
        "two_hot": gs.TwoHot(support),
        "smooth": gs.TwoHot(support, label_smoothing=0.1),
        "gauss": gs.HLGauss(support),
        "policy": gs.SoftCrossEntropy(entropy_weight=0.1),
    }
    generator = torch.Generator().manual_seed(width)
    targets = {name: [torch.randn(19, generator=generator) * 30] for name in heads}
    targets["policy"] = [torch.randn(19, width, generator=generator).softmax(-1)]
    predictions = {name: [torch.randn(19, width, generator=generator, dtype=torch.float64)] for name in heads}
    for name in ("two_hot", "smooth", "gauss"):  # close to the target: what is left of p - t is small
        predictions[name][0] += 12 * support.two_hot(targets[name][0]).double()
    predictions = {name: [entries[0].to(dtype).requires_grad_()] for name, entries in predictions.items()}
    out = gs.multi_step_loss(heads, predictions, targets)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    check(out, *truth_of(heads, predictions, targets, {}), tolerance, 0)


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_nan_and_infinity(nonfinite, impl):
    heads = {name: ALL_HEADS[name] for name in ("value", "policy", "prior", "distance")}
    predictions, targets = arguments(heads=heads)
    with torch.no_grad():
        predictions["value"][1][1, 2] = torch.nan
        predictions["policy"][0][1, 0] = torch.inf
    options = {"nonfinite": nonfinite}
    out = gs.multi_step_loss(heads, predictions, targets, impl=impl, **options)
    check(out, *truth_of(heads, predictions, targets, options))
    assert out.head_gradient_norms["value"].isfinite() == (nonfinite == "skip")
    masked = gs.multi_step_loss(heads, predictions, targets, impl=impl, mask=torch.zeros(3, 4, dtype=torch.bool))
    assert all(norm == 0 for norm in masked.head_gradient_norms.values())
    assert all(largest == 0 for largest in masked.max_abs_logit.values())


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_empty_batch_and_predictions_without_gradient(impl):
    predictions, targets = arguments(batch=0, heads=ALL_HEADS)
    out = gs.multi_step_loss(ALL_HEADS, predictions, targets, impl=impl)
    assert out.head_gradient_norms.keys() == ALL_HEADS.keys()
    assert not any((*out.head_gradient_norms.values(), *out.max_abs_logit.values()))
    heads = {name: ALL_HEADS[name] for name in ("value", "policy", "distance")}
    predictions, targets = arguments(heads=heads)
    predictions["policy"] = [entry.detach() for entry in predictions["policy"]]
    predictions["distance"][1:] = [entry.detach() for entry in predictions["distance"][1:]]
    out = gs.multi_step_loss(heads, predictions, targets, impl=impl)
    assert out.head_gradient_norms.keys() == {"value", "distance"}
    assert out.max_abs_logit.keys() == {"value", "policy"}
    (gradient,) = torch.autograd.grad(out.loss, predictions["distance"][0])
    torch.testing.assert_close(out.head_gradient_norms["distance"], gradient.norm(), rtol=1e-12, atol=0)
    with torch.no_grad():
        assert not gs.multi_step_loss(heads, predictions, targets, impl=impl).head_gradient_norms


def test_strides_and_stacked_predictions():
    heads = {name: ALL_HEADS[name] for name in ("value", "policy", "features")}
    predictions, targets = arguments(heads=heads)
    truth = truth_of(heads, predictions, targets, {})
    for dim in (0, 1):
        stacked = {name: torch.stack(entries, dim) for name, entries in predictions.items()}
        given = {name: torch.stack(entries, dim) for name, entries in targets.items()}
        check(gs.multi_step_loss(heads, stacked, given, batch_first=dim == 1), *truth)
        turned = {name: entry.transpose(0, 1) for name, entry in stacked.items()}
        given = {name: entry.transpose(0, 1) for name, entry in given.items()}
        check(gs.multi_step_loss(heads, turned, given, batch_first=dim == 0), *truth)


def test_the_number_of_threads_changes_nothing():
    heads = {"value": gs.TwoHot(gs.Support.muzero()), "policy": gs.SoftCrossEntropy()}
    predictions = {
        name: torch.randn(64, 6, width, requires_grad=True) for name, width in zip(heads, (601, 18), strict=True)
    }
    targets = {"value": torch.randn(64, 6), "policy": torch.rand(64, 6, 18).softmax(-1)}
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            out = gs.multi_step_loss(heads, predictions, targets)
            found.append([norm.item() for norm in out.head_gradient_norms.values()])
    finally:
        torch.set_num_threads(threads)
    assert all(norms == found[0] for norms in found)


@pytest.mark.untraced
@pytest.mark.parametrize("only_metrics", [False, True])
@pytest.mark.parametrize("impl", ["auto", "reference"])
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
