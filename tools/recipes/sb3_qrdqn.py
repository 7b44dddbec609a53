"""Stable-Baselines3-contrib: `QRDQN.train` with CartPole's networks. Batches replace the replay buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import gradscale_ext as gs

from .checkout import Checkout, Edit
from .lockstep import Idle, Side, clear, leaves
from .project import Project

BATCH, QUANTILES, OBSERVATION, ACTIONS = 32, 200, 4, 2
REPOSITORY = "Stable-Baselines-Team/stable-baselines3-contrib"
COMMIT = "0ca7fdd8d1150bd3a48b86016a85db036efc3b6d"
# The fractions of the quantiles are created in float32, also for quantiles in float64.
TEXTS = {"dtype=th.float)": "dtype=th.get_default_dtype())"}


def quantile_loss(current, target, sum_over_quantiles):
    """The mean loss of the critics, which are treated as steps: `current` is `[B, C, N]`, `target` is `[B, 1, M]`."""
    critics = current.shape[1]
    return gs.multi_step_loss(
        {"q": gs.QuantileHuber(sum_over_quantiles=sum_over_quantiles)},
        {"q": current},
        {"q": target.expand(-1, critics, -1)},
        step_weights=[1 / critics] * critics,
    ).loss


EDITS = [
    Edit(
        "sb3_contrib/qrdqn/qrdqn.py",
        "train",
        "loss = quantile_huber_loss(",
        "losses.append(",
        "loss = quantile_loss(current_quantiles.unsqueeze(1), target_quantiles.unsqueeze(1), sum_over_quantiles=True)",
    )
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    from sb3_contrib.qrdqn import qrdqn

    edited = checkout.edited("sb3_contrib/qrdqn/qrdqn.py", EDITS, {"quantile_loss": quantile_loss})
    return _side(qrdqn.QRDQN), _side(edited.QRDQN)


def _side(agent_class: Any) -> Side:
    torch.manual_seed(0)
    agent = agent_class("MlpPolicy", "CartPole-v1", batch_size=BATCH, buffer_size=1, device="cpu")
    return Side(trained(agent, BATCH), [agent.policy.optimizer], _loss_alone(agent_class))


def trained(agent: Any, count: int) -> Any:
    """A function that runs one step of `train` and returns the logged losses."""
    from stable_baselines3.common.logger import Logger

    agent.set_logger(Logger(None, []))

    def step(data: Any) -> dict[str, Any]:
        agent.replay_buffer = SimpleNamespace(sample=lambda *_, **__: data)
        agent.train(gradient_steps=1, batch_size=count)
        logged = agent.logger.name_to_value
        return {name.removeprefix("train/"): value for name, value in logged.items() if name.endswith("loss")}

    return step


def stand_in(data: Any, **parts: Any) -> SimpleNamespace:
    """An agent whose networks return given predictions."""
    nothing = lambda *_, **__: None
    return SimpleNamespace(
        _update_learning_rate=nothing,
        _vec_normalize_env=None,
        _n_updates=0,
        gamma=0.99,
        max_grad_norm=None,
        logger=SimpleNamespace(record=nothing),
        replay_buffer=SimpleNamespace(sample=lambda *_, **__: data),
        policy=SimpleNamespace(set_training_mode=nothing, optimizer=Idle()),
        **parts,
    )


def _loss_alone(agent_class: Any) -> Any:
    quantiles = leaves([BATCH, QUANTILES, ACTIONS])
    following, data = torch.randn(BATCH, QUANTILES, ACTIONS), batch(0)
    networks = {"quantile_net": lambda _: quantiles[0], "quantile_net_target": lambda _: following}
    agent = stand_in(data, n_quantiles=QUANTILES, **networks)

    def loss() -> list[torch.Tensor]:
        clear(quantiles)
        agent_class.train(agent, gradient_steps=1, batch_size=BATCH)
        return quantiles

    return loss


def transitions(seed: int, count: int, observation: int) -> SimpleNamespace:
    """A sample of a replay buffer, without actions."""
    random = torch.Generator().manual_seed(seed)
    observations, following = (torch.randn(count, observation, generator=random) for _ in range(2))
    dones = (torch.rand(count, 1, generator=random) < 0.1).to(observations.dtype)
    rewards = torch.randn(count, 1, generator=random)
    return SimpleNamespace(
        observations=observations, next_observations=following, dones=dones, rewards=rewards, discounts=None
    )


def batch(seed: int) -> SimpleNamespace:
    data = transitions(seed, BATCH, OBSERVATION)
    data.actions = torch.randint(ACTIONS, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    return data


PROJECT = Project(
    name="sb3-qrdqn",
    repository=REPOSITORY,
    commit=COMMIT,
    marker="sb3_contrib/qrdqn/qrdqn.py",
    case=f"QR-DQN, CartPole's network: B {BATCH}, {QUANTILES} x {QUANTILES} quantiles",
    edits=EDITS,
    sides=sides,
    batch=batch,
    texts=TEXTS,
)
