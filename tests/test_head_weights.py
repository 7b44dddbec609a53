"""Learned weights of heads, `head_weights`, and weights that differ by head, on every path."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from decimal import Decimal

import numpy as np
import pytest
import torch
from test_loss import ALL_HEADS, HEADS, SUPPORT, arguments, leaves
from torch._dynamo.testing import CompileCounterWithBackend

import gradscale_ext as gs
from gradscale_ext.loss import compiled

#: Values of learned weights, one of them 0. test_the_formula adds a number and a constant tensor for other heads.
LEARNED = {"value": 0.75, "policy": 0.0, "reward": 2.0}
#: Heads to compile, with the weights and first steps of HEADS. test_loss_compiled and test_loss_contexts compile other
#: kinds of heads.
LOSSES = {name: gs.PerStepLoss(weight=HEADS[name].weight, first_step=HEADS[name].first_step) for name in LEARNED}
MASK = torch.tensor([[0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
SEEDED = torch.Generator().manual_seed(2)
OPTIONS = {
    "plain": {},
    "gradient scale": {"step_gradient_scale": "unroll"},
    "mask": {"mask": {"policy": MASK}},
    "common weights": {
        "importance_weights": torch.tensor([0.3, 2.0, 1.0]),
        "step_weights": torch.rand(3, 4, generator=SEEDED),
    },
    "weights by head": {
        "importance_weights": {"value": torch.tensor([0.3, 2.0, 1.0]), "policy": torch.tensor([1.0, 0.0, 3.0])},
        "step_weights": {"value": [1.0, 0.5, 0.25, 0.125], "reward": torch.rand(3, 4, generator=SEEDED)},
        "step_gradient_scale": {"policy": "unroll", "value": [0.0] * 4},
        "mask": {"policy": MASK},
    },
}


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    """Counts compiled graphs. Replaces Inductor, which would compile C++ for a minute."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    compiled._compiled.cache_clear()
    yield counter
    compiled._compiled.cache_clear()
    torch._dynamo.reset()


def run(impl, heads, predictions, targets, **options):
    """The output of an implementation; "operator" is the registered operator in a compiled graph."""
    if impl != "operator":
        return gs.multi_step_loss(heads, predictions, targets, impl=impl, **options)

    def fields(predictions, targets, options):
        out = gs.multi_step_loss(heads, predictions, targets, impl="fused", **options)
        return {field.name: getattr(out, field.name) for field in dataclasses.fields(out)}

    return types.SimpleNamespace(**torch.compile(fields, fullgraph=True)(predictions, targets, options))


def parameters():
    return {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in LEARNED.items()}


def formula(heads, per_step, weights, options, reduction, skipped=()):
    """Expected values, computed from each step's loss. Each is a tensor `[B]` with one number per sample.

    They are `per_sample` (without importance weights), and the samples' terms of the loss, of each head's contribution
    to the loss, and of the derivatives of these contributions with respect to `weights`.
    """
    batch = next(iter(per_step.values())).shape[0]
    kept = torch.tensor([b not in skipped for b in range(batch)])
    per_sample, shares = torch.zeros(batch, dtype=torch.float64), {}

    def for_head(option, name):
        given = options.get(option)
        return given.get(name) if isinstance(given, dict) else given

    for name, losses in per_step.items():
        first = heads[name].first_step
        steps = for_head("step_weights", name)
        steps = torch.ones(4) if steps is None else torch.as_tensor(steps)
        mask = for_head("mask", name)
        mask = torch.ones(batch, 4, dtype=torch.bool) if mask is None else mask
        total = heads[name].weight * torch.where(mask, steps, 0.0)[:, first:].mul(losses).sum(1)
        per_sample = per_sample + float(torch.as_tensor(weights.get(name, 1.0)).detach()) * total
        importance = for_head("importance_weights", name)
        total = total if importance is None else importance * total
        divisor = {"mean": batch, "valid_mean": max(int(mask[:, first:].sum()), 1)}.get(reduction, 1)
        shares[name] = torch.where(kept, total, 0.0) / divisor
    weighted = {name: float(torch.as_tensor(weights.get(name, 1.0)).detach()) * share for name, share in shares.items()}
    return per_sample, sum(weighted.values()), weighted, shares


REDUCTIONS = ("mean", "none", "valid_mean")
CASES = [
    (impl, reduction, options) for impl in ("fused", "reference") for reduction in REDUCTIONS for options in OPTIONS
]
# Each of these compiles a graph.
CASES += [
    pytest.param(*case, marks=pytest.mark.compiled)
    for case in (
        ("compiled", "valid_mean", "weights by head"),
        ("operator", "valid_mean", "weights by head"),
        ("operator", "none", "common weights"),
        ("operator", "mean", "plain"),
    )
]


@pytest.mark.parametrize(("impl", "reduction", "options"), CASES)
def test_the_formula(impl, reduction, options):
    heads = HEADS if impl in ("fused", "reference") else LOSSES
    predictions, targets = arguments(heads=heads)
    weights = parameters()
    given = {**OPTIONS[options], "reduction": reduction}
    constants = {"features": 3.0, "distance": torch.tensor(0.5)}
    head_weights = {**weights, **{name: constants[name] for name in constants if name in heads}}
    out = run(impl, heads, predictions, targets, head_weights=head_weights, **given)
    per_step = gs.reference.multi_step_loss(heads, predictions, targets, mask=given.get("mask")).per_step
    per_sample, loss, losses, shares = formula(heads, per_step, head_weights, given, reduction)
    close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-9)
    close(out.per_sample, per_sample)
    close(out.loss, loss if reduction == "none" else loss.sum())
    assert not out.per_sample.requires_grad
    for name in heads:
        close(out.head_losses[name], losses[name].sum())
    grad_output = torch.tensor([1.0, -2.0, 0.5] if reduction == "none" else -2.0, dtype=torch.float64)
    found = torch.autograd.grad(out.loss, [*weights.values(), *leaves(predictions)], grad_output)
    for name, gradient in zip(weights, found, strict=False):
        close(gradient, (grad_output * shares[name]).sum(), msg=lambda text, name=name: f"{name}: {text}")
    # A head weight multiplies the head's own weight.
    scaled = {
        name: dataclasses.replace(
            head, weight=head.weight * float(torch.as_tensor(head_weights.get(name, 1.0)).detach())
        )
        for name, head in heads.items()
    }
    plain = gs.reference.multi_step_loss(scaled, predictions, targets, **given)
    expected = torch.autograd.grad(plain.loss, leaves(predictions), grad_output)
    close(list(found[len(weights) :]), list(expected))


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_of_weights(dtype, impl):
    heads = {"own": gs.PerStepLoss(weight=0.5), "other": gs.PerStepLoss()}
    losses = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weight = torch.tensor(0.5, dtype=dtype, requires_grad=True)
    out = gs.multi_step_loss(
        heads, {"own": losses, "other": losses}, {}, head_weights={"own": weight}, reduction="sum", impl=impl
    )
    assert out.loss.item() == 12.5
    out.loss.backward()
    assert weight.grad.dtype == dtype
    assert weight.grad.item() == 5.0


@pytest.mark.parametrize(
    ("impl", "reduction"),
    [
        *[("fused", "sum"), ("fused", "none"), ("reference", "sum")],
        *[pytest.param(*case, marks=pytest.mark.compiled) for case in (("compiled", "sum"), ("operator", "none"))],
    ],
)
def test_samples_that_are_skipped_add_nothing_to_the_gradient(impl, reduction):
    heads = {"a": gs.PerStepLoss(weight=2.0), "b": gs.PerStepLoss(first_step=1)}
    a = torch.tensor([[1.0, 2.0], [float("inf"), 4.0], [5.0, 6.0]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([[1.0], [2.0], [float("nan")]], dtype=torch.float64)
    weights = {name: torch.tensor(1.0, dtype=torch.float64, requires_grad=True) for name in heads}
    given = dict(head_weights=weights, reduction=reduction)
    out = run(impl, heads, {"a": a, "b": b}, {}, nonfinite="skip", **given)
    assert out.num_nonfinite.item() == 2
    found = torch.autograd.grad(out.loss.sum(), [*weights.values(), a])
    assert [gradient.item() for gradient in found[:2]] == [6.0, 1.0]
    assert found[2].tolist() == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    if impl in ("fused", "reference"):
        out = run(impl, heads, {"a": a, "b": b}, {}, **given)
        found = torch.autograd.grad(out.loss.sum(), list(weights.values()))
        assert found[0].item() == float("inf")
        assert found[1].isnan()


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_weights_add_nothing_to_skipped_or_masked_samples(bad, impl):
    heads = {"a": gs.PerStepLoss(), "b": gs.PerStepLoss()}
    x, y = torch.ones(3, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    mask = {"a": torch.tensor([[True, False], [False, False], [False, False]])}
    weight = torch.tensor(bad, requires_grad=True)
    given = dict(head_weights={"a": weight}, nonfinite="skip", reduction="sum", impl=impl)
    out = gs.multi_step_loss(heads, {"a": x, "b": y}, {}, mask=mask, **given)
    assert out.num_nonfinite.item() == 1
    assert out.loss.item() == 4
    assert {name: loss.item() for name, loss in out.head_losses.items()} == {"a": 0, "b": 4}
    found = torch.autograd.grad(out.loss, [weight, x, y])
    assert found[0].item() == 0
    assert found[1].tolist() == [[0, 0]] * 3
    assert found[2].tolist() == [[0, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_importance_weight_of_a_masked_sample_is_not_in_the_gradient_of_a_head_weight(reduction, bad, impl):
    weight = torch.tensor(0.5, requires_grad=True)
    given = {"mask": torch.tensor([[True, True], [False, False]]), "importance_weights": torch.tensor([3.0, bad])}
    losses = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    out = gs.multi_step_loss(
        {"a": gs.PerStepLoss()}, {"a": losses}, {}, head_weights={"a": weight}, reduction=reduction, impl=impl, **given
    )
    (found,) = torch.autograd.grad(out.loss.sum(), weight)
    assert found.item() == 9


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_a_head_that_is_masked_everywhere_has_zeros(impl):
    predictions, targets = arguments()
    mask = {name: torch.zeros(3, 4, dtype=torch.bool) for name in HEADS}
    out = gs.multi_step_loss(HEADS, predictions, targets, mask=mask, impl=impl)
    for output in (out.head_means, out.head_losses, out.head_gradient_norms, out.max_abs_logit):
        assert not any(output.values())
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.loss, leaves(predictions)))


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("masked", [False, True])
def test_head_losses_add_up_to_the_loss_if_weights_are_not_finite(bad, masked, impl):
    """A loss of 0 times an infinite weight is NaN, in `loss` and in `head_losses`, unless it is masked."""
    heads = {"a": gs.PerStepLoss(), "b": gs.PerStepLoss()}
    mask = torch.tensor([[True, True], [not masked, not masked]])
    for losses in ([[1.0, 2.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]):
        a, b = torch.tensor(losses), torch.ones(2, 2)
        weight = torch.tensor(bad)
        out = run(impl, heads, {"a": a, "b": b}, {}, mask=mask, head_weights={"a": weight}, reduction="sum")
        expected = weight * 3 if masked and losses[0] == [1.0, 2.0] else torch.tensor(float("nan"))
        torch.testing.assert_close(out.head_losses["a"], expected, equal_nan=True)
        torch.testing.assert_close(out.loss, out.head_losses["a"] + out.head_losses["b"], equal_nan=True)


@pytest.mark.parametrize(("impl", "reduction"), [("fused", "mean"), ("fused", "none"), ("reference", "none")])
def test_gradcheck_and_gradgradcheck(impl, reduction):
    """With a few heads. test_loss checks the second derivatives of all heads."""
    names = ("value", "policy", "consistency", "bonus")
    heads = {name: ALL_HEADS[name] for name in names}
    predictions, targets = arguments(batch=2, steps=2, heads=heads)
    weights = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.0, 0.7, 1.3, 2.0)]
    importance = {"value": torch.tensor([0.5, 2.0]), "policy": torch.tensor([3.0, 1.0])}

    def function(*tensors):
        remaining = iter(tensors)
        learned = {name: next(remaining).square() for name in names}
        rebuilt = {name: [next(remaining) for _ in entries] for name, entries in predictions.items()}
        return gs.multi_step_loss(
            heads,
            rebuilt,
            targets,
            head_weights=learned,
            importance_weights=importance,
            step_weights={"bonus": [1.0, 0.5]},
            mask=torch.tensor([[True, True], [True, False]]),
            reduction=reduction,
            impl=impl,
        ).loss

    inputs = (*weights, *leaves(predictions))
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_one_weight_of_two_heads_and_no_prediction_with_a_gradient(impl):
    heads = {"a": gs.PerStepLoss(), "b": gs.PerStepLoss()}
    a, b = torch.full((2, 3), 2.0), torch.full((2, 3), 5.0)
    weight = torch.tensor(1.0, requires_grad=True)
    out = gs.multi_step_loss(heads, {"a": a, "b": b}, {}, head_weights={"a": weight, "b": weight}, impl=impl)
    (gradient,) = torch.autograd.grad(out.loss, weight, create_graph=True)
    assert gradient.item() == 21.0
    again = gs.multi_step_loss(heads, {"a": a, "b": b}, {}, head_weights={"a": weight.detach(), "b": 2.0}, impl=impl)
    assert not again.loss.requires_grad
    assert again.loss.item() == 36.0


def test_transforms_of_head_weights():
    predictions, targets = arguments(heads=HEADS, requires_grad=False)

    def loss(weight):
        return gs.multi_step_loss(HEADS, predictions, targets, head_weights={"value": weight.exp()}).loss

    x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x), x)
    x = x.detach()
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(torch.stack([x, x]))[1], expected)
    torch.testing.assert_close(torch.func.jacfwd(loss)(x), expected)
    torch.testing.assert_close(torch.func.hessian(loss)(x), expected)  # exp is its own derivative


@pytest.mark.compiled
@pytest.mark.parametrize("impl", ["fused", "compiled"])
def test_numbers_that_change_do_not_compile_again(impl, fresh_compiler):
    """The first change makes the number a variable of the graph."""
    heads = {name: LOSSES[name] for name in ("value", "policy")}
    predictions, targets = arguments(heads=heads, requires_grad=False)

    def loss(weight, learned):
        weights = {"value": weight, "policy": learned}
        return gs.multi_step_loss(heads, predictions, targets, head_weights=weights, impl=impl).loss

    function = loss if impl == "compiled" else torch.compile(loss, fullgraph=True)
    for call in range(4):
        weight, learned = 0.1 + 0.37 * call, torch.tensor(0.5 * call, requires_grad=True)
        found = function(weight, learned)
        weights = {"value": weight, "policy": learned}
        torch.testing.assert_close(
            found, gs.reference.multi_step_loss(heads, predictions, targets, head_weights=weights).loss
        )
        torch.testing.assert_close(
            torch.autograd.grad(found, learned), torch.autograd.grad(loss(weight, learned), learned)
        )
    assert fresh_compiler.frame_count <= 2


@pytest.mark.compiled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_weights_that_pytorch_negates_lazily(backend):
    predictions = {"a": [torch.ones(3), torch.ones(3)]}

    def loss(head_weight, step_weights):
        heads, weights = {"a": gs.PerStepLoss()}, {"a": head_weight}
        return gs.multi_step_loss(heads, predictions, {}, head_weights=weights, step_weights=step_weights).loss

    compiled_loss = torch.compile(loss, fullgraph=True, backend=backend)
    negated = [torch._neg_view(torch.tensor(2.0)), torch._neg_view(torch.tensor([1.0, 3.0]))]
    for head_weight, step_weights in itertools.product([negated[0], -negated[0]], [negated[1], -negated[1]]):
        assert compiled_loss(head_weight, step_weights) == loss(head_weight, step_weights)


def test_exported():
    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.log_variances = torch.nn.ParameterDict({"value": torch.nn.Parameter(torch.tensor(0.5))})
            self.loss_fn = gs.MultiStepLoss(value=gs.TwoHot(SUPPORT))

        def forward(self, logits, target):
            weights = {name: (-s).exp() for name, s in self.log_variances.items()}
            return self.loss_fn({"value": [logits]}, {"value": [target]}, head_weights=weights).loss

    module = Loss()
    logits, target = torch.randn(3, 11), torch.randn(3)
    program = torch.export.export(module, (logits, target)).module()
    torch.testing.assert_close(program(logits, target), module(logits, target))
    program(logits, target).backward()
    (gradient,) = (parameter.grad for parameter in program.parameters())
    torch.testing.assert_close(gradient, -module(logits, target).detach())


def test_any_mapping():
    weights = torch.nn.ParameterDict({"value": torch.nn.Parameter(torch.tensor(0.5))})
    predictions, targets = arguments(heads=HEADS)
    out = gs.MultiStepLoss(**HEADS)(predictions, targets, head_weights=weights, impl="fused")
    out.loss.backward()
    assert weights["value"].grad is not None
    module = gs.reduce_multi_step(torch.ones(2, 2), head_weights={"loss": 3.0}, step_weights={"loss": [1.0, 0.0]})
    assert module.loss.item() == 3.0


def test_weights_learned_by_uncertainty():
    """Kendall et al. 2018: with ``exp(-s) L + s`` the log-variance s becomes the logarithm of its loss."""
    heads = {"small": gs.PerStepLoss(), "large": gs.PerStepLoss()}
    losses = {"small": torch.full((4, 1), 0.01), "large": torch.full((4, 1), 100.0)}
    log_variances = {name: torch.zeros((), requires_grad=True) for name in heads}
    optimizer = torch.optim.Adam(log_variances.values(), lr=0.3)
    for _ in range(200):
        weights = {name: (-s).exp() for name, s in log_variances.items()}
        loss = gs.multi_step_loss(heads, losses, {}, head_weights=weights, impl="fused").loss
        optimizer.zero_grad()
        (loss + sum(log_variances.values())).backward()
        optimizer.step()
    found = torch.stack([s.detach().exp() for s in log_variances.values()])
    torch.testing.assert_close(found, torch.tensor([0.01, 100.0]), rtol=0.02, atol=0)


WRONG = {
    "head_weights names 'vlaue', which is not a head": {"head_weights": {"vlaue": 1.0}},
    "step_weights names 'vlaue', which is not a head": {"step_weights": {"vlaue": [1.0] * 4}},
    "step_gradient_scale names 'vlaue', which is not a head": {"step_gradient_scale": {"vlaue": "unroll"}},
    "importance_weights names 'vlaue', which is not a head": {"importance_weights": {"vlaue": torch.ones(3)}},
    "head_weights must be a mapping of head names to numbers or tensors": {"head_weights": 2.0},
    "the head_weights of head 'value' must be a number or a tensor without dimensions, but it has shape [1]; write "
    ".reshape(())": {"head_weights": {"value": torch.ones(1)}},
    "the head_weights of head 'value' must be finite and at least 0, but it is -1.0": {"head_weights": {"value": -1.0}},
    "the head_weights of head 'value' must be finite and at least 0, but it is nan": {
        "head_weights": {"value": float("nan")}
    },
    "the head_weights of head 'value' must be a number or a tensor without dimensions, but it is of type str": {
        "head_weights": {"value": "1"}
    },
    "the head_weights of head 'value' must be a number or a tensor without dimensions, but it is of type bool": {
        "head_weights": {"value": True}
    },
    "the head_weights of head 'value' must be a number or a tensor without dimensions, but it is of type ndarray": {
        "head_weights": {"value": np.array(0.5)}
    },
    "the head_weights of head 'value' must be a number or a tensor without dimensions, but it is of type Decimal": {
        "head_weights": {"value": Decimal("0.5")}
    },
    "the head_weights of head 'value' must be a number in the range of a float, but it is too large": {
        "head_weights": {"value": 10**400}
    },
    "the step_weights of head 'value' requires grad, but weights get no gradient": {
        "step_weights": {"value": [1.0, torch.ones((), requires_grad=True), 1.0, 1.0]}
    },
    "the head_weights of head 'value' must be float64, float32, bfloat16 or float16, but it is torch.int64": {
        "head_weights": {"value": torch.tensor(1)}
    },
    "the head_weights of head 'value' is on meta, but the predictions are on cpu": {
        "head_weights": {"value": torch.ones((), device="meta")}
    },
    "the step_weights of head 'reward' must have 4 numbers, one per step, but it has 3; T includes the root": {
        "step_weights": {"reward": [1.0] * 3}
    },
    "the step_gradient_scale of head 'value' must be 'unroll', but it is 'rollun'": {
        "step_gradient_scale": {"value": "rollun"}
    },
    "the importance_weights of head 'value' must have shape [B] = [3], but it has [4]": {
        "importance_weights": {"value": torch.ones(4)}
    },
    "the importance_weights of head 'value' requires grad, but weights get no gradient": {
        "importance_weights": {"value": torch.ones(3, requires_grad=True)}
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    predictions, targets = arguments()
    for impl in ("auto", "reference", "compiled"):
        with pytest.raises((ValueError, TypeError)) as info:
            gs.multi_step_loss(HEADS, predictions, targets, impl=impl, **WRONG[message])
        assert message in str(info.value)


def test_check_reads_weights_by_head():
    predictions, targets = arguments()
    for options, message in (
        ({"head_weights": {"value": torch.tensor(-1.0)}}, "the head_weights of head 'value' must be .*, but it is -1"),
        ({"importance_weights": {"value": torch.tensor([1.0, -1.0, 1.0])}}, "'value' must .* sample 1 has -1"),
        ({"step_weights": {"value": [1.0, -1.0, 1.0, 1.0]}}, "'value' must .* step 1 has -1"),
    ):
        with pytest.raises(ValueError, match=message):
            gs.multi_step_loss(HEADS, predictions, targets, check=True, **options)
    gs.multi_step_loss(HEADS, predictions, targets, check=True, step_weights={"reward": [-1.0, 1.0, 1.0, 1.0]})


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("weight", [float("inf"), float("nan"), 8.0])
def test_weights_of_masked_samples_do_not_affect_normalization(weight, by_head):
    weights, mask = torch.tensor([1.0, 2.0, weight]), torch.tensor([[True], [True], [False]])
    out = gs.multi_step_loss(
        {"a": gs.PerStepLoss()},
        {"a": torch.ones(3, 1)},
        {},
        importance_weights={"a": weights} if by_head else weights,
        mask=mask,
        normalize_importance_weights=True,
        reduction="none",
    )
    assert out.loss.tolist() == [0.5, 1.0, 0.0]


def test_each_head_is_normalized_by_its_own_largest_weight():
    heads = {"a": gs.PerStepLoss(), "b": gs.PerStepLoss()}
    losses = {"a": torch.ones(2, 1), "b": torch.ones(2, 1)}
    weights = {"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([10.0, 5.0])}
    for impl in ("fused", "reference", "compiled"):
        out = gs.multi_step_loss(
            heads,
            losses,
            {},
            importance_weights=weights,
            normalize_importance_weights=True,
            reduction="none",
            impl=impl,
        )
        assert out.loss.tolist() == [1.25, 1.5]


def test_a_head_without_a_mask(recwarn):
    predictions = {"a": torch.rand(2, 3), "b": torch.rand(2, 3)}
    heads, mask = (
        {"a": gs.PerStepLoss(), "b": gs.PerStepLoss()},
        torch.tensor([[True, True, False], [True, False, False]]),
    )
    found = gs.multi_step_loss(heads, predictions, {}, mask={"a": mask, "b": None})
    expected = gs.multi_step_loss(heads, predictions, {}, mask={"a": mask})
    assert torch.equal(found.per_sample, expected.per_sample)
    assert not recwarn.list
