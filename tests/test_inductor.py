"""Every public name inside of torch.compile with Inductor, forward and backward, with and without fullgraph=True.

There is a small program for each name in `gs.__all__`. The programs of a group are compiled together, because most of
the time is spent in starting compilers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import gradscale_ext as gs
from gradscale_ext import _build

pytestmark = pytest.mark.compiled

Tensors = dict[str, torch.Tensor]


class Program(NamedTuple):
    """A function of tensors, all of which require grad. Its results are compared with eager mode, and the gradients of
    its tensors are the gradients of the sum of everything in its results that requires grad."""

    run: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]


GROUPS: dict[str, dict[str, Program]] = {}


def program(group: str, name: str, **shapes: tuple[int, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function in the table, with the shapes of its tensors."""

    def enter(run: Callable[..., Any]) -> Callable[..., Any]:
        assert all(name not in programs for programs in GROUPS.values())
        GROUPS.setdefault(group, {})[name] = Program(run, shapes)
        return run

    return enter


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


B, T, S, A = 4, 3, 11, 6

# ---- Gradient-flow operators -----------------------------------------------------------------------------------------

OPERATORS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "scale_gradient": (gs.ScaleGradient, {"scale": 0.5}),
    "reverse_gradient": (gs.ReverseGradient, {"scale": 2.0}),
    "clip_gradient_norm": (gs.ClipGradientNorm, {"max_norm": 0.7, "batch_dims": 1}),
    "clip_gradient_value": (gs.ClipGradientValue, {"min": -0.5, "max": 0.3}),
    "normalize_gradient": (gs.NormalizeGradient, {"norm": 2.0, "batch_dims": 1}),
}


def two_states(operator: Callable[[Any], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x):
        h, c = operator((x * 2, x.sin()))
        return (h * c.detach()).sum() + c.square().sum()

    return run


for _name, (_kind, _options) in OPERATORS.items():
    program("flow", _name, x=(B, 5))(two_states(functools.partial(getattr(gs, _name), **_options)))
    program("flow", _kind.__name__, x=(B, 5))(two_states(_kind(**_options)))


# ---- Supports and transforms -----------------------------------------------------------------------------------------

for _name in ("signed_hyperbolic", "signed_parabolic", "symlog", "symexp"):
    program("support", _name, x=(B, 5))(getattr(gs, _name))


@program("support", "Support", logits=(B, S), x=(B,))
def _support(logits, x):
    """A support that is made within the graph."""
    support = gs.Support(-5, 5, S)
    p, value = logits.softmax(-1).detach(), x.detach()
    return (
        support.decode(logits),
        support.centers(),
        support.two_hot(value),
        support.hl_gauss(value),
        support.project(p, value, 0.9 * torch.ones_like(value)),
        x.sum(),
    )


@program("support", "reference", logits=(B, S), x=(B, 5))
def _reference(logits, x):
    support = gs.Support(-5, 5, S)
    return (
        gs.reference.decode(logits, support),
        gs.reference.scale_gradient(x, 0.5).square().sum(),
        gs.reference.tensor_statistics([x], 2.0),
    )


# ---- The loss --------------------------------------------------------------------------------------------------------


def class_loss(head: Callable[[], gs.Head], target: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """The loss of a head that is made within the graph."""

    def run(x):
        targets = [target(step) for step in x.detach().unbind(1)]
        return gs.multi_step_loss({"h": head()}, {"h": 2 * x}, {"h": targets}, step_gradient_scale="unroll")

    return run


def scalars(step: torch.Tensor) -> torch.Tensor:
    return 3 * step[:, 0]


SHAPES = {"x": (B, T, A)}
for _head, _target in {
    gs.SoftCrossEntropy: lambda step: step.cos().softmax(-1),
    gs.MeanSquaredError: torch.cos,
    gs.Huber: torch.cos,
    gs.NegativeCosine: torch.cos,
    gs.QuantileHuber: torch.cos,
}.items():
    program("heads", _head.__name__, **SHAPES)(class_loss(_head, _target))
program("heads", "TwoHot", x=(B, T, S))(class_loss(lambda: gs.TwoHot(gs.Support(-5, 5, S), weight=0.5), scalars))
program("heads", "HLGauss", x=(B, T, S))(class_loss(lambda: gs.HLGauss(gs.Support(-5, 5, S)), scalars))
program("heads", "CategoricalKL", x=(B, T, 2, A))(class_loss(gs.CategoricalKL, torch.cos))


@program("heads", "BinaryCrossEntropy", x=(B, T))
def _binary(x):
    return gs.multi_step_loss({"h": gs.BinaryCrossEntropy()}, {"h": x}, {"h": x.detach().sigmoid()})


def policy_fields(x, actions):
    """The target of a policy, for `[B, ...]` predictions x."""
    return {"actions": actions, "advantages": x.detach()[:, 0], "log_probs": x.detach()[:, 1] - 2}


@program("heads", "PolicyGradient", x=(B, A))
def _policy(x):
    head = gs.PolicyGradient(choices=(2, 4), clip=(0.1, 0.3), dual_clip=2.0, entropy_weight=0.1)
    actions = torch.stack([torch.arange(B) % 2, torch.arange(B) % 4], 1)
    return gs.multi_step_loss({"h": head}, {"h": x}, {"h": policy_fields(x, actions)}, steps=False)


@program("heads", "GaussianPolicyGradient", x=(B, A), log_stds=(A,))
def _gaussian(x, log_stds):
    head = gs.GaussianPolicyGradient(surrogate="cispo", clip=(0.5, 1.0))
    predictions = {"means": x, "log_stds": log_stds}
    return gs.multi_step_loss({"h": head}, {"h": predictions}, {"h": policy_fields(x, x.detach().cos())}, steps=False)


@program("heads", "ClippedSquaredError", x=(B, T))
def _clipped(x):
    targets = {"returns": x.detach().cos(), "values": x.detach() + 0.1}
    return gs.multi_step_loss({"h": gs.ClippedSquaredError(clip=0.05)}, {"h": x}, {"h": targets})


@program("heads", "PerStepLoss", x=(B, T))
def _per_step(x):
    return gs.multi_step_loss({"h": gs.PerStepLoss()}, {"h": x.square()}, {})


@program("heads", "Head", x=(B, T))
def _head_class(x):
    head = gs.PerStepLoss(weight=0.5)
    return isinstance(head, gs.Head), head == gs.PerStepLoss(weight=0.5), head, head.weight * x.sum()


def muzero(value: torch.Tensor, policy: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Predictions and targets of two heads."""
    targets = {"value": 3 * value.detach()[..., 0], "policy": policy.detach().cos().softmax(-1)}
    return {"value": list(value.unbind(1)), "policy": policy}, targets


HEADS = {"value": gs.TwoHot(gs.Support(-5, 5, S), weight=0.25), "policy": gs.SoftCrossEntropy(entropy_weight=1e-2)}
LOGITS = {"value": (B, T, S), "policy": (B, T, A)}


@program("loss", "multi_step_loss", **LOGITS)
def _loss(value, policy):
    weights = {"step_weights": [1.0, 0.5, 0.25], "importance_weights": torch.linspace(0.5, 2.0, B)}
    return gs.multi_step_loss(HEADS, *muzero(value, policy), reduction="none", nonfinite="skip", **weights)


MODULE = gs.MultiStepLoss(**HEADS)


@program("loss", "MultiStepLoss", **LOGITS)
def _loss_module(value, policy):
    return MODULE(*muzero(value, policy), head_weights={"value": value.detach().square().mean()})


@program("loss", "MultiStepLossOutput", x=(B, T))
def _output(x):
    empty: dict[str, torch.Tensor] = {}
    scalar = {"h": x.mean()}
    return gs.MultiStepLossOutput(
        x.mean(), x.mean(1), {"h": x}, empty, empty, scalar, scalar, empty, empty, torch.zeros((), dtype=torch.int64)
    )


@program("loss", "reduce_multi_step", x=(B, T))
def _reduced(x):
    return gs.reduce_multi_step(x.square(), step_weights=[1.0, 0.5, 0.25], step_gradient_scale="unroll")


@program("loss", "priorities", x=(B, T))
def _priorities(x):
    by_sample = gs.priorities(x, x.cos(), steps="mean", alpha=0.6)
    return by_sample, gs.priorities(list(x.unbind(1)), list(x.cos().unbind(1)), steps="all"), (by_sample @ x).sum()


@program("loss", "unroll", x=(B, 5), actions=(B, 2, 5))
def _unroll(x, actions):
    def recurrent(hidden, action):
        h, c = hidden
        h = torch.tanh(h + action)
        return {"value": h.sum(1), "reward": h[:, 0]}, (h, c + h)

    outputs = gs.unroll(lambda x: ({"value": x.sum(1)}, (x, x.cos())), recurrent, x, actions)
    return {name: torch.stack(steps).square() for name, steps in outputs.items()}


# ---- Returns ---------------------------------------------------------------------------------------------------------

STEPS = {"rewards": (B, T), "values": (B, T + 1)}


@program("returns", "lambda_returns", **STEPS)
def _lambda_returns(rewards, values):
    return gs.lambda_returns(rewards, values, discount=0.9, lambda_=0.8)


@program("returns", "n_step_returns", **STEPS)
def _n_step_returns(rewards, values):
    return gs.n_step_returns(rewards, values, n=2, discount=0.9)


@program("returns", "n_step_transitions", rewards=(B, 6))
def _n_step_transitions(rewards):
    return gs.n_step_transitions(rewards, n=2, discount=0.9)


@program("returns", "generalized_advantages", **STEPS)
def _generalized_advantages(rewards, values):
    return gs.generalized_advantages(rewards, values, discount=0.9, lambda_=0.8)


@program("returns", "vtrace", **STEPS)
def _vtrace(rewards, values):
    return gs.vtrace(rewards, values, ratios=rewards.detach().exp(), discount=0.9)


@program("returns", "retrace", **STEPS)
def _retrace(rewards, values):
    next_values = values[:, 1:].cos()
    return gs.retrace(rewards, values[:, :-1], next_values, ratios=rewards.detach().exp(), discount=0.9)


@program("returns", "muzero_targets", rewards=(B, 6), values=(B, 7))
def _muzero_targets(rewards, values):
    episodes = {"lengths": torch.tensor([6, 5, 4, 3]), "terminated": torch.tensor([False, True, True, False])}
    numbers = {"num_unroll_steps": 2, "td_steps": 2, "discount": 0.9}
    targets = gs.muzero_targets(rewards.detach(), values.detach(), **episodes, **numbers)
    return targets, rewards.sum() + values.sum()


def plain_data(kind: Any) -> Callable[[torch.Tensor], Any]:
    def run(x):
        made = kind(*[x * index for index in range(1, len(kind._fields) + 1)])
        return made, made._replace(**{kind._fields[0]: x.cos()}), kind._fields

    return run


@program("returns", "standardize", advantages=(B, T))
def _standardize(advantages):
    return gs.standardize(advantages)


@program("returns", "ReturnScale", returns=(B, T))
def _return_scale(returns):
    scale = gs.ReturnScale()
    return scale(returns.detach()), returns.sum()


@program("returns", "completed_q_policy", values=(B, A), logits=(B, A))
def _completed_q_policy(values, logits):
    visits = torch.arange(A).expand(B, A)
    policy = gs.completed_q_policy(logits.detach(), values.detach(), visits, values[:, 0].detach())
    return policy, values.sum() + logits.sum()


for _kind in (gs.VTrace, gs.GeneralizedAdvantages, gs.MuZeroTargets, gs.NStepTransitions):
    program("returns", _kind.__name__, x=(B, T))(plain_data(_kind))


# ---- Seeing gradients ------------------------------------------------------------------------------------------------


def with_gradients(*gradients: torch.Tensor) -> list[nn.Parameter]:
    parameters = []
    for seed, gradient in enumerate(gradients):
        parameters.append(nn.Parameter(numbers(*gradient.shape, seed=seed)))
        parameters[-1].grad = gradient.detach().clone()
    return parameters


@program("gradients", "gradient_statistics", x=(B, 5), y=(3,))
def _statistics(x, y):
    found = gs.gradient_statistics([x * 2, y, None], names=["x", "y", "none"], histogram=True)
    return found, (x * y.norm()).sum()


@program("gradients", "GradientStatistics", x=(B, 5))
def _fields(x):
    found = gs.gradient_statistics([x.detach()])
    fields = (found.numel, found.norm, found.abs_max, found.mean, found.zeros, found.nans, found.infs, found.missing)
    same = gs.GradientStatistics(found.names, found.is_gradient, found._values, found._counts)
    return fields, found.bin_edges, found.clipping, same.total_norm, found > 1, x.sum()


CLIPPED = with_gradients(numbers(3, 5), numbers(3))


@program("gradients", "clip_gradients_", x=(3, 5), y=(3,))
def _clip(x, y):
    for parameter, gradient in zip(CLIPPED, (x, y), strict=True):
        parameter.grad.copy_(gradient.detach())
    clipped = gs.clip_gradients_(CLIPPED, 0.5), gs.clip_gradients_(CLIPPED, adaptive=0.01)
    return clipped, [parameter.grad.clone() for parameter in CLIPPED], x.sum() + y.sum()


@program("gradients", "l2_loss", x=(3, 5), y=(3,))
def _l2(x, y):
    return gs.l2_loss([x, y], 0.1), gs.l2_loss([x, y], y.mean())


@program("gradients", "Finding", x=(3,))
def _finding(x):
    return gs.Finding("detached", "weight", "a cause", "a remedy", is_note=True), x.sum()


@program("gradients", "GradientDiagnosis", x=(3,))
def _diagnosis(x):
    found = gs.GradientDiagnosis([gs.Finding("detached", "weight", "a cause", "a remedy")], 3)
    return found, found.ok, str(found), found.to_dict(), x.sum()


@program("gradients", "CaptureFinding", x=(3,))
def _capture_finding(x):
    return gs.CaptureFinding("sync", "a cause", "a remedy", "train.py:12", "x.item()"), x.sum()


@program("gradients", "CaptureDiagnosis", x=(3,))
def _capture_diagnosis(x):
    found = gs.CaptureDiagnosis([gs.CaptureFinding("sync", "a cause", "a remedy", None, None)], 3)
    return found, found.ok, str(found), found.to_dict(), x.sum()


# ---- Names that break the graph --------------------------------------------------------------------------------------

MODEL = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.0)


def monitored(x):
    """An update whose monitor is opened and closed within the function."""
    with gs.GradientMonitor(MODEL, OPTIMIZER, every=1) as monitor:
        OPTIMIZER.zero_grad()
        MODEL(x).sum().backward()
        gs.clip_gradients_(MODEL, 0.1)
        OPTIMIZER.step()
    return list(monitor.history), torch.tensor([value for ((_, value),) in monitor.history.values()])


def update(x):
    OPTIMIZER.zero_grad()
    loss = MODEL(x).sum()
    loss.backward()
    OPTIMIZER.step()
    return loss.detach()


def captured(x):
    step = gs.CapturedStep(update, MODEL, OPTIMIZER)
    return step(x), step.is_captured


def diagnosed(x):
    diagnosis = gs.diagnose_capture(update, [x, x + 1], MODEL, OPTIMIZER)
    return diagnosis.ok, diagnosis.to_dict()


def emptied(x):
    gs.empty_cache()
    return x.cos()


#: Functions of `[4, 3]`, with a part of the error that fullgraph=True raises.
BREAKING: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "GradientMonitor": (monitored, "GradientMonitor: open a monitor outside of a function with fullgraph=True"),
    "CapturedStep": (captured, "CapturedStep: make it outside of a function with fullgraph=True"),
    "diagnose_capture": (diagnosed, "diagnose_capture: call it outside of a function with fullgraph=True"),
    "empty_cache": (emptied, "empty_cache: call it outside of a function with fullgraph=True"),
}


@pytest.mark.parametrize("name", BREAKING)
def test_names_that_break_the_graph(name):
    torch._dynamo.reset()
    function, words = BREAKING[name]
    found, expected = torch.compile(function)(numbers(4, 3)), function(numbers(4, 3))
    for index, (value, wanted) in enumerate(zip(values_of(found), values_of(expected), strict=True)):
        assert_same(value, wanted, f"{name}, result {index}")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        torch.compile(function, fullgraph=True)(numbers(4, 3))


#: Names that are used around a compiled function.
AROUND = ("GradientTracer", "diagnose_gradients")


def test_names_that_are_used_around_a_compiled_function():
    torch._dynamo.reset()

    def loss(x):
        return MODEL[2](MODEL[0](x).tanh().detach()).sum()

    diagnoses = []
    for function in (torch.compile(loss), loss):
        with gs.GradientTracer() as tracer:
            value = function(numbers(4, 3))
        diagnoses.append(gs.diagnose_gradients(value, MODEL, tracer=tracer).to_dict())
    assert [(finding["code"], finding["parameter"]) for finding in diagnoses[1]["findings"]] == [
        ("detached", "0.weight"),
        ("detached", "0.bias"),
    ]
    assert diagnoses[0] == diagnoses[1]


# ---- Judging ---------------------------------------------------------------------------------------------------------


def values_of(results: Any) -> list[Any]:
    """The tensors, and other values, in nested results."""
    if dataclasses.is_dataclass(results):
        fields = [getattr(results, field.name) for field in dataclasses.fields(results)]
        return [type(results), *values_of(fields)]
    if isinstance(results, dict):
        return [list(results), *values_of(list(results.values()))]
    if isinstance(results, tuple | list):
        return [type(results), *(value for result in results for value in values_of(result))]
    return [results]


def inputs_of(group: str) -> dict[str, Tensors]:
    return {
        name: {
            argument: numbers(*shape, seed=sum(map(ord, name + argument))).requires_grad_()
            for argument, shape in own.shapes.items()
        }
        for name, own in GROUPS[group].items()
    }


def run(group: str, inputs: dict[str, Tensors]) -> dict[str, Any]:
    return {name: own.run(**inputs[name]) for name, own in GROUPS[group].items()}


def results_and_gradients(
    function: Callable[..., dict[str, Any]], group: str
) -> tuple[dict[str, list[Any]], dict[str, dict[str, torch.Tensor | None]]]:
    """By name: the values in its results, and the gradients of its tensors."""
    inputs = inputs_of(group)
    results = {name: values_of(result) for name, result in function(group, inputs).items()}
    tensors = [value for values in results.values() for value in values if isinstance(value, torch.Tensor)]
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    weights = [torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape) for tensor in differentiable]
    torch.autograd.backward(differentiable, [w.to(tensor) for w, tensor in zip(weights, differentiable, strict=True)])
    return results, {name: {key: leaf.grad for key, leaf in own.items()} for name, own in inputs.items()}


def assert_same(found: Any, expected: Any, where: str) -> None:
    if not isinstance(expected, torch.Tensor):
        assert found == expected, where
        return
    assert found.requires_grad == expected.requires_grad, where
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{where}: {text}")


@functools.cache
def by_eager_mode(group: str) -> Any:
    return results_and_gradients(run, group)


def test_every_public_name_has_a_program():
    assert sorted([*(name for programs in GROUPS.values() for name in programs), *BREAKING, *AROUND]) == sorted(
        gs.__all__
    )


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("group", GROUPS)
def test_values_and_gradients_are_those_of_eager_mode(group, fullgraph):
    torch._dynamo.reset()
    results, gradients = results_and_gradients(torch.compile(run, fullgraph=fullgraph), group)
    expected_results, expected_gradients = by_eager_mode(group)
    for name, expected in expected_results.items():
        assert len(results[name]) == len(expected), name
        for index, (value, wanted) in enumerate(zip(results[name], expected, strict=True)):
            assert_same(value, wanted, f"{name}, result {index}")
        for key, wanted in expected_gradients[name].items():
            assert wanted is not None, f"{name}: the program uses {key} in nothing that is differentiable"
            assert_same(gradients[name][key], wanted, f"{name}, gradient of {key}")


def test_graphs_of_another_build_are_not_found(tmp_path, monkeypatch):
    """torch.compile keeps graphs on the disk, with the operations that it traced in this package."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", True)
    x = torch.randn(8, requires_grad=True)

    def cache_hits():
        torch._dynamo.reset()
        counters.clear()
        torch.compile(lambda x: gs.scale_gradient(x, 0.5).sin().sum())(x).backward()
        return counters["aot_autograd"]["autograd_cache_hit"]

    assert [cache_hits(), cache_hits()] == [0, 1]
    tag = torch.compiler.config.cache_key_tag
    assert tag.endswith(_build.SOURCES)
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", tag.replace(_build.SOURCES, "another build"))
    assert cache_hits() == 0
