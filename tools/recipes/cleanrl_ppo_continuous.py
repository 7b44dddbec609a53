"""CleanRL: the update of `ppo_continuous_action.py` with the networks and sizes of HalfCheetah, from a rollout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from . import cleanrl_ppo as discrete
from .checkout import Checkout
from .lockstep import Side
from .project import Project

OBSERVATION, ACTIONS = 17, 6
SCRIPT = "cleanrl/ppo_continuous_action.py"
POLICY = '{"means": agent.actor_mean(mb_obs), "log_stds": agent.actor_logstd[0]}'
EDITS = discrete.edits_of(SCRIPT, POLICY, "b_actions[mb_inds]", continuous=True)


def sides(checkout: Checkout) -> tuple[Side, Side]:
    from cleanrl import ppo_continuous_action

    theirs, ours = (
        discrete.side(
            checkout, ppo_continuous_action, SCRIPT, edits, OBSERVATION, SimpleNamespace(shape=(ACTIONS,)), batch
        )
        for edits in ([], EDITS)
    )
    return theirs, ours


def batch(seed: int) -> dict[str, Any]:
    """A rollout. Actions are drawn with a mean near 0 and a deviation of 1, which the policy has at first."""
    data, random = discrete.batch(seed), torch.Generator().manual_seed(seed)
    shape = discrete.STEPS, discrete.ENVIRONMENTS
    observations = torch.randn(discrete.STEPS + 1, discrete.ENVIRONMENTS, OBSERVATION, generator=random)
    actions = torch.randn(*shape, ACTIONS, generator=random)
    densities = torch.distributions.Normal(0.1 * torch.randn(*shape, ACTIONS, generator=random), 1.0)
    given = {"obs": observations[:-1], "next_obs": observations[-1], "actions": actions}
    return {**data, **given, "logprobs": densities.log_prob(actions).sum(-1)}


PROJECT = Project(
    name="cleanrl-ppo-continuous",
    repository=discrete.PROJECT.repository,
    commit=discrete.PROJECT.commit,
    marker=SCRIPT,
    case=f"HalfCheetah's sizes: B {discrete.ENVIRONMENTS}, T {discrete.STEPS}, 6 actions, 16 mini-batches of "
    f"{discrete.MINIBATCH} (loss alone: one)",
    edits=EDITS,
    sides=sides,
    batch=batch,
    stand_ins=discrete.PROJECT.stand_ins,
)
