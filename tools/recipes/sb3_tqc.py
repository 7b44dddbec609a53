"""Stable-Baselines3-contrib: `TQC.train` with its default networks, for Pendulum's observations and actions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .checkout import Checkout, Edit
from .lockstep import Idle, Side, clear, leaves
from .project import Project
from .sb3_qrdqn import COMMIT, REPOSITORY, TEXTS, quantile_loss, stand_in, trained, transitions

BATCH, CRITICS, QUANTILES, DROPPED, OBSERVATION = 256, 2, 25, 2, 3

EDITS = [
    Edit(
        "sb3_contrib/tqc/tqc.py",
        "train",
        "critic_loss = quantile_huber_loss(",
        "critic_losses.append(",
        "critic_loss = quantile_loss(current_quantiles, target_quantiles, sum_over_quantiles=False)",
    )
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    theirs, ours = agent_classes(checkout)
    return _side(theirs), _side(ours)


def agent_classes(checkout: Checkout) -> tuple[Any, Any]:
    from sb3_contrib.tqc import tqc

    return tqc.TQC, checkout.edited("sb3_contrib/tqc/tqc.py", EDITS, {"quantile_loss": quantile_loss}).TQC


def agent_of(agent_class: Any) -> Any:
    torch.manual_seed(0)
    return agent_class("MlpPolicy", "Pendulum-v1", batch_size=BATCH, buffer_size=1, device="cpu")


def _side(agent_class: Any) -> Side:
    agent = agent_of(agent_class)
    optimizers = [agent.critic.optimizer, agent.actor.optimizer, agent.ent_coef_optimizer]
    return Side(trained(agent, BATCH), optimizers, loss_alone(agent_class))


class _Critic:
    """Returns given quantiles. They are detached for the action None, which the stand-in for the actor returns."""

    n_critics, quantiles_total, optimizer, parameters = CRITICS, CRITICS * QUANTILES, Idle(), list

    def __init__(self, quantiles: torch.Tensor):
        self.quantiles = quantiles

    def __call__(self, _: Any, action: Any) -> torch.Tensor:
        return self.quantiles.detach() if action is None else self.quantiles


def loss_alone(agent_class: Any) -> Any:
    """Loss of the critics."""
    quantiles, data = leaves([BATCH, CRITICS, QUANTILES]), batch(0)
    log_prob = torch.randn(BATCH, requires_grad=True)
    agent = stand_in(
        data,
        actor=SimpleNamespace(optimizer=Idle(), action_log_prob=lambda _: (None, log_prob)),
        critic=_Critic(quantiles[0]),
        critic_target=_Critic(torch.randn(BATCH, CRITICS, QUANTILES)),
        batch_norm_stats=[],
        batch_norm_stats_target=[],
        ent_coef_optimizer=None,
        ent_coef_tensor=torch.tensor(0.2),
        tau=0.005,
        target_update_interval=1,
        top_quantiles_to_drop_per_net=DROPPED,
        use_sde=False,
    )

    def loss() -> list[torch.Tensor]:
        clear(quantiles)
        agent_class.train(agent, gradient_steps=1, batch_size=BATCH)
        return quantiles

    return loss


def batch(seed: int) -> SimpleNamespace:
    data = transitions(seed, BATCH, OBSERVATION)
    data.actions = 2 * torch.rand(BATCH, 1, generator=torch.Generator().manual_seed(seed)) - 1
    return data


PROJECT = Project(
    name="sb3-tqc",
    repository=REPOSITORY,
    commit=COMMIT,
    marker="sb3_contrib/tqc/tqc.py",
    case=f"TQC, {CRITICS} critics: B {BATCH}, {QUANTILES} x {CRITICS * (QUANTILES - DROPPED)} quantiles",
    edits=EDITS,
    sides=sides,
    batch=batch,
    texts=TEXTS,
)
