"""CleanRL: the update of `ppo.py` with CartPole's networks, from a rollout: advantages, epochs, and mini-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
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


def losses_of(predictions, actions, logprobs, advantages, returns, values, args, continuous=False):
    """The output of the loss of a minibatch, and its terms as CleanRL has them."""
    loss_fn = gs.MultiStepLoss.ppo(
        clip=args.clip_coef,
        value_clip=args.clip_coef if args.clip_vloss else None,
        value_weight=args.vf_coef,
        entropy_weight=args.ent_coef,
        continuous=continuous,
    )
    fields = {"actions": actions, "log_probs": logprobs, "advantages": advantages}
    targets = {"policy": fields, "value": {"returns": returns, "values": values}}
    out = loss_fn(predictions, targets, steps=False)
    entropy = out.entropy["policy"].mean()
    return out, out.head_means["policy"] + args.ent_coef * entropy, out.head_means["value"] / 2, entropy


def edits_of(script, policy, actions, continuous):
    """The lines to replace, with code for the policy's prediction and for the actions of a minibatch."""
    return [
        Edit(
            script,
            "__main__",
            "advantages = torch.zeros_like(rewards)",
            "# flatten the batch",
            "advantages, returns = advantages_of(rewards, values, next_value, dones, next_done, args)",
        ),
        Edit(
            script,
            "__main__",
            "_, newlogprob, entropy, newvalue = ",
            "optimizer.zero_grad()",
            f"""
            mb_obs, mb_advantages = b_obs[mb_inds], gs.standardize(b_advantages[mb_inds], correction=1)
            out, pg_loss, v_loss, entropy_loss = losses_of(
                {{"policy": {policy}, "value": agent.critic(mb_obs).view(-1)}},
                {actions},
                b_logprobs[mb_inds],
                mb_advantages,
                b_returns[mb_inds],
                b_values[mb_inds],
                args,
                continuous={continuous},
            )
            loss, approx_kl = out.loss, out.approx_kl["policy"]
            clipfracs += [out.clip_fraction["policy"].item()]
            """,
        ),
        Edit(
            script,
            "__main__",
            "nn.utils.clip_grad_norm_(",
            "optimizer.step()",
            "gs.clip_gradients_(agent.parameters(), args.max_grad_norm)",
        ),
    ]


EDITS = edits_of(SCRIPT, "agent.actor(mb_obs)", "b_actions.long()[mb_inds]", continuous=False)


def sides(checkout: Checkout) -> tuple[Side, Side]:
    from cleanrl import ppo

    actions = SimpleNamespace(shape=(), n=ACTIONS)
    theirs, ours = (side(checkout, ppo, SCRIPT, edits, OBSERVATION, actions, batch) for edits in ([], EDITS))
    return theirs, ours


def side(
    checkout: Checkout,
    script: Any,
    file: str,
    edits: list[Edit],
    observation: int,
    actions: Any,
    batch: Callable[[int], dict[str, Any]],
) -> Side:
    """A learner of the script whose module is `script`."""
    torch.manual_seed(0)
    observations = SimpleNamespace(shape=(observation,))
    envs = SimpleNamespace(single_observation_space=observations, single_action_space=actions)
    sizes = {"num_steps": STEPS, "minibatch_size": MINIBATCH}
    agent, args = script.Agent(envs), script.Args(batch_size=STEPS * ENVIRONMENTS, update_epochs=4, **sizes)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    ours = {"gs": gs, "advantages_of": advantages_of, "losses_of": losses_of}
    lines = Lines(file, "__main__", UPDATE.start, UPDATE.stop)
    update = checkout.part(lines, edits, {**vars(script), **ours, "envs": envs, "device": torch.device("cpu")})

    def step(data: Any) -> dict[str, Any]:
        found = update({**data, "agent": agent, "optimizer": optimizer, "args": args})
        names = ("loss", "pg_loss", "v_loss", "entropy_loss", "approx_kl", "advantages", "returns", "mb_advantages")
        return {name: found[name].detach() for name in names} | {"clip fractions": torch.tensor(found["clipfracs"])}

    one = script.Args(batch_size=MINIBATCH, update_epochs=1, **sizes)
    return Side(step, [optimizer], _loss_alone(update, script.Agent(envs), batch(0), one), [agent])


class Given(torch.nn.Module):
    """A network that returns given predictions: for the observations of a minibatch, or for the last ones."""

    def __init__(self, prediction: torch.Tensor, last: torch.Tensor | None = None):
        super().__init__()
        self.predictions = {len(x): x for x in (prediction, last) if x is not None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.predictions[len(x)]


def _loss_alone(update: Any, agent: Any, data: dict[str, Any], args: Any) -> Any:
    """Advantages of the whole rollout, and the loss of one mini-batch, from given predictions."""
    name = "actor" if hasattr(agent, "actor") else "actor_mean"
    policy, value = leaves([MINIBATCH, getattr(agent, name)[-1].out_features], [MINIBATCH, 1])
    setattr(agent, name, Given(policy))
    agent.critic = Given(value, torch.randn(ENVIRONMENTS, 1))
    predictions = [policy, value, *agent.parameters()]  # continuous actions have the parameter of their deviation
    variables = {**data, "agent": agent, "optimizer": Idle(), "args": args}

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
