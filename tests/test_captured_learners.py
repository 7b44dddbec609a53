"""Eighteen families of learners: captured steps equal plain ones, without a warning, and have no findings."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import tape
import torch
from tests_of_capture import bits
from torch import nn
from torch.nn import functional as F

import gradscale_ext as gs
from gradscale_ext.capture import graphs

OBSERVATION, ACTIONS, SIZE = 6, 3, 8


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    monkeypatch.setattr(graphs, "graphs_of", lambda device: tape.TapeGraphs())


def network(*sizes):
    layers = [nn.Sequential(nn.Linear(*pair), nn.ELU()) for pair in itertools.pairwise(sizes[:-1])]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))


def adam(*modules):
    return torch.optim.Adam([p for module in modules for p in module.parameters()], lr=1e-2, fused=True)


def minimize(optimizer, loss, *modules):
    optimizer.zero_grad()
    loss.backward()
    for module in modules:
        gs.clip_gradients_(module, 0.5)
    optimizer.step()
    return loss


def follow(target, online, rate=0.05):
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), rate)


def values_of(network, observation, action):
    return network(observation).gather(1, action[:, None])[:, 0]


def dqn(double=False):
    online = network(OBSERVATION, 16, ACTIONS)
    target, optimizer = copy.deepcopy(online), adam(online)

    def step(observation, action, reward, following):
        with torch.no_grad():
            best = (online if double else target)(following).argmax(1)
            wanted = reward + 0.9 * values_of(target, following, best)
        loss = minimize(optimizer, F.smooth_l1_loss(values_of(online, observation, action), wanted), online)
        follow(target, online)
        return loss

    return step, [online, target, optimizer]


def distributional(head, width):
    model = network(OBSERVATION, 16, width)
    optimizer, loss_fn = adam(model), gs.MultiStepLoss(value=head)

    def step(observation, action, reward, following):
        out = loss_fn({"value": [model(observation)]}, {"value": [reward]})
        return minimize(optimizer, out.loss, model), out.expected["value"]

    return step, [model, optimizer]


def quantile_regression():
    model = network(OBSERVATION, 16, 9)
    target, optimizer = copy.deepcopy(model), adam(model)
    heads = {"value": gs.QuantileHuber()}

    def step(observation, action, reward, following):
        wanted = reward[:, None] + 0.9 * target(following).detach()
        loss = gs.multi_step_loss(heads, {"value": [model(observation)]}, {"value": [wanted]}).loss
        minimize(optimizer, loss, model)
        follow(target, model)
        return loss

    return step, [model, target, optimizer]


def policy_gradient(kind):
    actor, critic = network(OBSERVATION, 16, ACTIONS), network(OBSERVATION, 16, 1)
    old, optimizer = copy.deepcopy(actor), adam(actor, critic)

    def step(observation, action, reward, following):
        log_probs = torch.log_softmax(actor(observation), 1)
        chosen = log_probs.gather(1, action[:, None])[:, 0]
        value = critic(observation)[:, 0]
        with torch.no_grad():
            before = torch.log_softmax(old(observation), 1).gather(1, action[:, None])[:, 0]
            ratio = (chosen - before).exp()
            if kind == "grpo":
                advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
            else:
                advantage = reward + 0.9 * critic(following)[:, 0] - value
            if kind == "vtrace":
                advantage = advantage * ratio.clamp(max=1.0)
        if kind in ("ppo", "grpo"):
            ratio = (chosen - before).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        elif kind == "awr":
            loss = -(chosen * (advantage / 0.5).exp().clamp(max=20.0)).mean()
        else:
            loss = -(chosen * advantage).mean()
        entropy = -(log_probs.exp() * log_probs).sum(1).mean()
        loss = loss + F.mse_loss(value, reward) - 0.01 * entropy
        result = minimize(optimizer, loss, actor, critic)
        follow(old, actor, 0.2)
        return {"loss": result, "entropy": entropy}

    return step, [actor, critic, old, optimizer]


def returns_of_trajectories():
    critic = network(OBSERVATION, 16, 1)
    optimizer, scale = adam(critic), gs.ReturnScale()

    def step(observation, action, reward, following):
        values = critic(observation)[:, 0]
        returns = gs.lambda_returns(reward[None], next_values=values.detach()[None], discount=0.9, lambda_=0.8)[0]
        return minimize(optimizer, F.mse_loss(values, returns) / scale(returns), critic), returns

    return step, [critic, optimizer, scale]


def actor_critic(kind):
    width = 2 * ACTIONS if kind == "sac" else ACTIONS
    actor, critic = network(OBSERVATION, 16, width), network(OBSERVATION + ACTIONS, 16, 1)
    target, log_alpha = copy.deepcopy(critic), torch.zeros((), requires_grad=True)
    optimizers = [adam(actor), adam(critic), torch.optim.Adam([log_alpha], fused=True)]

    def act(observation):
        if kind != "sac":
            return actor(observation).tanh(), observation.new_zeros(len(observation))
        mean, log_scale = actor(observation).chunk(2, 1)
        noise = torch.randn_like(mean)
        log_prob = -(0.5 * noise.square() + log_scale.clamp(-3, 1)).sum(1)
        return (mean + noise * log_scale.clamp(-3, 1).exp()).tanh(), log_prob

    def step(observation, action, reward, following):
        with torch.no_grad():
            own, log_prob = act(following)
            wanted = reward + 0.9 * (target(torch.cat([following, own], 1))[:, 0] - log_alpha.exp() * log_prob)
        given = F.one_hot(action, ACTIONS).float()
        loss = minimize(optimizers[1], F.mse_loss(critic(torch.cat([observation, given], 1))[:, 0], wanted), critic)
        own, log_prob = act(observation)
        score = critic(torch.cat([observation, own], 1))[:, 0]
        minimize(optimizers[0], (log_alpha.exp().detach() * log_prob - score).mean(), actor)
        minimize(optimizers[2], -(log_alpha.exp() * (log_prob.detach() - 1)).mean())
        follow(target, critic)
        return loss, log_alpha.exp()

    return step, [actor, critic, target, optimizers]


def recurrent(cell):
    memory, head = cell(OBSERVATION, 16), nn.Linear(16, ACTIONS)
    optimizer, hidden = adam(memory, head), torch.zeros(1, SIZE, 16)

    def step(observation, action, reward, following):
        states = hidden[0], *([torch.zeros_like(hidden[0])] if cell is nn.LSTMCell else [])
        for x in (observation, following):
            states = memory(x, states if cell is nn.LSTMCell else states[0])
            states = states if cell is nn.LSTMCell else (states,)
        loss = F.cross_entropy(head(states[0]), action)
        minimize(optimizer, loss, memory, head)
        hidden.copy_(states[0].detach()[None])
        return loss

    return step, [memory, head, optimizer, hidden]


def world_model():
    encoder, dynamics = network(OBSERVATION, 16, 8), network(8 + ACTIONS, 16, 8)
    heads, loss_fn = (
        nn.Linear(8, 22),
        gs.MultiStepLoss(value=gs.TwoHot(gs.Support(-5, 5, 11)), reward=gs.TwoHot(gs.Support(-5, 5, 11))),
    )
    optimizer = adam(encoder, dynamics, heads)

    def predicted(hidden):
        return dict(zip(("value", "reward"), heads(gs.scale_gradient(hidden, 0.5)).split((11, 11), 1), strict=True))

    def initial(x):
        hidden = encoder(x).tanh()
        return predicted(hidden), hidden

    def following_state(hidden, action):
        hidden = dynamics(torch.cat([hidden, F.one_hot(action, ACTIONS).float()], 1)).tanh()
        return predicted(hidden), hidden

    def step(observation, action, reward, following):
        actions = torch.stack([action, action.flip(0)], 1)
        targets = {"value": reward[:, None].expand(-1, 3), "reward": reward[:, None].expand(-1, 3)}
        out = loss_fn(gs.unroll(initial, following_state, observation, actions), targets)
        minimize(optimizer, out.loss, encoder, dynamics, heads)
        return out.loss, gs.priorities(out.expected["value"], targets["value"])

    return step, [encoder, dynamics, heads, optimizer]


def contrastive():
    encoder, optimizer = network(OBSERVATION, 16, 8), None
    target, optimizer = copy.deepcopy(encoder), adam(encoder)

    def step(observation, action, reward, following):
        scores = encoder(observation) @ target(following).detach().T
        loss = minimize(optimizer, F.cross_entropy(scores, torch.arange(SIZE, device=scores.device)), encoder)
        follow(target, encoder)
        return loss

    return step, [encoder, target, optimizer]


def cloning():
    body = nn.Sequential(
        nn.Linear(OBSERVATION, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, ACTIONS)
    )
    optimizer = adam(body)
    return lambda x, action, reward, following: minimize(optimizer, F.cross_entropy(body(x), action), body), [
        body,
        optimizer,
    ]


FAMILIES = {
    "DQN": dqn,
    "double DQN": lambda: dqn(double=True),
    "C51": lambda: distributional(gs.TwoHot(gs.Support(-5, 5, 11)), 11),
    "HL-Gauss": lambda: distributional(gs.HLGauss(gs.Support(-5, 5, 11)), 11),
    "quantile regression": quantile_regression,
    "PPO": lambda: policy_gradient("ppo"),
    "GRPO": lambda: policy_gradient("grpo"),
    "A2C": lambda: policy_gradient("a2c"),
    "V-trace": lambda: policy_gradient("vtrace"),
    "AWR": lambda: policy_gradient("awr"),
    "lambda-returns": returns_of_trajectories,
    "SAC": lambda: actor_critic("sac"),
    "DDPG": lambda: actor_critic("ddpg"),
    "GRU": lambda: recurrent(nn.GRUCell),
    "LSTM": lambda: recurrent(nn.LSTMCell),
    "MuZero": world_model,
    "contrastive": contrastive,
    "cloning": cloning,
}


def given(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(SIZE, OBSERVATION, generator=generator),
            torch.randint(ACTIONS, (SIZE,), generator=generator),
            torch.randn(SIZE, generator=generator),
            torch.randn(SIZE, OBSERVATION, generator=generator),
        )
        for _ in range(count)
    ]


def run(name, is_captured):
    torch.manual_seed(0)
    step, state = FAMILIES[name]()
    call = gs.CapturedStep(step, *state) if is_captured else step
    torch.manual_seed(7)
    if is_captured:
        results = [call(*batch) for batch in given(10)]
        assert len(call.graphs) == 1
        assert [audit.replay for audit in call.audits] == [1, 2, 3, 5]
    else:
        with tape.TapeGraphs().side_by_side():
            results = [graphs_free(call(*batch)) for batch in given(10)]
    return bits([results, state])


def graphs_free(result):
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, dict):
        return {key: graphs_free(value) for key, value in result.items()}
    return [graphs_free(value) for value in result] if isinstance(result, list | tuple) else result


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_learners(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = run(name, True)
        assert captured == run(name, False)
        torch.manual_seed(0)
        step, state = FAMILIES[name]()
        diagnosis = gs.diagnose_capture(step, given(2), *state)
    assert diagnosis.ok, str(diagnosis)
