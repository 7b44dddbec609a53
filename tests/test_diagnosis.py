"""Diagnoses of models with one fault, with several, and with none. A diagnosis has no side effects."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import one_server, start_processes
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradscale_ext as gs
from gradscale_ext.diagnosis import graph
from gradscale_ext.diagnosis.diagnosis import diagnose_gradients
from gradscale_ext.diagnosis.tracer import GradientTracer

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Between(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.between = between

    def forward(self, x):
        return self.last(self.between(self.first(x))).mean()


X = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]])
FIRST = {"first.weight", "first.bias"}


def diagnose(loss, model, optimizer=None, tracer=None):
    """Diagnose, and check that the report can be printed and that each finding has a cause and a remedy."""
    diagnosis = diagnose_gradients(loss, model, optimizer, tracer=tracer)
    for finding in diagnosis.findings:
        assert finding.parameter in str(diagnosis) or "more" in str(diagnosis)
        assert finding.cause
        assert finding.remedy
    return diagnosis


def found(diagnosis):
    return {(finding.code, finding.parameter) for finding in diagnosis.findings}


def trace(model, *inputs):
    with GradientTracer() as tracer:
        loss = model(*inputs)
    return loss, tracer


def sgd(model, **options):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, **options)


def line_of(text):
    """The number of the line of this file that ends with "# <- {text}"."""
    lines = Path(__file__).read_text().splitlines()
    (line,) = [number for number, content in enumerate(lines, 1) if content.endswith(f"# <- {text}")]
    return line


def at(finding, mark):
    return finding.location is not None and finding.location.endswith(f"{Path(__file__).name}:{line_of(mark)}")


# ---- Each code ------------------------------------------------------------------------------------------------------


def detach(h):
    return h.detach() * 2  # <- detach


def data(h):
    return h.data * 2  # <- data


def new_tensor(h):
    return torch.tensor(h.tolist())  # <- tolist


def in_place(h):
    out = torch.zeros(2, 4)
    out[:] = h.detach()  # <- written
    return out


def numpy(h):
    return torch.from_numpy(h.detach().numpy() * 2)  # <- numpy


def scaled(h):
    return gs.scale_gradient(h.detach(), 0.5)  # <- scaled


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def after_function(h):
    return Doubled.apply(h).detach()  # <- function


def by_parameter(h):
    return nn.Parameter(h.detach().clone()) * 1.0  # <- parameter


def test_a_deep_copy_is_detached():
    model = nn.ModuleDict({"online": nn.Linear(3, 1)})
    with GradientTracer() as tracer:
        target = copy.deepcopy(model["online"])  # <- deepcopy
        loss = target(X).sum()
    diagnosis = diagnose(loss, model, tracer=tracer)
    assert found(diagnosis) == {("detached", "online.weight"), ("detached", "online.bias")}
    assert all(at(finding, "deepcopy") for finding in diagnosis.findings)


def under_no_grad(h):
    with torch.no_grad():  # <- entered
        return h * 2  # <- off


@torch.no_grad()
def decorated(h):
    return h * 2  # <- decorated


def inference(h):
    with torch.inference_mode():
        h = h * 2  # <- inference
    return h.clone()


def classes(h):
    return F.one_hot(h.argmax(-1), 4).float()  # <- argmax


def compared(h):
    return (h > 0).float()  # <- compared


def converted(h):
    return h.long().float()  # <- converted


def listed(h):
    index = h.argmax(-1)  # <- listed
    assert h.mean().item() < 10
    chosen = torch.tensor(index.tolist())
    assert len(h.tolist()) == 2
    return F.one_hot(chosen, 4).float()


def rounded(h):
    return torch.from_numpy(h.long().numpy()).float()  # <- rounded


def left_off(h):
    with torch.no_grad():
        h = h * 2  # <- left off
    return torch.tensor([[number**2 for number in row] for row in h.tolist()])


CUTS = {
    "detached": {
        detach: "detach",
        data: "data",
        new_tensor: "tolist",
        in_place: "written",
        numpy: "numpy",
        scaled: "scaled",
        after_function: "function",
        by_parameter: "parameter",
    },
    "no_grad": {under_no_grad: "off", decorated: "decorated", inference: "inference", left_off: "left off"},
    "integer_dtype": {
        classes: "argmax",
        compared: "compared",
        converted: "converted",
        listed: "listed",
        rounded: "rounded",
    },
}


@pytest.mark.parametrize(("code", "cut", "mark"), [(code, *cut) for code in CUTS for cut in CUTS[code].items()])
def test_cuts(code, cut, mark):
    model = Between(cut)
    loss, tracer = trace(model, X)
    diagnosis = diagnose(loss, model, sgd(model), tracer)
    assert found(diagnosis) == {(code, name) for name in FIRST}
    assert all(at(finding, mark) for finding in diagnosis.findings)
    assert f"# <- {mark}" in diagnosis.findings[0].source
    if mark == "off":
        assert f":{line_of('entered')})" in diagnosis.findings[0].cause
    assert found(diagnose(loss, model)) == {("disconnected", name) for name in FIRST}


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return None


def zeroed_by_a_hook(h):
    h = h * 2
    h.register_hook(torch.zeros_like)
    return h


def narrow(dtype):
    """A factor with which gradients underflow to 0 in `dtype`."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps * 0.01


LOST = {
    "zero_derivative": {
        lambda h: torch.round(h) * 3: "RoundBackward0",  # <- round
        torch.sign: "SignBackward0",
        torch.floor: "FloorBackward0",
        lambda h: torch.div(h, 2, rounding_mode="floor"): "DivBackward2",
        lambda h: torch.bernoulli(h.sigmoid()): "BernoulliBackward0",
        NoGradient.apply: "NoGradientBackward",
    },
    "all_zero": {
        lambda h: torch.relu(h - 100): "ReluBackward0",
        lambda h: h.masked_fill(torch.ones(2, 4, dtype=torch.bool), 1.0): "MaskedFillBackward0",
        lambda h: (h + 100).clamp(max=1.0): "ClampBackward",
        lambda h: h * 0 + 1: "MulBackward0",
        lambda h: gs.scale_gradient(h, 0.0) + 1: "ScaleGradientBackward",
        lambda h: h - h: "",
        zeroed_by_a_hook: "",
    },
    "vanishing": {
        lambda h: torch.sigmoid(h + 1000): "",
        lambda h: torch.tanh(h - 1000): "",
        lambda h: torch.softmax(h + torch.tensor([1000.0, 0, 0, 0]), -1): "",
        lambda h: torch.exp(h - 1000): "",
        lambda h: F.gelu(h - 1000): "",
        lambda h: F.softplus(h - 1000): "",
        lambda h: h * 1e-30 * 1e-30: "",
        lambda h: h * 1e-12: "",
        lambda h: torch.sigmoid(h + 30): "",
        lambda h: h.half().float() * narrow(torch.float16): "",
        lambda h: (h.bfloat16() * narrow(torch.bfloat16)).float(): "",
    },
}


@pytest.mark.parametrize(("code", "function", "node"), [(code, *lost) for code in LOST for lost in LOST[code].items()])
def test_gradients_that_are_lost_on_the_way(code, function, node):
    model = Between(lambda h: function(h) + 2)
    loss, tracer = trace(model, X)
    for diagnosis in (diagnose(loss, model, sgd(model)), diagnose(loss, model, sgd(model), tracer)):
        assert found(diagnosis) == {(code, name) for name in FIRST}
        assert all(node in finding.cause for finding in diagnosis.findings)
    if node == "RoundBackward0":
        assert all(at(finding, "round") for finding in diagnosis.findings)


def test_tiny_gradients_are_vanishing():
    model = nn.Linear(3, 1)
    nn.init.constant_(model.bias, -60.0)
    loss = F.mse_loss(torch.sigmoid(model(X)), torch.ones(2, 1))
    assert found(diagnose(loss, model)) == {("vanishing", "weight"), ("vanishing", "bias")}
    nn.init.zeros_(model.bias)
    loss = F.mse_loss(torch.sigmoid(model(X)), torch.ones(2, 1)) * 1e-6
    assert diagnose(loss, model).findings == []


@pytest.mark.parametrize(
    ("function", "node"),
    [
        (lambda h: (h - h).sqrt() + 1, "SqrtBackward0"),
        (lambda h: torch.where(h > 1e9, (h * 0).log(), h), "LogBackward0"),
        (lambda h: h * torch.tensor([1.0, 1.0, float("nan"), 1.0]), "MulBackward0"),
    ],
)
def test_nonfinite(function, node):
    model = Between(function)
    loss, tracer = trace(model, X)
    diagnosis = diagnose(loss, model, sgd(model), tracer)
    faulty = {f for f in diagnosis.findings if f.parameter in FIRST}
    assert {(f.code, f.parameter) for f in faulty} == {("nonfinite", name) for name in FIRST}
    assert all(node in f.cause for f in faulty)
    assert all(f.code == "nonfinite" for f in diagnosis.findings)
    assert all(("the loss itself is nan" in f.cause) == bool(loss.isnan()) for f in faulty)


def test_a_nonfinite_loss_with_finite_gradients_is_found():
    model = nn.Linear(3, 1)
    diagnosis = diagnose(model(X).sum() + float("inf"), model)
    assert found(diagnosis) == {("nonfinite", "loss")}


def test_frozen():
    model = Between(torch.tanh)
    model.first.requires_grad_(False)
    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnosis = diagnose(model(X), model, everything)
    assert found(diagnosis) == {("frozen", name) for name in FIRST}
    assert not diagnosis.ok
    assert not any(finding.is_note for finding in diagnosis.findings)
    assert diagnose(model(X), model, sgd(model)).findings == []
    notes = diagnose(model(X), model)
    assert str(notes).startswith("Notes on 2 tensors")
    assert "frozen (note)" in str(notes)
    assert found(notes) == {("frozen", name) for name in FIRST}
    assert notes.ok
    assert all(finding.is_note for finding in notes.findings)


def test_not_in_optimizer():
    model = Between(torch.tanh)
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1)
    diagnosis = diagnose(model(X), model, optimizer)
    assert found(diagnosis) == {("not_in_optimizer", name) for name in FIRST}
    assert diagnosis.ok
    assert all("nothing if it is not to be trained" in finding.remedy for finding in diagnosis.findings)
    assert diagnose(model(X), model).findings == []


def test_an_optimizer_of_another_model_is_a_finding():
    model = Between(torch.tanh)
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    diagnosis = diagnose(model(X), model, optimizer)
    assert found(diagnosis) == {("not_in_optimizer", name) for name in (*FIRST, "last.weight", "last.bias")}
    assert not diagnosis.ok
    assert all("neither in the model nor in the loss" in finding.cause for finding in diagnosis.findings)
    prompt = torch.zeros(2, 3, requires_grad=True)
    assert diagnose(model(X + prompt), model, torch.optim.SGD([prompt], lr=0.1)).ok


class Wrapped(torch.optim.Optimizer):
    """An optimizer that lacks the attributes of its base class, as Accelerate's wrapper does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)


def test_several_optimizers():
    model = Between(torch.tanh)
    loss = model(X)
    first, last = torch.optim.SGD(model.first.parameters(), 0.1), torch.optim.Adam(model.last.parameters())
    named = {"first": first, "last": last}
    for optimizers in (
        [first, last],
        (last, first),
        iter([first, last]),
        named,
        named.values(),
        [Wrapped(first), last],
    ):
        assert diagnose(loss, model, optimizers).findings == []
    assert found(diagnose(loss, model, [last])) == {("not_in_optimizer", name) for name in FIRST}
    assert diagnose(loss, model, Wrapped(torch.optim.SGD(model.parameters(), 0.1))).findings == []


def test_nonfinite_gradients_outside_the_optimizer_are_a_finding():
    model = Between(lambda h: (h - h).sqrt() + 1)
    diagnosis = diagnose(model(X), model, torch.optim.SGD(model.last.parameters(), 0.1))
    assert found(diagnosis) == {("nonfinite", name) for name in FIRST}
    assert not diagnosis.ok


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.gain = torch.ones(3, requires_grad=True)
        self.gains = [torch.ones(3, requires_grad=True), {"deep": torch.ones(3, requires_grad=True)}]
        self.layers = [nn.Linear(3, 3)]
        self.idle = torch.ones(3, requires_grad=True)

    def forward(self, x):
        h = self.layers[0](self.layer(x)) * self.gain * self.gains[0] * self.gains[1]["deep"]
        return h.pow(2).mean()


def test_unregistered_tensors_are_not_in_the_optimizer():
    model = Unregistered()
    names = {"gain", "gains.0", "gains.1.deep", "layers.0.weight", "layers.0.bias"}
    assert found(diagnose(model(X), model, sgd(model))) == {("not_in_optimizer", name) for name in names}
    own = [model.gain, model.gains[0], model.gains[1]["deep"], *model.layers[0].parameters()]
    optimizer = torch.optim.SGD([*model.parameters(), *own], lr=0.1)
    assert diagnose(model(X), model, optimizer).findings == []


class NonLeaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.w = torch.randn(3, requires_grad=True) * 0.1
        self.ws = [torch.randn(3, requires_grad=True).double()]
        self.register_buffer("scale", torch.ones(3, requires_grad=True).exp())
        self.cached = None

    def forward(self, x):
        self.cached = self.layer(x)
        return (self.cached * self.w * self.ws[0] * self.scale).sum()


def test_non_leaf():
    model = NonLeaf()
    loss, tracer = trace(model, X)
    expected = {("non_leaf", name) for name in ("w", "ws.0", "scale")}
    assert found(diagnose(loss, model)) == expected
    assert found(diagnose(loss, model, sgd(model), tracer)) == expected


def test_stored_activations_are_not_non_leaf():
    class Salient(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            self.scaled = x * 2
            return self.layer(self.scaled).sum()

    model = Salient()
    loss, tracer = trace(model, X.clone().requires_grad_())
    assert diagnose(loss, model, sgd(model), tracer).findings == []


def test_a_cut_in_a_compiled_region():
    model = Between(lambda h: h.detach() * 2)
    loss = torch.compile(model, backend="aot_eager")(X)
    diagnosis = diagnose(loss, model)
    assert found(diagnosis) == {("disconnected", name) for name in FIRST}
    assert all("GradientTracer" in finding.remedy for finding in diagnosis.findings)


@pytest.mark.parametrize(
    ("between", "call"),
    [
        (nn.Parameter, "nn.Parameter"),
        (lambda h: nn.Parameter(h.clone()), "nn.Parameter"),
        (lambda h: nn.Parameter(h.view(-1)).view(h.shape), "nn.Parameter"),
        (lambda h: torch.empty(0).set_(h.untyped_storage(), 0, h.shape), "a call that the tracer does not see"),
        (nn.Buffer, "detach"),
        (lambda h: copy.deepcopy(h.detach()), "detach"),
        (lambda h: h.data, "data"),
    ],
)
def test_values_of_calls_that_no_mode_intercepts(between, call):
    model = Between(between)
    loss, tracer = trace(model, X)
    diagnosis = diagnose(loss, model, tracer=tracer)
    assert found(diagnosis) == {("detached", name) for name in FIRST}
    cause = f"the loss depends on it only through the result of {call}, which is cut off from the graph"
    assert {finding.cause for finding in diagnosis.findings} == {cause}
    assert all(Path(__file__).name in finding.location for finding in diagnosis.findings)


def test_a_parameter_created_on_one_of_two_paths():
    model = Between(lambda h: h + nn.Parameter(h))
    loss, tracer = trace(model, X)
    (finding,) = diagnose(loss, model, tracer=tracer).findings
    assert (finding.code, finding.parameter, finding.is_note) == ("detached", "loss", True)
    assert "the result of nn.Parameter sends no gradient to first.weight, first.bias" in finding.cause


@pytest.mark.parametrize(
    ("between", "call"),
    [
        (lambda h: torch.Tensor([v**2 for v in h.flatten().tolist()]).view(2, 4), "tolist"),
        (lambda h: torch.FloatTensor([[0.5 - float(v) for v in row] for row in h.detach()]), "__float__"),
        (lambda h: torch.Tensor((np.asarray(h.detach()) ** 2).tolist()), "__array__"),
        (lambda h: torch.Tensor(h.tolist()), "tolist"),
        (lambda h: pickle.loads(pickle.dumps(h.detach())), "untyped_storage"),
    ],
)
def test_values_that_left_pytorch_and_returned_unseen(between, call):
    """The diagnosis reports no cut, because it does not see whether the values enter the loss."""
    model = Between(between)
    loss, tracer = trace(model, X)
    diagnosis = diagnose(loss, model, tracer=tracer)
    assert found(diagnosis) == {("disconnected", name) for name in FIRST}
    for finding in diagnosis.findings:
        assert finding.cause == (
            f"it was used, but no path from it to the loss was seen; {call}() took values made of it out of PyTorch, "
            "and what became of them is not seen"
        )
        assert Path(__file__).name in finding.location


def test_a_choice_that_left_pytorch():
    """The `argmax` is the cause, and not the `item()` behind it."""
    model = nn.ModuleDict({"router": nn.Linear(3, 2), "experts": nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])})

    def forward(x):
        best = model["router"](x).sum(0).argmax()  # <- chosen
        return sum(expert(x).sum() for number, expert in enumerate(model["experts"]) if number != best.item() + 2)

    with GradientTracer() as tracer:
        loss = forward(X)
    findings = diagnose(loss, model, tracer=tracer).findings
    assert [finding.parameter for finding in findings] == ["router.weight", "router.bias"]
    for finding in findings:
        assert finding.code == "disconnected"
        assert "item() took results of argmax out of PyTorch" in finding.cause
        assert at(finding, "chosen")


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle, self.logged = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        self.idle.weight.requires_grad, self.idle.weight.shape, self.idle.weight.device  # noqa: B018
        torch.zeros_like(self.idle.weight)
        self.last = self.logged(x).detach() + self.logged(x)
        return self.used(x).sum()


def test_unused_and_disconnected():
    model = Idle()
    loss, tracer = trace(model, X)
    diagnosis = diagnose(loss, model, sgd(model), tracer)
    assert found(diagnosis) == {
        ("unused", "idle.weight"),
        ("unused", "idle.bias"),
        ("disconnected", "logged.weight"),
        ("disconnected", "logged.bias"),
    }
    untraced = diagnose(loss, model)
    assert {finding.code for finding in untraced.findings} == {"disconnected"}
    assert all("GradientTracer" in finding.remedy for finding in untraced.findings)


class Logged(nn.Module):
    """A layer whose loss is only logged, and a layer that is never called, of which only the norm is logged."""

    def __init__(self):
        super().__init__()
        self.used, self.logged, self.idle = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        loss = self.used(x).pow(2).mean()
        assert self.logged(x).pow(2).mean().item() >= 0
        assert sum(p.norm() for p in self.idle.parameters()).item() >= 0
        return loss * 0.5


def test_logged_values_are_not_detached():
    model = Logged()
    loss, tracer = trace(model, X)
    expected = {("disconnected", f"logged.{name}") for name in ("weight", "bias")}
    expected |= {("unused", f"idle.{name}") for name in ("weight", "bias")}
    assert found(diagnose(loss, model, sgd(model), tracer)) == expected


def by_torch_tensor(losses):
    return torch.tensor(losses[0].item())


def by_number_sum(losses):
    total = 0.0
    for loss in losses:
        total += loss.item()
    return torch.zeros(()) + total


def by_numpy_mean(losses):
    return torch.as_tensor(np.mean([loss.item() for loss in losses]))


def by_factor(losses):
    return torch.ones(1).sum() * losses[0].item()


@pytest.mark.parametrize("made", [by_torch_tensor, by_number_sum, by_numpy_mean, by_factor])
def test_a_loss_made_of_numbers_is_detached(made):
    model = nn.Linear(3, 1)
    with GradientTracer() as tracer:
        loss = made([model(X).pow(2).mean(), model(X).abs().mean()])
    diagnosis = diagnose(loss, model, tracer=tracer)
    assert found(diagnosis) == {("detached", "weight"), ("detached", "bias")}
    assert all("item" in finding.cause for finding in diagnosis.findings)


# ---- A loss that is cut off altogether ------------------------------------------------------------------------------


def test_requires_grad_on_the_loss_is_recognised():
    model = nn.Linear(3, 1)
    with GradientTracer() as tracer:
        loss = model(X).detach().sum()  # <- cut loss
        loss.requires_grad_()
    traced, untraced = diagnose(loss, model, tracer=tracer), diagnose(loss, model)
    assert found(traced) == {("detached", "weight"), ("detached", "bias")}
    assert all(at(finding, "cut loss") for finding in traced.findings)
    assert found(untraced) == {("disconnected", "weight"), ("disconnected", "bias")}
    for finding in (*traced.findings, *untraced.findings):
        assert "requires_grad_()" in finding.cause
    assert len({finding.cause for finding in untraced.findings}) == 1


def test_a_loss_without_a_graph():
    model = nn.Linear(3, 1)
    with torch.no_grad():
        loss = model(X).sum()
    diagnosis = diagnose(loss, model)
    assert found(diagnosis) == {("disconnected", "weight"), ("disconnected", "bias")}
    assert all("no graph" in finding.cause for finding in diagnosis.findings)
    with GradientTracer() as tracer:
        hits = (model(X) > 0).sum()
    assert found(diagnose(hits, model, tracer=tracer)) == {("integer_dtype", "weight"), ("integer_dtype", "bias")}
    diagnosis = diagnose(hits, model)
    assert found(diagnosis) == {("integer_dtype", "weight"), ("integer_dtype", "bias")}
    assert all("the loss is of dtype torch.int64" in finding.cause for finding in diagnosis.findings)


def test_a_parameter_may_be_the_loss():
    model = nn.ParameterDict({"loss": torch.tensor(2.0)})
    assert diagnose(model["loss"], model, sgd(model)).findings == []


# ---- Several faults at once -----------------------------------------------------------------------------------------


class Agent(nn.Module):
    """A MuZero-like agent with five faults."""

    def __init__(self):
        super().__init__()
        self.representation = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.dynamics = nn.Sequential(nn.Linear(18, 16), nn.Tanh())
        self.reward = nn.Linear(16, 21)
        self.value = nn.Linear(16, 21)
        self.policy = nn.Linear(16, 2)
        self.projector = nn.Linear(16, 16)
        self.temperature = torch.ones(1, requires_grad=True) * 0.5
        nn.init.constant_(self.policy.bias, 1.0)

    def forward(self, observation, actions):
        def outputs(hidden):
            return {
                "value": self.value(hidden),
                "reward": self.reward(hidden.detach()),
                "policy": torch.round(self.policy(hidden)) / self.temperature,
            }

        def recurrent(hidden, action):
            with torch.no_grad():
                hidden = self.dynamics(torch.cat([hidden, F.one_hot(action, 2)], -1))  # <- dynamics
            return outputs(hidden), hidden

        def initial(observation):
            hidden = self.representation(observation)
            return outputs(hidden), hidden

        return gs.unroll(initial, recurrent, observation, actions)


def agent_loss(agent):
    support = gs.Support(-10, 10, 21)
    loss_fn = gs.MultiStepLoss(value=gs.TwoHot(support), reward=gs.TwoHot(support), policy=gs.SoftCrossEntropy())
    predictions = agent(torch.randn(4, 8), torch.randint(2, (4, 3)))
    targets = {
        "value": torch.randn(4, 4),
        "reward": torch.randn(4, 4),
        "policy": torch.tensor([0.9, 0.1]).expand(4, 4, 2),
    }
    return loss_fn(predictions, targets).loss


def test_several_faults():
    agent = Agent()
    optimizer = torch.optim.Adam([*agent.representation.parameters(), *agent.dynamics.parameters()])
    with GradientTracer() as tracer:
        loss = agent_loss(agent)
    diagnosis = diagnose(loss, agent, optimizer, tracer)
    assert found(diagnosis) == {
        ("no_grad", "dynamics.0.weight"),
        ("no_grad", "dynamics.0.bias"),
        ("not_in_optimizer", "value.weight"),
        ("not_in_optimizer", "value.bias"),
        ("not_in_optimizer", "reward.weight"),
        ("not_in_optimizer", "reward.bias"),
        ("zero_derivative", "policy.weight"),
        ("zero_derivative", "policy.bias"),
        ("unused", "projector.weight"),
        ("unused", "projector.bias"),
        ("non_leaf", "temperature"),
        ("detached", "loss"),
    }
    faults = {("no_grad", f"dynamics.0.{name}") for name in ("weight", "bias")} | {("non_leaf", "temperature")}
    assert {(f.code, f.parameter) for f in diagnosis.findings if not f.is_note} == faults
    assert [f.is_note for f in diagnosis.findings] == [False] * 3 + [True] * 9
    assert all(at(f, "dynamics") for f in diagnosis.findings if f.code == "no_grad")


# ---- Healthy models -------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 8, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(16, 1)

    def forward(self):
        return self.head(self.rnn(torch.randn(3, 6, 4))[0]).pow(2).mean()


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(11, 16)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 11)

    def forward(self):
        tokens = torch.randint(11, (3, 7))
        mask = nn.Transformer.generate_square_subsequent_mask(7)
        logits = self.head(self.encoder(self.embedding(tokens), mask=mask))
        accuracy = (logits.argmax(-1) == tokens).float().mean().item()
        assert 0 <= accuracy <= 1
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class LowRank(nn.Module):
    """A frozen layer with an adapter, and three branches. One factor of each is zero at first."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(6, 2))
        self.branch, self.gain = nn.Linear(6, 6), nn.Parameter(torch.zeros(1))
        self.norm = nn.BatchNorm1d(6)
        nn.init.zeros_(self.norm.weight)
        self.normed, self.conv, self.zero_conv = nn.Linear(6, 6), nn.Conv1d(1, 2, 3), nn.Conv1d(2, 1, 1)
        nn.init.zeros_(self.zero_conv.weight)
        nn.init.zeros_(self.zero_conv.bias)

    def forward(self):
        x = torch.randn(4, 6)
        h = self.base(x) + 2.0 * (x @ self.a.T @ self.b.T)
        h = h + self.gain * self.branch(h)
        h = h + self.norm(self.normed(h))
        return (h.sum() + self.zero_conv(self.conv(h.unsqueeze(1))).sum() - 1) ** 2


class Gated(nn.Module):
    """Branches behind computed gates that are zero at first, as in adaLN-Zero."""

    def __init__(self):
        super().__init__()
        self.first, self.branch, self.gate, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(4, 8))
        for layer in (self.gate, self.modulation[1]):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self):
        x = torch.randn(3, 4)
        h = self.first(x)
        h = h + self.branch(h) * self.gate(h).tanh()
        scale, gate = self.modulation(x).chunk(2, -1)
        return self.last(h + gate * (h * (1 + scale))).pow(2).mean()


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh()) for _ in range(2)
        )
        self.use_reentrant = use_reentrant

    def forward(self):
        h = self.stem(torch.randn(16, 4))
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=self.use_reentrant)
        return self.head(h).pow(2).mean()


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.bag = nn.Embedding(100, 4, sparse=True), nn.EmbeddingBag(100, 4, sparse=True)

    def forward(self):
        tokens = torch.randint(100, (3, 7))
        return (self.embedding(tokens).mean(1) - self.bag(tokens)).pow(2).sum()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, dtype=torch.complex64), nn.Linear(8, 2, dtype=torch.complex64)

    def forward(self):
        return torch.view_as_real(self.second(self.first(torch.randn(3, 4, dtype=torch.complex64)))).pow(2).mean()


class Attention(nn.Module):
    """Keys with their own bias, and a bias added to the scores: softmax is invariant to both."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self):
        x = torch.randn(2, 5, 8)
        scores = self.query(x) @ self.key(x).mT + self.shift
        return (scores.softmax(-1) @ self.value(x)).pow(2).sum()


class HalfPrecision(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self):
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(F.relu(self.body(torch.randn(8, 4)))).float().pow(2).mean()


HEALTHY = [
    Recurrent,
    Transformer,
    LowRank,
    Gated,
    lambda: Checkpointed(True),
    lambda: Checkpointed(False),
    Sparse,
    Complex,
    Attention,
    HalfPrecision,
]


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make().__class__.__name__)
def test_a_healthy_model_has_no_findings(make):
    model = make()
    loss, tracer = trace(model)
    for diagnosis in (diagnose(loss, model, sgd(model)), diagnose(loss, model, sgd(model), tracer)):
        assert diagnosis.findings == []
        assert diagnosis.ok
        assert f"all {len(list(model.parameters()))} parameters" in str(diagnosis)


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x + self.bias


@pytest.mark.parametrize("make", [Added, lambda: nn.Conv1d(2, 2, 1)])
def test_a_bias_whose_gradient_sums_to_zero_has_no_finding(make):
    layer = make()
    h = layer(torch.randn(2, 2, 3))
    loss = h[0].sum() - h[1].sum()
    (gradient,) = torch.autograd.grad(loss, layer.bias, retain_graph=True)
    assert not gradient.any()
    assert diagnose(loss, layer, sgd(layer)).findings == []


def test_a_bias_whose_gradient_is_rounding_errors_has_no_finding():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 1)).double()
    loss = model(torch.randn(4, 3, 6, 6, dtype=torch.float64)).pow(2).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert gradients[1].abs().max() < 1e-12 * max(gradient.abs().max() for gradient in gradients)
    assert diagnose(loss, model, sgd(model)).findings == []
    loss.backward()
    assert diagnose(loss, model, sgd(model)).findings == []


class Experts(nn.Module):
    def __init__(self, skip):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)) for _ in range(3))
        self.gate, self.skip = nn.Linear(3, 3), skip

    def forward(self):
        x = torch.randn(8, 3)
        weights = self.gate(x).softmax(-1)
        choice = torch.arange(8) % 2  # The third expert gets nothing.
        out = torch.zeros(8, 3)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)
            if self.skip and not len(rows):
                continue
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return out.pow(2).mean()


@pytest.mark.parametrize("skip", [False, True])
def test_an_expert_without_tokens_is_unused(skip):
    model = Experts(skip)
    loss, tracer = trace(model)
    names = {f"experts.2.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    assert found(diagnose(loss, model, sgd(model), tracer)) == {("unused", name) for name in names}
    assert found(diagnose(loss, model, sgd(model))) == {("disconnected" if skip else "unused", name) for name in names}


# ---- No side effects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_CUDA])])
def test_a_diagnosis_changes_nothing(use_reentrant, device):
    model = Checkpointed(use_reentrant).to(device)
    clip = gs.ClipGradientNorm(1e-3).to(device)
    model.add_module("clip", clip)
    model.register_buffer("never", torch.tensor([float("nan")], device=device))
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    model.blocks[1].eval()
    calls = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: calls.append("head"))
    model.blocks[0][0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("block"))

    def forward():
        h = model.stem(torch.randn(16, 4, device=device))
        h.register_hook(lambda g: g * (1 + torch.rand_like(g)))
        for block in model.blocks:
            h = clip(h + checkpoint(block, h, use_reentrant=use_reentrant))
        return model.head(h).pow(2).mean()

    def state():
        random_numbers = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if device == "cuda" else [])]
        values = [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
        modes = [module.training for module in model.modules()] + [torch.is_grad_enabled(), random.getstate()]
        hooks = [dict(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]
        return random_numbers + values, [p.grad for p in model.parameters()], modes, hooks

    loss = forward()
    tensors, gradients, modes, hooks = state()
    diagnosis = diagnose_gradients(loss, model)
    tensors_after, gradients_after, modes_after, hooks_after = state()
    assert diagnosis.findings == []
    for before, after in zip(tensors, tensors_after, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert all(before is after for before, after in zip(gradients, gradients_after, strict=True))
    assert torch.equal(model.stem.weight.grad, torch.ones_like(model.stem.weight))
    assert (modes, hooks, calls) == (modes_after, hooks_after, [])

    loss.backward()
    assert sorted(calls) == ["block", "head"]
    assert model.blocks[0][0].weight.grad.norm() > 0


def test_nodes_keep_no_hooks(monkeypatch):
    model = Between(torch.round)
    loss = model(X)
    diagnose_gradients(loss, model)
    looked_at = []
    monkeypatch.setattr(graph, "amount", looked_at.append)
    loss.backward()
    assert looked_at == []


def test_under_no_grad_and_within_the_tracer():
    model = Between(detach)
    with GradientTracer() as tracer:
        loss = model(X)
        with torch.no_grad():
            calls = tracer.calls
            diagnosis = diagnose_gradients(loss, model, tracer=tracer)
            assert tracer.calls == calls
            assert not torch.is_grad_enabled()
    assert found(diagnosis) == {("detached", name) for name in FIRST}


def test_a_graph_that_has_been_freed():
    model = Between(lambda h: torch.relu(h - 100) + 1)
    healthy = Between(torch.tanh)
    for checked in (model, healthy):
        loss = checked(X)
        loss.backward()
        diagnosis = diagnose(loss, checked, sgd(checked))
        assert found(diagnosis) == ({("all_zero", name) for name in FIRST} if checked is model else set())
        checked.zero_grad()
        with pytest.raises(ValueError, match=r"backward\(\) has freed the graph and .grad is None"):
            diagnose_gradients(loss, checked)


@pytest.mark.any_version
def test_a_graph_of_20_000_nodes():
    model = Between(torch.tanh)
    loss = model(X)
    for _ in range(20_000):
        loss = loss + 1
    assert diagnose(loss, model, sgd(model)).findings == []


def free_deep_graphs(rank):
    model = torch.nn.ParameterList([torch.ones(1)])
    for first in ("loss", "hidden"):
        tensors = {"hidden": model[0] * 1}
        for _ in range(20_000):
            tensors["hidden"] = tensors["hidden"] * 1.0
        tensors["loss"] = tensors["hidden"].sum()
        assert gs.diagnose_gradients(tensors["loss"], model).ok
        tensors["loss"].backward()
        del tensors[first]
        tensors.clear()


@one_server
def test_a_deep_graph_is_freed_whichever_tensor_dies_first():
    """Run in a separate process, because a recursion in C++ would overflow the stack and end the process."""
    start_processes(1, free_deep_graphs)


def test_a_gradient_of_another_loss_does_not_hide_a_cut():
    model = Between(detach)
    (model.first(X).sum() + model(X)).backward()
    loss = model(X)
    loss.backward()
    assert found(diagnose(loss, model)) == {("disconnected", name) for name in FIRST}


def test_a_zero_gradient_of_a_freed_graph_is_a_note():
    model = LowRank()
    loss = model()
    loss.backward()
    diagnosis = diagnose(loss, model, sgd(model))
    assert ("all_zero", "a") in found(diagnosis)
    assert diagnosis.ok
    assert all("freed" in finding.cause for finding in diagnosis.findings)


def test_a_partly_freed_graph():
    trunk, heads = nn.Linear(3, 2), nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    hidden = trunk(X).tanh()
    heads[0](hidden).sum().backward()
    with pytest.raises(ValueError, match="has freed the graph"):
        diagnose_gradients(heads[1](hidden).sum(), nn.ModuleList([trunk, heads[1]]))


def test_a_loss_that_cannot_be_differentiated():
    model = Between(lambda h: torch.floor_divide(h, 2))
    with pytest.raises(RuntimeError, match=r"diagnose_gradients: the loss cannot be differentiated: .*floor_divide"):
        diagnose_gradients(model(X), model)


def test_anomaly_mode():
    model = Between(lambda h: (h - h).sqrt() + 1)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        assert ("nonfinite", "first.weight") in found(diagnose(model(X), model))
        assert torch.is_anomaly_enabled()


def test_a_tracer_of_another_forward_pass():
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    _, tracer = trace(lambda x: other(x).sum(), X)
    with pytest.raises(ValueError, match="tracer must have watched the forward pass of this loss"):
        diagnose_gradients(model(X).sum(), model, tracer=tracer)
    with tracer:
        prediction = model(X)
    assert diagnose(prediction.sum(), model, tracer=tracer).findings == []


# ---- Arguments, and the report --------------------------------------------------------------------------------------


SGD = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss": 1.0}, TypeError, "loss must be a tensor, but it is of type float"),
        ({"loss": torch.ones(2)}, ValueError, r"loss must be a scalar, but it has shape \(2,\)"),
        ({"loss": torch.ones((), dtype=torch.complex64)}, ValueError, "loss must be real, .*complex64"),
        ({"model": [1]}, TypeError, "model must be a torch.nn.Module, but it is of type list"),
        ({"optimizer": "Adam"}, TypeError, "optimizer must be a torch.optim.Optimizer or None, .*type str"),
        ({"optimizer": [SGD, "Adam"]}, TypeError, r"optimizer\[1\] must be a torch.optim.Optimizer, .*type str"),
        ({"optimizer": nn.Linear(1, 1).parameters()}, TypeError, r"optimizer\[0\] must be .*type Parameter"),
        ({"optimizer": torch.ones(1)}, TypeError, "optimizer must be .*type Tensor"),
        ({"optimizer": []}, ValueError, "optimizer must be one or several, .* empty sequence; give None"),
        ({"tracer": 3}, TypeError, "tracer must be a GradientTracer or None, .*type int"),
        ({"tracer": GradientTracer()}, ValueError, "tracer must have watched the forward pass"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    model = nn.Linear(3, 1)
    arguments = {"loss": model(X).sum(), "model": model, **arguments}
    with pytest.raises(error, match=f"diagnose_gradients: {message}"):
        diagnose_gradients(**arguments)


def test_the_report():
    model = Between(detach)
    loss, tracer = trace(model, X)
    diagnosis = diagnose_gradients(loss, model, tracer=tracer)
    told = json.loads(json.dumps(diagnosis.to_dict()))
    assert (told["ok"], told["num_parameters"]) == (False, 4)
    assert {(f["code"], f["parameter"], f["location"]) for f in told["findings"]} == {
        ("detached", name, diagnosis.findings[0].location) for name in FIRST
    }
    text = str(diagnosis)
    assert text.startswith("Findings on 2 tensors; the model has 4 parameters.")
    assert text.count(diagnosis.findings[0].location) == 1  # The findings share a row.
    assert diagnosis.findings[0].remedy.split(";")[0] in text


def test_the_report_shows_the_beginning_of_a_long_line():
    """The line is cut even where it has no spaces."""
    model = nn.Linear(3, 1)
    with GradientTracer() as tracer:
        loss = torch.tensor(model(torch.ones(2, 3)).tolist()).square().mean().square().mean().requires_grad_()
    text = str(diagnose_gradients(loss, model, tracer=tracer))
    assert re.search(r"loss = torch.tensor\(model\(torch.ones\(2, 3\)\).tolist\(\)\)\S*\.\.\.$", text, re.MULTILINE)


def test_the_report_of_many_parameters_is_short():
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(50))
    diagnosis = diagnose_gradients(model[0](torch.ones(1, 2)).sum(), model)
    assert len(diagnosis.findings) == 98
    assert len(str(diagnosis).splitlines()) < 20
    assert "and 91 more" in str(diagnosis)


def test_the_report_in_rich():
    console = pytest.importorskip("rich.console").Console(width=200, record=True, file=io.StringIO())
    model = Between(detach)
    loss, tracer = trace(model, X)
    diagnosis = diagnose_gradients(loss, model, tracer=tracer)
    console.print(diagnosis)
    text = console.export_text()
    assert "first.weight" in text
    assert diagnosis.findings[0].location.rpartition("/")[2] in text


# ---- The page -------------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "gradients.md"


def test_the_page_has_a_section_for_each_code():
    from gradscale_ext.diagnosis.report import Code

    headings = set(re.findall(r"^## `(\w+)`", PAGE.read_text(), re.MULTILINE))
    assert headings == set(Code.__args__)
