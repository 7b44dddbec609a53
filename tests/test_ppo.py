"""The example of PPO: it learns, its rollouts count steps, and its captured learner step is the plain one."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tape
import torch

from gradscale_ext.capture import graphs

pytest.importorskip("gymnasium")
sys.path.append(str(Path(__file__).parent.parent / "examples"))
import ppo


def test_it_learns_cartpole():
    training = ppo.Training("cartpole", seed=0)
    training.step()
    random = training.mean_return
    while training.environment_steps < 20_000:
        numbers = training.step()
    assert random < 40
    assert training.mean_return > 100
    assert 0 < numbers["approx_kl"] < 0.05


def test_rollouts():
    """CartPole's reward is 1 for every step, and 0 for the step that resets."""
    training = ppo.Training("cartpole", seed=0)
    first, second = training.rollout(), training.rollout()
    masks = torch.cat([first["mask"], second["mask"]])
    rewards = torch.cat([first["rewards"], second["rewards"]])
    ends = torch.cat([first["terminated"], second["terminated"]])
    assert torch.equal(rewards, masks.to(rewards.dtype))
    assert torch.equal(~masks[1:], ends[:-1])  # also from one rollout to the next
    assert masks[0].all()
    assert training.environment_steps == masks.sum()
    assert sum(found for _, found in training.episodes) + training.returns.sum() == masks.sum()
    logits, values = training.agent(second["observation"].flatten(0, 1))
    log_probs = torch.distributions.Categorical(logits=logits).log_prob(second["actions"].flatten())
    torch.testing.assert_close(second["log_probs"].flatten(), log_probs)
    torch.testing.assert_close(second["values"][:-1].flatten(), values)
    torch.testing.assert_close(first["values"][-1], second["values"][0])


def test_minibatches():
    """Each transition comes once in each epoch, and advantages have mean 0 and deviation 1 over unmasked ones."""
    training = ppo.Training("cartpole", seed=0)
    data = training.rollout()
    batches = list(training.minibatches(data))
    settings = training.settings
    assert len(batches) == settings.epochs * settings.minibatches
    epoch = torch.cat([policy["log_probs"] for _, policy, _, _ in batches[: settings.minibatches]])
    assert torch.equal(epoch.sort().values, data["log_probs"].flatten().sort().values)
    for _, policy, _, mask in batches:
        counted = policy["advantages"][mask]
        assert abs(counted.mean()) < 1e-5
        assert abs(counted.std(unbiased=False) - 1) < 1e-4
        assert (policy["advantages"][~mask] == 0).all()


def test_the_learning_rate_falls():
    training = ppo.Training("cartpole", seed=0, settings=replace(ppo.SETTINGS["cartpole"], steps=4_000))
    rates = []
    while not training.finished:
        training.step()
        rates.append(training.learner.learning_rate.item())
    assert rates[0] == pytest.approx(2e-3)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 1e-3


def test_a_captured_learner_step(monkeypatch):
    """Replays of a graph, here of the stand-in for CUDA graphs, give the weights of plain calls."""
    weights = []
    for makers in (graphs.graphs_of, lambda device: tape.TapeGraphs()):
        monkeypatch.setattr(graphs, "graphs_of", makers)
        training = ppo.Training("cartpole", seed=0)
        for _ in range(2):
            training.step()
        weights.append(torch.nn.utils.parameters_to_vector(training.agent.parameters()).detach())
    assert training.learner.update.graphs
    assert torch.equal(*weights)


def test_breakout_and_evaluation():
    pytest.importorskip("minatar")
    training = ppo.Training("breakout", seed=0, settings=replace(ppo.SETTINGS["breakout"], rollout_steps=4))
    numbers = training.step()
    assert all(value.isfinite() for value in numbers.values())
    random, agent = (ppo.evaluate("cartpole", player, seed=0) for player in (None, ppo.Agent((4,), 2)))
    assert len(random) == len(agent) == 20
    assert 15 < random.mean() < 30  # random play of CartPole
