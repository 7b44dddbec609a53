"""Diagnoses of small models of many kinds: healthy ones produce only notes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradscale_ext as gs


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def mlp(*sizes, activation=nn.Tanh):
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


def parts(**modules):
    return nn.ModuleDict(modules)


def sgd(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], 0.1)


def diagnose(step, model, optimizer=None, traced=True):
    tracer = gs.GradientTracer() if traced else None
    if tracer is None:
        loss = step(model)
    else:
        with tracer:
            loss = step(model)
    diagnosis = gs.diagnose_gradients(loss, model, optimizer, tracer=tracer)
    assert str(diagnosis)
    loss.backward()  # diagnose_gradients() has not freed the graph
    return diagnosis


def notes(diagnosis):
    """Codes and parameters of the findings, which must all be notes."""
    assert diagnosis.ok, str(diagnosis)
    return {(f.code, f.parameter) for f in diagnosis.findings}


def line(finding):
    assert finding.location.rpartition(":")[0].endswith(Path(__file__).name)
    return finding.source


_numbers = torch.Generator().manual_seed(0)
X, Y = torch.randn(2, 16, 6, generator=_numbers)
IMAGES = torch.randn(2, 6, 5, 5, generator=_numbers)
ACTIONS = torch.randint(3, (16,), generator=_numbers)

# ---- Healthy models without findings --------------------------------------------------------------------------------


def vae(m):
    mean, log_variance = m["encoder"](X).chunk(2, -1)
    z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1)
    return (F.mse_loss(m["decoder"](z), X, reduction="none").sum(-1) + divergence).mean()


def muzero(m, between=lambda hidden: hidden):
    def outputs(hidden):
        return {"value": m["value"](hidden), "reward": m["reward"](hidden), "policy": m["policy"](hidden)}

    def initial(observation):
        hidden = m["representation"](observation)
        return outputs(hidden), hidden

    def recurrent(hidden, action):
        inputs = torch.cat([between(hidden), F.one_hot(action, 3)], -1)  # cut
        hidden = m["dynamics"](inputs).tanh()
        return outputs(hidden), hidden

    predictions = gs.unroll(initial, recurrent, X, torch.randint(3, (16, 4)))
    support = gs.Support(-5, 5, 11)
    heads = {"value": gs.TwoHot(support, weight=0.25), "reward": gs.TwoHot(support), "policy": gs.SoftCrossEntropy()}
    targets = {"value": torch.randn(16, 5), "reward": torch.randn(16, 5), "policy": torch.rand(16, 5, 3).softmax(-1)}
    return gs.MultiStepLoss(**heads)(predictions, targets, step_gradient_scale="unroll").loss


def muzero_model():
    heads = {"value": nn.Linear(8, 11), "reward": nn.Linear(8, 11), "policy": nn.Linear(8, 3)}
    return parts(representation=mlp(6, 8, 8), dynamics=mlp(11, 8, 8), **heads)


def straight_through(m):
    h = m["first"](X)
    h = h + (h.round() - h).detach()
    h = h / h.pow(2).add(1e-3).mean(-1, keepdim=True).detach()
    h = h * 0.5 + h.detach() * 0.5
    h = h * torch.exp(h - h.detach())
    weight = m["last"].weight
    scale = weight.detach().abs().max() / 7
    weight = weight + ((weight / scale).round() * scale - weight).detach()
    return F.linear(h, weight, m["last"].bias).pow(2).mean()


def gumbel(m):
    choice = F.gumbel_softmax(m["first"](X), hard=True)
    return (m["last"](choice) - Y).pow(2).mean()


def dropped(m):
    h = m["first"](X)
    h = h * (torch.rand_like(h) > 0.5).float() * torch.bernoulli(torch.full_like(h, 0.9))
    assert 0 <= (h.argmax(-1) == 1).float().mean().item() <= 1
    return F.cross_entropy(m["last"](h), ACTIONS)


def mixture(m):
    weight, index = m["gate"](X).softmax(-1).topk(2)
    out = torch.zeros_like(X)
    for number, expert in enumerate(m["experts"]):
        rows, slot = (index == number).nonzero(as_tuple=True)
        out = out.index_add(0, rows, expert(X[rows]) * weight[rows, slot, None])
    load = F.one_hot(index[:, 0], 4).float().mean(0)
    return (out - Y).pow(2).mean() + (load * m["gate"](X).softmax(-1).mean(0)).sum()


def reinforce(m):
    policy = torch.distributions.Categorical(logits=m["first"](X))
    actions = policy.sample()
    gaussian = torch.distributions.Normal(m["last"](m["first"](X)), 1.0)
    moves = gaussian.sample()
    returns = torch.randn(16)
    log_prob = policy.log_prob(actions) + gaussian.log_prob(moves).sum(-1)
    return -(log_prob * (returns - returns.mean())).mean() - 0.01 * policy.entropy().mean()


def one_after_the_other(m):
    return F.softplus(-m["last"](m["first"](X).relu())).mean()


class RunningNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        h = self.layer(x)
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.last(torch.tanh(h - self.mean)).pow(2).mean()


def contrastive(m):
    a, b = F.normalize(m["first"](X), dim=-1), F.normalize(m["last"](m["first"](Y)), dim=-1)
    with torch.no_grad():
        accuracy = ((a @ b.T).argmax(-1) == torch.arange(16)).float().mean()
    assert accuracy >= 0
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(16))


def matched(m):
    queries = m["last"](m["first"](X))
    with torch.no_grad():
        cost = torch.cdist(queries, Y)
        index = cost.argmin(-1)
    return (queries - Y[index]).pow(2).mean()


def double_dqn(m):
    with torch.no_grad():
        choice = m["last"](m["first"](Y)).argmax(-1, keepdim=True)
        target = torch.randn(16, 6).gather(1, choice)
    return F.smooth_l1_loss(m["last"](m["first"](X)).gather(1, ACTIONS[:, None]), target)


class MovingCodes(nn.Module):
    """Vector quantisation whose codes follow the data."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("codes", torch.randn(4, 6))

    def forward(self, x):
        z = self.encoder(x)
        index = torch.cdist(z, self.codes).argmin(-1)
        with torch.no_grad():
            self.codes.lerp_(z[:4], 0.1)
        q = z + (self.codes[index] - z).detach()
        return (self.decoder(q) - x).pow(2).mean()


def two_layers():
    return parts(first=nn.Linear(6, 6), last=nn.Linear(6, 6))


normalised = nn.utils.parametrizations.spectral_norm

QUIET = {
    "vae": (vae, lambda: parts(encoder=mlp(6, 8, 8), decoder=mlp(4, 8, 6))),
    "muzero": (muzero, muzero_model),
    "straight_through": (straight_through, two_layers),
    "gumbel": (gumbel, two_layers),
    "dropped": (dropped, two_layers),
    "mixture": (mixture, lambda: parts(gate=nn.Linear(6, 4), experts=nn.ModuleList(mlp(6, 6) for _ in range(4)))),
    "reinforce": (reinforce, two_layers),
    "spectral_norm": (one_after_the_other, lambda: parts(first=normalised(nn.Linear(6, 6)), last=nn.Linear(6, 1))),
    "running_norm": (lambda m: m["model"](X), lambda: parts(model=RunningNorm())),
    "moving_codes": (lambda m: m["model"](X), lambda: parts(model=MovingCodes())),
    "contrastive": (contrastive, two_layers),
    "matched": (matched, two_layers),
    "double_dqn": (double_dqn, two_layers),
}


@pytest.mark.parametrize("name", QUIET)
def test_a_healthy_model_has_no_findings_and_no_notes(name):
    step, make = QUIET[name]
    model = make()
    for traced in (True, False):
        assert diagnose(step, model, sgd(model), traced).findings == []


# ---- Healthy models with notes --------------------------------------------------------------------------------------


def test_a_cut_between_the_steps_of_an_unroll_is_a_note():
    model = muzero_model()
    diagnosis = diagnose(lambda m: muzero(m, between=torch.Tensor.detach), model, sgd(model))
    assert notes(diagnosis) == {("detached", "loss")}
    (finding,) = diagnosis.findings
    assert line(finding).endswith("# cut")
    assert "representation.0.weight" in finding.cause
    assert finding.location in str(diagnosis)
    assert "truncated" in finding.remedy


def truncated(m):
    hidden, loss = torch.zeros(16, 6), 0.0
    for _ in range(4):
        hidden = m["cell"](X, hidden.detach())
        loss = loss + m["last"](hidden).pow(2).mean()
    return loss


def with_one_matrix(m):
    hidden, loss = X, 0.0
    for _ in range(4):
        hidden = torch.tanh(m["cell"](hidden.detach()))
        loss = loss + hidden.pow(2).mean()
    return loss


def every_other_step_without_gradients(m):
    hidden, loss = X, 0.0
    for step in range(4):
        with torch.set_grad_enabled(step % 2 == 0):
            hidden = torch.tanh(m["cell"](hidden))
            hidden = torch.tanh(m["cell"](hidden))
        loss = loss + m["last"](hidden).pow(2).mean()
    return loss


def memory(m):
    segments, remembered, loss = torch.randn(3, 4, 5, 6), None, 0.0
    for x in segments:
        h = m["first"](x)
        context = h if remembered is None else torch.cat([remembered, h], 1)
        remembered = h.detach()
        loss = loss + m["attention"](h, context, context)[0].pow(2).mean()
    return loss


def similarity(p, z):
    return -F.cosine_similarity(p, z.detach(), dim=-1).mean()


def siamese(m):
    z = [m["encoder"](x) for x in (X, Y)]
    p = [m["predictor"](x) for x in z]
    return similarity(p[0], z[1]) + similarity(p[1], z[0])


def advantages(m):
    h = m["body"](X)
    value, logits = m["value"](h).squeeze(-1), m["policy"](h)
    returns = torch.randn(16)
    advantage = (returns - value).detach()
    advantage = (advantage - advantage.mean()) / advantage.std()
    return -(F.log_softmax(logits, -1)[:, 0] * advantage).mean() + (value - returns).pow(2).mean()


def proximal(m):
    def act(x):
        h = m["body"](x)
        return m["policy"](h).log_softmax(-1).gather(1, ACTIONS[:, None]).squeeze(-1), m["value"](h).squeeze(-1)

    with torch.no_grad():
        old, baseline = act(X)
        gain = torch.randn(16) - baseline
    log_prob, value = act(X)
    ratio = torch.exp(log_prob - old)
    surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return (value - gain).pow(2).mean() - surrogate.mean()


def semi_gradient(m):
    with torch.no_grad():
        target = 0.9 * m["value"](m["body"](Y)) + 1
    prediction = m["value"](m["body"](X))
    m["policy"](m["body"](X)).sum().backward()
    return (prediction - target).pow(2).mean() + m["policy"](m["body"](X)).pow(2).mean()


def codebook(m):
    z = m["encoder"](X)
    q = m["codes"](torch.cdist(z, m["codes"].weight).argmin(-1))
    loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
    return loss + F.mse_loss(m["decoder"](z + (q - z).detach()), X)


def imagined(m):
    features = m["model"](X)
    return m["actor"](features.detach()).pow(2).mean() + features.pow(2).mean()


def tied_but_cut(m):
    return F.cross_entropy(F.linear(m["body"](m["codes"](ACTIONS)), m["codes"].weight.detach()), ACTIONS)


def later_terms_cut(m):
    hidden, loss = X, torch.zeros(())
    for step in range(3):
        hidden = torch.tanh(m["cell"](hidden))
        term = m["last"](hidden).pow(2).mean()
        loss = loss + (term if step == 0 else term.detach())
    return loss


def actor_critic_model():
    return parts(body=mlp(6, 8), value=nn.Linear(8, 1), policy=nn.Linear(8, 3))


def recurrent(cell):
    return parts(cell=cell, last=nn.Linear(6, 1))


NOTED = {
    "gru": (truncated, lambda: recurrent(nn.GRUCell(6, 6)), ["hidden = m["]),
    "one_matrix": (with_one_matrix, lambda: parts(cell=nn.Linear(6, 6, bias=False)), ["hidden = torch.tanh"]),
    "no_grad": (every_other_step_without_gradients, lambda: recurrent(nn.Linear(6, 6)), ["with torch.set_grad"]),
    "memory": (
        memory,
        lambda: parts(first=nn.Linear(6, 6), attention=nn.MultiheadAttention(6, 2, batch_first=True)),
        ["remembered = h.detach()"],
    ),
    "siamese": (siamese, lambda: parts(encoder=mlp(6, 6, 6), predictor=mlp(6, 4, 6)), ["return -F.cosine"]),
    "advantages": (advantages, actor_critic_model, ["advantage = (returns - value).detach()"]),
    "proximal": (proximal, actor_critic_model, ["with torch.no_grad"]),
    "semi_gradient": (semi_gradient, actor_critic_model, ["with torch.no_grad"]),
    "codebook": (
        codebook,
        lambda: parts(encoder=nn.Linear(6, 6), codes=nn.Embedding(4, 6), decoder=nn.Linear(6, 6)),
        ["loss = F.mse_loss"],
    ),
    "imagined": (imagined, lambda: parts(model=nn.Linear(6, 8), actor=nn.Linear(8, 1)), ["return m["]),
    "tied_but_cut": (tied_but_cut, lambda: parts(codes=nn.Embedding(3, 6), body=nn.Linear(6, 6)), ["return F.cross"]),
    "later_terms_cut": (later_terms_cut, lambda: recurrent(nn.Linear(6, 6)), ["loss = loss + (term"]),
}


@pytest.mark.parametrize("name", NOTED)
def test_a_cut_on_one_of_several_paths_is_one_note(name):
    step, make, lines = NOTED[name]
    model = make()
    diagnosis = diagnose(step, model, sgd(model))
    assert notes(diagnosis) == {("no_grad" if "with" in lines[0] else "detached", "loss")}
    assert [line(finding)[: len(start)] for finding, start in zip(diagnosis.findings, lines, strict=True)] == lines
    assert diagnose(step, model, sgd(model), traced=False).findings == []


def log_everything(module, inputs, output):
    """A forward hook that turns outputs and parameters into arrays, lists and numbers."""
    outputs = output if isinstance(output, tuple) else (output,)
    for tensor in (*(out for out in outputs if out is not None), *module.parameters(recurse=False)):
        tensor.detach().numpy().copy()
        tensor.tolist()
        tensor.mean().item()


@pytest.mark.parametrize("name", [*QUIET, *NOTED])
def test_values_that_are_only_logged_change_no_diagnosis(name):
    step, make = (QUIET | NOTED)[name][:2]
    diagnoses = []
    for is_logged in (False, True):
        torch.manual_seed(0)
        model = make()
        for module in model.modules() if is_logged else ():
            module.register_forward_hook(log_everything)
        diagnoses.append(diagnose(step, model, sgd(model)).findings)
    assert diagnoses[0] == diagnoses[1]


def test_uninitialised_lazy_modules_are_unused():
    model = recurrent(nn.GRUCell(6, 6))
    model["lazy"] = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d())
    tracer = gs.GradientTracer()
    with tracer:
        loss = truncated(model)
    diagnosis = gs.diagnose_gradients(loss, model, tracer=tracer)
    assert [f.code for f in diagnosis.findings] == ["unused"] * 4 + ["detached"]


def test_cuts_in_a_freed_graph_are_found():
    model = recurrent(nn.GRUCell(6, 6))
    with gs.GradientTracer() as tracer:
        loss = truncated(model)
    loss.backward()
    assert notes(gs.diagnose_gradients(loss, model, sgd(model), tracer=tracer)) == {("detached", "loss")}


# ---- Healthy models, partly left out of the optimizer ---------------------------------------------------------------


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(h)


def q_learning(m):
    with torch.no_grad():
        target = 1 + 0.9 * m["target"](Y).amax(-1)
    return F.smooth_l1_loss(m["online"](X).gather(1, ACTIONS[:, None]).squeeze(-1), target)


def test_a_target_network_is_a_note():
    model = parts(online=Network(), target=Network())
    diagnosis = diagnose(q_learning, model, sgd(model["online"]))
    targets = {f"target.{name}" for name, _ in model["target"].named_parameters()}
    assert notes(diagnosis) == {("no_grad", name) for name in targets}
    assert {line(finding) for finding in diagnosis.findings} == {"with torch.no_grad():"}
    assert len({finding.cause for finding in diagnosis.findings}) == 1  # The findings share a row.
    untraced = diagnose(q_learning, model, sgd(model["online"]), traced=False)
    assert notes(untraced) == {("disconnected", name) for name in targets}
    model["target"].requires_grad_(False)
    assert diagnose(q_learning, model, sgd(model["online"])).findings == []
    model["target"].requires_grad_(True)
    assert not diagnose(q_learning, model, sgd(model)).ok
    assert not diagnose(q_learning, model).ok


def momentum(m):
    with torch.no_grad():
        for slow, fast in zip(m["slow"].parameters(), m["fast"].parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data
        keys = m["slow"](Y)
    return F.mse_loss(m["fast"](X), keys)


def test_an_update_of_momentum_weights_is_not_a_cut():
    model = parts(fast=Network(), slow=Network())
    for _ in range(2):
        diagnosis = diagnose(momentum, model, sgd(model["fast"]))
        assert {(f.code, f.parameter.partition(".")[0]) for f in diagnosis.findings} == {("no_grad", "slow")}
        assert diagnosis.ok
    model["slow"].requires_grad_(False)
    for _ in range(2):
        assert diagnose(momentum, model, sgd(model["fast"])).findings == []


def discriminate(m):
    fake = m["G"](X).detach()
    return F.softplus(m["D"](fake)).mean() + F.softplus(-m["D"](Y)).mean()


def generate(m):
    return F.softplus(-m["D"](m["G"](X))).mean()


def test_a_gan():
    model = parts(G=mlp(6, 8, 6), D=mlp(6, 8, 1))
    generator = {f"G.{name}" for name, _ in model["G"].named_parameters()}
    discriminator = {f"D.{name}" for name, _ in model["D"].named_parameters()}
    diagnosis = diagnose(discriminate, model, sgd(model["D"]))
    assert notes(diagnosis) == {("detached", name) for name in generator}
    assert {line(finding) for finding in diagnosis.findings} == {'fake = m["G"](X).detach()'}
    assert notes(diagnose(generate, model, sgd(model["G"]))) == {("not_in_optimizer", name) for name in discriminator}
    both = [sgd(model["G"]), sgd(model["D"])]
    assert notes(diagnose(lambda m: discriminate(m) + generate(m), model, both)) == {("detached", "loss")}
    # With the wrong optimizer, the generator does not learn.
    wrong = diagnose(discriminate, model, sgd(model["G"]))
    assert {(f.code, f.parameter) for f in wrong.findings if not f.is_note} == {
        ("detached", name) for name in generator
    }


def soft_actor(m):
    action = m["actor"](X).tanh()
    log_alpha = m["temperature"][0]
    values = torch.stack([m[name](torch.cat([X, action], -1)) for name in ("q1", "q2")]).softmax(0)
    return (log_alpha.exp().detach() * action.pow(2).sum(-1, keepdim=True) - values[0]).mean()


def soft_critic(m):
    with torch.no_grad():
        target = m["target"](torch.cat([Y, m["actor"](Y).tanh()], -1)) + m["temperature"][0].exp()
    return sum(F.mse_loss(m[name](torch.cat([X, Y[:, :2]], -1)), target) for name in ("q1", "q2"))


def test_soft_actor_critic():
    temperature = nn.ParameterList([torch.zeros(())])
    critics = {name: mlp(8, 8, 1) for name in ("q1", "q2", "target")}
    model = parts(actor=mlp(6, 8, 2), temperature=temperature, **critics)
    actor = diagnose(soft_actor, model, sgd(model["actor"]))
    assert {(f.code, f.parameter.partition(".")[0]) for f in actor.findings} == {
        ("not_in_optimizer", "q1"),
        ("not_in_optimizer", "q2"),
        ("detached", "temperature"),
        ("unused", "target"),
    }
    critic = diagnose(soft_critic, model, sgd(model["q1"], model["q2"]))
    assert {(f.code, f.parameter.partition(".")[0]) for f in critic.findings} == {
        ("no_grad", "target"),
        ("no_grad", "actor"),
        ("no_grad", "temperature"),
    }
    assert actor.ok
    assert critic.ok


def test_an_actor_and_a_critic_with_an_optimizer_each():
    model = parts(actor=mlp(6, 8, 3), critic=mlp(6, 8, 1))

    def step(m):
        advantage = torch.ones(16) - m["critic"](X).squeeze(-1)
        return advantage.pow(2).mean() - (m["actor"](X).log_softmax(-1)[:, 0] * advantage.detach()).mean()

    def forgotten(m):
        advantage = torch.ones(16) - m["critic"](X).squeeze(-1)
        return -(m["actor"](X).log_softmax(-1)[:, 0] * advantage.detach()).mean()

    optimizers = [sgd(model["actor"]), sgd(model["critic"])]
    assert notes(diagnose(step, model, optimizers)) == {("detached", "loss")}
    assert notes(diagnose(step, model, optimizers[:1])) >= {("not_in_optimizer", "critic.0.weight")}
    broken = diagnose(forgotten, model, optimizers)
    assert {f.code for f in broken.findings} == {"detached"}
    assert {f.parameter for f in broken.findings if not f.is_note} == {
        f"critic.{name}" for name, _ in model["critic"].named_parameters()
    }


# ---- Dead units -----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer whose first `dead` units are far below zero, followed by a function and a head."""

    def __init__(self, layer, function, dead, head=None):
        super().__init__()
        self.layer, self.function, self.head = layer, function, head or nn.Linear(len(layer.weight), 3)
        with torch.no_grad():
            layer.bias[:dead] = -100

    def forward(self, x):
        h = self.layer(x)
        h = self.function(h)  # function
        return self.head(h if h.dim() < 4 else h.mean((2, 3))).pow(2).mean()


@pytest.mark.parametrize(
    ("layer", "function", "x", "traced"),
    [
        (lambda: nn.Linear(6, 64), F.relu, X, True),
        (lambda: nn.Linear(6, 64), F.relu6, X, False),
        (lambda: nn.Linear(6, 64), lambda h: F.relu(h).square(), X, True),
        (lambda: nn.Linear(6, 64), lambda h: F.relu(F.dropout(2 * h)), X, False),
        (lambda: nn.Linear(6, 64), lambda h: h.clamp(min=0), X.view(2, 8, 6), True),
        (lambda: nn.Conv2d(6, 64, 3), lambda h: F.relu(h, inplace=True), IMAGES, False),
        (lambda: nn.Conv2d(6, 64, 3), F.relu, IMAGES.to(memory_format=torch.channels_last), True),
    ],
)
def test_most_units_dead(layer, function, x, traced):
    model = Layer(layer(), function, 62)
    diagnosis = diagnose(lambda m: m(x), model, sgd(model), traced)
    assert notes(diagnosis) == {("all_zero", "layer.weight")}
    assert diagnosis.findings[0].cause.startswith("62 of 64 units dead")
    if traced:
        assert line(diagnosis.findings[0]).endswith("# function") or "lambda" in line(diagnosis.findings[0])
    model.zero_grad()
    alive = Layer(layer(), function, 0)
    assert diagnose(lambda m: m(x), alive, sgd(alive), traced).findings == []


def test_dead_units_with_and_without_a_live_path():
    body = nn.Sequential(
        nn.Conv2d(6, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(288, 1)
    )
    nn.init.constant_(body[1].bias[:30], -100.0)
    diagnosis = diagnose(lambda m: m(torch.randn(4, 6, 5, 5)).mean(), body, sgd(body))
    assert notes(diagnosis) == {("all_zero", "0.weight")}
    assert "30 of 32 units dead" in diagnosis.findings[0].cause

    model = Layer(nn.Linear(6, 32), F.relu, 30)

    def unrolled(m):
        return m(X) + m.head(F.leaky_relu(m.layer(X))).mean()

    assert diagnose(unrolled, model, sgd(model)).findings == []


def sliced(m):
    return m.head(F.relu(m.layer(X)) * (torch.arange(64) < 2)).sum()


def one_sample(m):
    return m(X[:1])


def masked_logits(m):
    return F.cross_entropy(m.layer(X).masked_fill(torch.arange(64) > 3, -torch.inf), torch.randint(4, (16,)))


@pytest.mark.parametrize("step", [sliced, one_sample, masked_logits])
def test_units_without_a_gradient_that_are_not_dead(step):
    model = Layer(nn.Linear(6, 64), F.relu, 0 if step is not one_sample else 62)
    if step is masked_logits:
        model.head = nn.Identity()
    assert diagnose(step, model, sgd(model)).findings == []


def test_unused_rows_and_experts_are_not_dead():
    model = parts(embedding=nn.Embedding(100, 16), experts=nn.ParameterList([torch.randn(32, 16, 16)]))
    tokens = torch.arange(16) % 4

    def step(m):
        h = F.relu(m["embedding"](tokens))
        return F.relu(torch.einsum("bi,bio->bo", h, m["experts"][0][tokens])).sum()

    assert diagnose(step, model, sgd(model)).findings == []


def test_an_initialised_layer_is_not_dead():
    for seed in range(6):
        torch.manual_seed(seed)
        width, batch = int(torch.randint(4, 200, ())), int(torch.randint(1, 30, ()))
        model = mlp(6, width, width, 1, activation=nn.ReLU)
        x = torch.randn(1, 6).expand(batch, 6) if seed % 2 else F.one_hot(torch.randint(6, (batch,)), 6).float()
        findings = diagnose(lambda m, x=x: m(x).mean(), model, sgd(model)).findings
        assert not any(finding.is_note for finding in findings), (width, batch)
