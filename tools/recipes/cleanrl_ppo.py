"""CleanRL: the update of `ppo.py` with CartPole's networks, from a rollout: advantages, epochs, and mini-batches."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

import gradscale_ext as gs

from .checkout import Checkout, Edit, Lines
from .lockstep import Idle, Side, clear, leaves
from .project import Project

STEPS, ENVIRONMENTS, MINIBATCH, OBSERVATION, ACTIONS = 128, 4, 128, 4, 2
SCRIPT = "cleanrl/ppo.py"
UPDATE = Lines(SCRIPT, "__main__", "# bootstrap value if not done", "y_pred, y_true =")


def advantages_of(rewards, values, next_value, dones, next_done, args):
    """Advantages and returns `[T, B]`. `dones[t]` is a flag of the transition before t."""
    return gs.generalized_advantages(
        rewards,
        torch.cat([values, next_value]),
        discount=args.gamma,
        lambda_=args.gae_lambda,
        terminated=torch.cat([dones[1:], next_done[None]]).bool(),
        batch_first=False,
    )


EDITS = [
    Edit(
        SCRIPT,
        "__main__",
        "advantages = torch.zeros_like(rewards)",
        "# flatten the batch",
        "advantages, returns = advantages_of(rewards, values, next_value, dones, next_done, args)",
    ),
    Edit(
        SCRIPT,
        "__main__",
        "mb_advantages = (mb_advantages - ",
        "# Policy loss",
        "mb_advantages = gs.standardize(mb_advantages, correction=1)",
    ),
    Edit(
        SCRIPT,
        "__main__",
        "nn.utils.clip_grad_norm_(",
        "optimizer.step()",
        "gs.clip_gradients_(agent.parameters(), args.max_grad_norm)",
    ),
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    return _side(checkout, []), _side(checkout, EDITS)


def _side(checkout: Checkout, edits: list[Edit]) -> Side:
    from cleanrl import ppo

    torch.manual_seed(0)
    observations, actions = SimpleNamespace(shape=(OBSERVATION,)), SimpleNamespace(shape=(), n=ACTIONS)
    envs = SimpleNamespace(single_observation_space=observations, single_action_space=actions)
    agent, args = ppo.Agent(envs), ppo.Args(batch_size=STEPS * ENVIRONMENTS, minibatch_size=MINIBATCH)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    ours = {"gs": gs, "advantages_of": advantages_of}
    update = checkout.part(UPDATE, edits, {**vars(ppo), **ours, "envs": envs, "device": torch.device("cpu")})

    def step(data: Any) -> dict[str, Any]:
        found = update({**data, "agent": agent, "optimizer": optimizer, "args": args})
        names = ("loss", "pg_loss", "v_loss", "entropy_loss", "approx_kl", "advantages", "returns", "mb_advantages")
        return {name: found[name].detach() for name in names}

    one = ppo.Args(batch_size=MINIBATCH, minibatch_size=MINIBATCH, update_epochs=1)
    return Side(step, [optimizer], _loss_alone(update, one), [agent])


def _loss_alone(update: Any, args: Any) -> Any:
    """Advantages of the whole rollout, and the loss of one mini-batch, from given predictions."""
    predictions, next_value = leaves([MINIBATCH], [MINIBATCH], [MINIBATCH, 1]), torch.randn(ENVIRONMENTS, 1)
    agent = SimpleNamespace(
        get_value=lambda _: next_value, get_action_and_value=lambda *_: (None, *predictions), parameters=list
    )
    variables = {**batch(0), "agent": agent, "optimizer": Idle(), "args": args}

    def loss() -> list[torch.Tensor]:
        clear(predictions)
        update(variables)
        return predictions

    return loss


def batch(seed: int) -> dict[str, Any]:
    """A rollout, with one action in ten ending an episode."""
    random = torch.Generator().manual_seed(seed)
    shape = (STEPS, ENVIRONMENTS)
    observations = torch.randn(STEPS + 1, ENVIRONMENTS, OBSERVATION, generator=random)
    rewards, values, logprobs = (torch.randn(shape, generator=random) for _ in range(3))
    dones = (torch.rand(STEPS + 1, ENVIRONMENTS, generator=random) < 0.1).to(rewards.dtype)
    return {
        "obs": observations[:-1],
        "actions": torch.randint(ACTIONS, shape, generator=random).to(rewards.dtype),
        "logprobs": 0.2 * logprobs - math.log(ACTIONS),
        "rewards": rewards,
        "dones": dones[:-1],
        "values": values,
        "next_obs": observations[-1],
        "next_done": dones[-1],
    }


PROJECT = Project(
    name="cleanrl-ppo",
    repository="vwxyzjn/cleanrl",
    commit="fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    marker=SCRIPT,
    case=f"CartPole's networks: B {ENVIRONMENTS}, T {STEPS}, 16 mini-batches of {MINIBATCH} (loss alone: one)",
    edits=EDITS,
    sides=sides,
    batch=batch,
    stand_ins={name: {} for name in ("gymnasium", "tyro", "torch.utils.tensorboard")},
)
