"""Predictions and targets by field, and batches without steps."""

from __future__ import annotations

import collections
import itertools
import math
import types
from typing import Any

import pytest
import torch
from test_policy_losses import (
    INF,
    LOG_2,
    NAN,
    Policies,
    close,
    doubles,
    every_implementation,
    every_policy,
    gradient_of,
    leaf,
    normal,
    run,
)
from torch.distributions import Categorical

import gradscale_ext as gs

B, T, A, D = 6, 3, 5, 2

# ---- Fields of other heads ------------------------------------------------------------------------------------------


@every_implementation
def test_classes_with_probabilities(impl):
    x, classes = leaf([[0.0] * 5]), torch.tensor([[0, 3]])
    out = run(gs.SoftCrossEntropy(), x, {"classes": classes, "probabilities": doubles(0.25, 0.75).unsqueeze(0)}, impl)
    close(out.loss, math.log(5))
    close(gradient_of(out.loss, x)[0], [[0.2 - 0.25, 0.2, 0.2, 0.2 - 0.75, 0.2]])


@every_implementation
@pytest.mark.parametrize("subtract", [False, True])
def test_sampled_classes_are_a_sparse_distribution(subtract, impl):
    """The probabilities need not add up to 1; the entropy of the target is over the entries."""
    x, t = (2 * normal(B, 9)).requires_grad_(), normal(B, 4, seed=1).sigmoid()
    classes = torch.stack([torch.randperm(9)[:4] for _ in range(B)])
    distribution = Categorical(logits=x)
    loss = -(t * x.log_softmax(-1).gather(-1, classes)).sum(-1) - 0.1 * distribution.entropy()
    if subtract:
        loss = loss + (t * t.log()).sum(-1)
    head = gs.SoftCrossEntropy(entropy_weight=0.1, subtract_target_entropy=subtract)
    out = run(head, x, {"classes": classes, "probabilities": t}, impl)
    close(out.per_step["h"], loss.detach())
    close(gradient_of(out.loss, x)[0], gradient_of(loss.mean(), x)[0])
    close(out.entropy["h"], distribution.entropy().detach())


@every_implementation
def test_details_of_sampled_classes(impl):
    """Twice the same class, padding and illegal actions."""
    x = leaf([[0, 0, 0, -INF]])
    head = gs.SoftCrossEntropy(subtract_target_entropy=True)

    def result(classes: list[int], *probabilities: float) -> gs.MultiStepLossOutput:
        target = {"classes": torch.tensor([classes]), "probabilities": doubles(*probabilities).unsqueeze(0)}
        return run(head, x, target, impl)

    twice = result([1, 1], 0.25, 0.75)
    close(twice.loss, math.log(3) + 0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    close(gradient_of(twice.loss, x)[0], [[1 / 3, -2 / 3, 1 / 3, 0]])
    close(result([1, 0], 1, 0).loss, math.log(3))
    close(result([1, 3], 1, 0).loss, math.log(3))
    assert result([1, 3], 0.5, 0.5).loss == INF


def test_a_sampled_class_out_of_range_is_nan_in_the_reference():
    x = torch.zeros(3, 4, requires_grad=True)
    target = {"classes": torch.tensor([[0, 3], [0, 4], [-1, 0]]), "probabilities": torch.full((3, 2), 0.5)}
    out = run(gs.SoftCrossEntropy(), x, target, "reference", reduction="sum")
    assert out.per_step["h"].isnan().tolist() == [False, True, True]
    assert gradient_of(out.loss, x)[0].isnan().all(1).tolist() == [False, True, True]


@every_implementation
def test_sampled_fractions(impl):
    """The loss of IQN, pair by pair."""
    x, samples, fractions = normal(B, 5).requires_grad_(), normal(B, 3, seed=1), normal(B, 5, seed=2).sigmoid()
    u = samples.unsqueeze(1) - x.unsqueeze(2)
    huber = torch.where(u.abs() <= 0.7, u.square() / 2, 0.7 * (u.abs() - 0.35))
    loss = ((fractions.unsqueeze(2) - (u.detach() < 0).double()).abs() * huber / 0.7).mean(2).sum(1).mean()
    out = run(gs.QuantileHuber(kappa=0.7), x, {"samples": samples, "fractions": fractions}, impl)
    close(out.loss, loss.detach())
    close(gradient_of(out.loss, x)[0], gradient_of(loss, x)[0])
    middle = ((2 * torch.arange(5).double() + 1) / 10).expand(B, 5)
    plain = run(gs.QuantileHuber(), x, samples, impl).loss
    close(run(gs.QuantileHuber(), x, {"samples": samples, "fractions": middle}, impl).loss, plain.detach())


# ---- Steps ----------------------------------------------------------------------------------------------------------

HEADS = {
    "policy": gs.PolicyGradient(entropy_weight=0.01, kl_weight=0.1, weight=2),
    "choices": gs.PolicyGradient(choices=(2, 3), surrogate="cispo", clip=0.3),
    "outside": gs.PolicyGradient(dual_clip=2),
    "gaussian": gs.GaussianPolicyGradient(entropy_weight=0.02),
    "shared": gs.GaussianPolicyGradient(surrogate="log", first_step=1),
    "value": gs.ClippedSquaredError(weight=0.25),
    "sampled": gs.SoftCrossEntropy(),
    "quantiles": gs.QuantileHuber(),
    "plain": gs.MeanSquaredError(),
}


def batch(*leading: int, heads: Any = HEADS, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Predictions and targets with these leading dimensions."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*leading, *shape, generator=generator, dtype=torch.float64)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, (*leading, *shape), generator=generator)

    old = {"advantages": some(), "log_probs": some() - 2}
    predictions = {
        "policy": some(A),
        "choices": some(A),
        "outside": some() - 2,
        "gaussian": {"means": some(D), "log_stds": some(D)},
        "shared": {"means": some(D), "log_stds": torch.randn(D, generator=generator, dtype=torch.float64)},
        "value": some(),
        "sampled": some(A),
        "quantiles": some(4),
        "plain": some(),
    }
    targets = {
        "policy": {**old, "actions": integers(A), "reference_log_probs": some() - 2},
        "choices": {**old, "actions": integers(2, 2)},
        "outside": old,
        "gaussian": {**old, "actions": some(D)},
        "shared": {"actions": some(D), "advantages": some()},
        "value": {"returns": some(), "values": some()},
        "sampled": {"classes": integers(A, 3), "probabilities": some(3).softmax(-1)},
        "quantiles": {"samples": some(2), "fractions": some(4).sigmoid()},
        "plain": some(),
    }
    return {name: predictions[name] for name in heads}, {name: targets[name] for name in heads}


def mapped(function: Any, entries: Any) -> Any:
    if isinstance(entries, dict):
        return {name: mapped(function, value) for name, value in entries.items()}
    return function(entries)


def leaves_of(predictions: Any) -> tuple[Any, list[torch.Tensor]]:
    found: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.detach().requires_grad_())
        return found[-1]

    return mapped(add, predictions), found


def from_first_step(entries: Any) -> Any:
    return mapped(lambda x: x[:, 1:] if x.dim() > 1 else x, entries)


def with_steps(seed: int = 0) -> tuple[Any, Any]:
    predictions, targets = batch(B, T, seed=seed)
    return ({**given, "shared": from_first_step(given["shared"])} for given in (predictions, targets))


def compare(found: gs.MultiStepLossOutput, expected: gs.MultiStepLossOutput, turned: Any = lambda x: x) -> None:
    for name in ("loss", "per_sample", "num_nonfinite"):
        close(getattr(found, name), getattr(expected, name).detach())
    for name in ("per_step", "entropy", "log_probs"):
        by_head = getattr(expected, name)
        assert getattr(found, name).keys() == by_head.keys()
        for head, tensor in by_head.items():
            assert getattr(found, name)[head].shape == turned(tensor).shape
            close(getattr(found, name)[head], turned(tensor))
    for name in ("head_means", "head_losses", "head_gradient_norms", "max_abs_logit", "approx_kl", "clip_fraction"):
        by_head = getattr(expected, name)
        assert getattr(found, name).keys() == by_head.keys()
        for head, tensor in by_head.items():
            close(getattr(found, name)[head], tensor)


def as_list(x: torch.Tensor) -> Any:
    return list(x.unbind(1)) if x.dim() > 1 else x


OTHER_FORMS = {
    "lists": (as_list, as_list, {}),
    "lists of predictions": (as_list, lambda x: x, {}),
    "lists of targets": (lambda x: x, as_list, {}),
    "steps first": (*[lambda x: x.transpose(0, 1) if x.dim() > 1 else x] * 2, {"batch_first": False}),
    "tuples": (lambda x: tuple(as_list(x)) if x.dim() > 1 else x, as_list, {}),
}


@every_implementation
@pytest.mark.parametrize("form", OTHER_FORMS)
def test_every_form_of_steps(form, impl):
    predicted, wanted, options = OTHER_FORMS[form]
    predictions, targets = with_steps()
    stacked, x = leaves_of(predictions)
    expected = gs.multi_step_loss(HEADS, stacked, targets, impl="reference")
    given, y = leaves_of(predictions)
    out = gs.multi_step_loss(HEADS, mapped(predicted, given), mapped(wanted, targets), impl=impl, **options)
    compare(out, expected, (lambda t: t.T) if options else (lambda t: t))
    for found, truth in zip(gradient_of(out.loss, *y), gradient_of(expected.loss, *x), strict=True):
        close(found, truth)


@every_implementation
def test_fields_of_a_target_may_have_different_forms(impl):
    predictions, targets = with_steps()
    expected = gs.multi_step_loss(HEADS, predictions, targets, impl="reference")
    mixed = {
        name: {field: as_list(x) if i % 2 else x for i, (field, x) in enumerate(entries.items())}
        if isinstance(entries, dict)
        else entries
        for name, entries in targets.items()
    }
    predictions["gaussian"]["means"] = as_list(predictions["gaussian"]["means"])
    compare(gs.multi_step_loss(HEADS, predictions, mixed, impl=impl), expected)


WITHOUT_STEPS = {
    "plain": {},
    "mask": {"mask": torch.tensor([True, False, True, True, False, True])},
    "masks": {"mask": {"value": torch.tensor([True, False, True, True, False, True])}, "reduction": "valid_mean"},
    "weights": {"importance_weights": torch.rand(B), "head_weights": {"policy": 0.5}, "num_entries": {"value": 4}},
    "none": {"reduction": "none"},
    "sum, skip": {"reduction": "sum", "nonfinite": "skip", "batch_first": False},
}


@every_implementation
@pytest.mark.parametrize("name", WITHOUT_STEPS)
def test_without_steps(name, impl):
    """As with one step, without its dimension."""
    heads = {name: head for name, head in HEADS.items() if head.first_step == 0}
    heads["shared"] = gs.GaussianPolicyGradient(surrogate="log")
    options = WITHOUT_STEPS[name]
    predictions, targets = batch(B, heads=heads)
    given, y = leaves_of(predictions)
    out = gs.multi_step_loss(heads, given, targets, steps=False, impl=impl, **options)
    one = lambda x: [x] if x.dim() > 1 or len(x) == B else x
    stacked, x = leaves_of(predictions)
    with_step = dict(options, batch_first=True)
    if "mask" in options:
        with_step["mask"] = mapped(lambda m: m[:, None], options["mask"])
    expected = gs.multi_step_loss(heads, mapped(one, stacked), mapped(one, targets), impl="reference", **with_step)
    compare(out, expected, lambda t: t.squeeze(1))
    for found, truth in zip(gradient_of(out.loss, *y), gradient_of(expected.loss, *x), strict=True):
        close(found, truth)
    module = gs.MultiStepLoss(**heads)(predictions, targets, steps=False, impl=impl, **options)
    close(module.loss, out.loss.detach())


@every_implementation
def test_without_steps_for_scalars_with_a_support(impl):
    support = gs.Support(-2, 2, 5)
    x, target = normal(B, 5), normal(B, seed=1)
    out = run(gs.TwoHot(support), x, target, impl)
    assert out.expected["h"].shape == (B,)
    close(out.expected["h"], support.decode(x))


def test_without_steps_in_a_graph():
    """Entries `[B]` have a single dimension."""
    heads = {"plain": gs.MeanSquaredError(), "value": gs.TwoHot(gs.Support(-2, 2, 5))}
    predictions, targets = {"plain": normal(B), "value": normal(B, 5)}, {"plain": normal(B), "value": normal(B)}

    def call(predictions):
        return gs.multi_step_loss(heads, predictions, targets, steps=False)

    expected = gs.multi_step_loss(heads, predictions, targets, steps=False, impl="reference")
    torch._dynamo.reset()
    compare(torch.compile(call, backend="aot_eager", fullgraph=True)(predictions), expected)


# ---- Masks, weights, types ------------------------------------------------------------------------------------------


@every_implementation
@every_policy
def test_masked_entries_add_nothing(kind, impl):
    """Also if they are NaN or inf, or if their action is out of range; with bits that do not depend on them."""
    p = Policies(kind, B)
    mask = torch.tensor([True, False, True, True, False, True])
    head = p.head(entropy_weight=0.1, kl_weight=0.1, **p.arguments)
    fields = {**p.fields, "reference_log_probs": p.old - 0.1}
    clean = run(head, p.prediction, fields, impl, mask=mask)
    expected = gradient_of(clean.loss, *p.leaves)
    dirty = {name: x.clone() for name, x in fields.items()}
    for name, x in dirty.items():
        x[~mask] = -100 if name == "actions" and kind != "gaussian" else NAN
    x = p.x.detach().clone()
    x[1], x[4] = NAN, INF
    leaves = [x.requires_grad_(), *p.leaves[1:]]
    prediction = {"means": x, "log_stds": leaves[1]} if kind == "gaussian" else x
    out = run(head, prediction, dirty, impl, mask=mask)
    assert out.loss == clean.loss
    assert out.num_nonfinite == 0
    for found, truth in zip(gradient_of(out.loss, *leaves), expected, strict=True):
        assert torch.equal(found, truth)
    assert out.approx_kl["h"] == clean.approx_kl["h"]
    assert out.clip_fraction["h"] == clean.clip_fraction["h"]
    assert out.log_probs["h"].isnan().tolist() == (~mask).tolist()
    everything = run(head, prediction, dirty, impl, mask=mask & False)
    for tensor in (everything.loss, *gradient_of(everything.loss, *leaves), *everything.head_gradient_norms.values()):
        assert not tensor.any()


@every_implementation
def test_a_masked_action_in_range_has_its_log_probability(impl):
    x, actions = torch.zeros(3, 2), torch.tensor([0, 1, -100])
    fields = {"actions": actions, "advantages": torch.ones(3), "log_probs": torch.zeros(3)}
    out = run(gs.PolicyGradient(), x, fields, impl, mask=torch.tensor([True, False, False]))
    close(out.log_probs["h"], [-torch.tensor(2.0).log(), -torch.tensor(2.0).log(), NAN], 1e-6)
    close(out.entropy["h"], [LOG_2] * 3, 1e-6)
    assert not any(tensor.requires_grad for tensor in (*out.log_probs.values(), *out.approx_kl.values()))


def test_an_action_out_of_range_is_nan_in_the_reference():
    x = torch.zeros(3, 2, requires_grad=True)
    fields = {"advantages": torch.ones(3), "log_probs": torch.zeros(3), "actions": torch.tensor([0, 2, -1])}
    out = run(gs.PolicyGradient(), x, fields, "reference", reduction="sum")
    assert out.per_step["h"].isnan().tolist() == [False, True, True]
    assert gradient_of(out.loss, x)[0].isnan().all(1).tolist() == [False, True, True]


@every_implementation
def test_the_gradient_of_a_shared_deviation(impl):
    """It is the sum over samples and steps, and counts once in the norm."""
    predictions, targets = batch(B, T)
    means, log_stds = (predictions["shared"][name].requires_grad_() for name in ("means", "log_stds"))
    heads, target = {"h": gs.GaussianPolicyGradient(surrogate="log")}, {"h": targets["shared"]}
    expanded = log_stds.detach().expand(B, T, D).clone().requires_grad_()
    out = gs.multi_step_loss(heads, {"h": {"means": means, "log_stds": log_stds}}, target, impl=impl)
    truth = gs.multi_step_loss(heads, {"h": {"means": means, "log_stds": expanded}}, target, impl="reference")
    close(out.loss, truth.loss.detach())
    found = gradient_of(out.loss, means, log_stds)
    by_mean, by_log_std = gradient_of(truth.loss, means, expanded)
    close(found[0], by_mean)
    close(found[1], by_log_std.sum((0, 1)))
    close(out.head_gradient_norms["h"], torch.cat([x.flatten() for x in found]).norm())
    only = gs.multi_step_loss(heads, {"h": {"means": means.detach(), "log_stds": log_stds}}, target, impl=impl)
    close(only.head_gradient_norms["h"], found[1].norm())


@every_implementation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types(dtype, impl):
    """Fields of any floating type are computed in the precision of the head."""
    predictions, targets = batch(B, T, heads=["policy", "gaussian", "value"])
    heads = {name: HEADS[name] for name in predictions}
    given, leaves = leaves_of(mapped(lambda x: x.to(dtype), predictions))
    out = gs.multi_step_loss(heads, given, targets, impl=impl)
    doubled, truth = leaves_of(mapped(lambda x: x.detach().double(), given))
    expected = gs.multi_step_loss(heads, doubled, targets, impl="reference")
    assert out.loss.dtype == out.approx_kl["policy"].dtype == out.log_probs["policy"].dtype == torch.float32
    torch.testing.assert_close(out.loss.double(), expected.loss, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(gradient_of(out.loss, *leaves), gradient_of(expected.loss, *truth), strict=True):
        assert found.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), wanted, rtol=max(2 * eps, 1e-5), atol=1e-5)


@every_implementation
@pytest.mark.parametrize("steps", [True, False])
def test_empty_batches(steps, impl):
    heads = {name: head for name, head in HEADS.items() if head.first_step == 0}
    predictions, targets = batch(*([0, T] if steps else [0]), heads=heads)
    given, leaves = leaves_of(predictions)
    out = gs.multi_step_loss(heads, given, targets, steps=steps, impl=impl)
    assert out.loss == 0
    for by_head in (out.approx_kl, out.clip_fraction, out.head_means, out.max_abs_logit):
        assert not any(by_head.values())
    assert out.log_probs["gaussian"].shape == ((0, T) if steps else (0,))
    assert [gradient.shape for gradient in gradient_of(out.loss, *leaves)] == [leaf.shape for leaf in leaves]


@every_implementation
def test_mappings_of_other_types(impl):
    predictions, targets = with_steps()
    expected = gs.multi_step_loss(HEADS, predictions, targets, impl="reference")
    for kind in (types.MappingProxyType, collections.UserDict, collections.OrderedDict):
        wrapped = [
            kind({name: kind(value) if isinstance(value, dict) else value for name, value in given.items()})
            for given in (predictions, targets)
        ]
        compare(gs.multi_step_loss(HEADS, *wrapped, impl=impl), expected)
    tensordict = pytest.importorskip("tensordict")
    wrapped = [tensordict.TensorDict({"policy": given["policy"]}, [B, T]) for given in (predictions, targets)]
    head = {"policy": HEADS["policy"]}
    close(gs.multi_step_loss(head, *wrapped, impl=impl).head_means["policy"], expected.head_means["policy"])


@every_implementation
def test_a_field_that_is_none_is_left_out(impl):
    x, fields = leaf([-1]), {"advantages": doubles(1), "log_probs": None, "reference_log_probs": None}
    out = run(gs.PolicyGradient(surrogate="log"), x, fields, impl)
    assert out.loss == 1
    assert out.approx_kl == {}


@every_implementation
def test_targets_of_one_tensor_and_by_field_are_the_same_head(impl):
    """Of a `SoftCrossEntropy`, in two calls."""
    heads, x = {"p": gs.SoftCrossEntropy()}, normal(B, A)
    classes = torch.arange(B) % A
    loss_fn = gs.MultiStepLoss(**heads)
    one = loss_fn({"p": x}, {"p": classes}, steps=False, impl=impl).loss
    sampled = {"classes": classes[:, None], "probabilities": torch.ones(B, 1)}
    close(loss_fn({"p": x}, {"p": sampled}, steps=False, impl=impl).loss, one)


@every_implementation
def test_strides_of_zero(impl):
    predictions, targets = batch(B, T, heads=["policy"])
    by_sequence = normal(B, seed=1)
    expanded = {**targets["policy"], "advantages": by_sequence[:, None].expand(B, T)}
    copied = {**expanded, "advantages": expanded["advantages"].contiguous()}
    heads = {"policy": HEADS["policy"]}
    found, expected = (
        gs.multi_step_loss(heads, predictions, {"policy": fields}, impl=impl).loss for fields in (expanded, copied)
    )
    assert found == expected


# ---- Contexts of PyTorch --------------------------------------------------------------------------------------------


#: Heads that are compiled: one whose prediction is a tensor, and one whose prediction has fields.
A_FEW = {name: HEADS[name] for name in ("policy", "shared")}


def of_one_tensor(impl: str, heads: Any = HEADS, **options: Any) -> Any:
    """The loss as a function of one tensor, which is added to every prediction."""
    predictions, targets = ({name: given[name] for name in heads} for given in with_steps())
    if options.pop("lists", False):
        predictions, targets = mapped(as_list, predictions), mapped(as_list, targets)

    def loss(x: torch.Tensor) -> torch.Tensor:
        add = lambda tensor: [entry + x for entry in tensor] if isinstance(tensor, list) else tensor + x
        return gs.multi_step_loss(heads, mapped(add, predictions), targets, impl=impl, **options).loss

    return loss


def plain_gradient(f: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


def exported(f: Any, x: torch.Tensor) -> torch.Tensor:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return f(x)

    return plain_gradient(torch.export.export(Module(), (x,)).module(), x)


def dual(f: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        made = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(f(made)).tangent


CONTEXTS = {
    "compile": lambda f, x: plain_gradient(torch.compile(f, backend="aot_eager", fullgraph=True), x),
    "compiled gradient": lambda f, x: torch.compile(torch.func.grad(f), backend="aot_eager", fullgraph=True)(x),
    "export": exported,
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap": lambda f, x: torch.func.vmap(torch.func.grad(f))(x.expand(2))[1],
    "vmap of losses": lambda f, x: plain_gradient(lambda y: torch.func.vmap(f)(y.expand(2)).mean(), x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "forward mode": dual,
}


def contexts_and_forms():
    """Pairs of CONTEXTS and forms; those that compile are marked."""
    for name, form in itertools.product(CONTEXTS, ["stacked", "lists"]):
        compiles = name.startswith(("compile", "export"))
        marks = [*[pytest.mark.compiled] * compiles, *[pytest.mark.slow] * (compiles and form == "lists")]
        yield pytest.param(name, form, marks=marks)


@every_implementation
@pytest.mark.parametrize(("context", "form"), list(contexts_and_forms()))
def test_contexts(context, form, impl):
    torch._dynamo.reset()
    x = torch.tensor(0.1, dtype=torch.float64)
    heads = A_FEW if context.startswith(("compile", "export")) else HEADS
    options = {"mask": torch.rand(B, T) < 0.7, "lists": form == "lists", "heads": heads}
    expected = plain_gradient(of_one_tensor("reference", **options), x)
    impl = "auto" if impl == "fused" else impl  # transforms need the reference
    close(CONTEXTS[context](of_one_tensor(impl, **options), x), expected, 1e-10)


@every_implementation
def test_second_derivatives(impl):
    x = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(of_one_tensor(impl), x)


@pytest.mark.compiled
@pytest.mark.parametrize("form", [pytest.param("stacked", marks=pytest.mark.slow), "lists", "without steps"])
def test_the_compiled_reference(form):
    torch._dynamo.reset()
    heads = {name: HEADS[name] for name in ("policy", "gaussian", "value")}
    if form == "without steps":
        heads["shared"] = gs.GaussianPolicyGradient()
        predictions, targets = batch(B, heads=heads)
        targets["shared"]["log_probs"] = normal(B)
        options = {"steps": False}
    else:
        predictions, targets = batch(B, T, heads=heads)
        options = {}
    if form == "lists":
        predictions, targets = mapped(as_list, predictions), mapped(as_list, targets)
    compare(
        gs.multi_step_loss(heads, predictions, targets, impl="compiled", **options),
        gs.multi_step_loss(heads, predictions, targets, impl="reference", **options),
    )


def test_gradients_for_the_backward_pass_of_the_kernels():
    """`_differentiable_gradients` returns them by head, field and step."""
    predictions, targets = batch(B, T, heads=["gaussian", "shared", "plain"])
    heads = {name: HEADS[name] for name in ("gaussian", "plain")}
    heads["shared"] = gs.GaussianPolicyGradient(surrogate="log")
    predictions["gaussian"]["log_stds"] = as_list(predictions["gaussian"]["log_stds"])
    given, expected = [], []
    for name in heads:
        entries = predictions[name]
        for value in entries.values() if isinstance(entries, dict) else [entries]:
            expected += [x.requires_grad_() for x in (value if isinstance(value, list) else [value])]
        given.append(entries)
    loss = gs.multi_step_loss(heads, predictions, targets, impl="reference").loss
    options = {name: [] for name in gs.call.options.BY_HEAD} | {"reduction": "mean", "steps": True}
    found = gs.loss.multi_step._differentiable_gradients(
        heads, given, [targets[name] for name in heads], options, torch.tensor(2.0), False
    )
    for one, truth in zip(found, gradient_of(2 * loss, *expected), strict=True):
        close(one, truth)


@every_implementation
def test_normalized_importance_weights(impl):
    predictions, targets = batch(B, T, heads=["policy"])
    heads, weights = {"policy": HEADS["policy"]}, torch.rand(B)
    options = {"importance_weights": weights, "normalize_importance_weights": True}
    found = gs.multi_step_loss(heads, predictions, targets, impl=impl, **options)
    expected = gs.multi_step_loss(heads, predictions, targets, importance_weights=weights / weights.max())
    close(found.loss, expected.loss)
