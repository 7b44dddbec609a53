"""Stable-Baselines3-contrib: the update of the critics in `TQC.train`. A stand-in for the actor does not learn."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from . import sb3_tqc
from .checkout import Checkout
from .lockstep import Idle, Side
from .sb3_qrdqn import trained


def sides(checkout: Checkout) -> tuple[Side, Side]:
    theirs, ours = sb3_tqc.agent_classes(checkout)
    return _side(theirs), _side(ours)


def _side(agent_class: Any) -> Side:
    agent = sb3_tqc.agent_of(agent_class)
    agent.critic = _Critic(agent.critic)
    agent.actor = _Actor()
    agent.ent_coef_optimizer, agent.ent_coef_tensor = None, torch.tensor(0.2)
    return Side(trained(agent, sb3_tqc.BATCH), [agent.critic.optimizer], sb3_tqc.loss_alone(agent_class))


class _Actor:
    """Chooses the same actions for all observations."""

    optimizer = Idle()

    def __init__(self) -> None:
        self.actions = 2 * torch.rand(sb3_tqc.BATCH, 1, generator=torch.Generator().manual_seed(0)) - 1
        self.log_prob = torch.zeros(sb3_tqc.BATCH, requires_grad=True)

    def action_log_prob(self, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actions, self.log_prob


class _Critic:
    """The critics. The second call of each step, from which the actor would learn, returns constants."""

    def __init__(self, critic: Any):
        self.critic, self.calls = critic, 0

    def __call__(self, observations: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            return torch.zeros(sb3_tqc.BATCH, sb3_tqc.CRITICS, sb3_tqc.QUANTILES)
        return self.critic(observations, actions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.critic, name)


PROJECT = dataclasses.replace(
    sb3_tqc.PROJECT,
    name="sb3-tqc-critic",
    case=f"the critics of TQC alone: B {sb3_tqc.BATCH}, "
    f"{sb3_tqc.QUANTILES} x {sb3_tqc.CRITICS * (sb3_tqc.QUANTILES - sb3_tqc.DROPPED)} quantiles",
    sides=sides,
)
