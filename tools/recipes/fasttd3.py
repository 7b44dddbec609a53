"""FastTD3: `update_main` of its training script, the step of the C51 critics, in full precision and not compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

import gradscale_ext as gs

from .checkout import Checkout, Edit
from .lockstep import Idle, Side, clear, leaves
from .project import Project

BATCH, LOSS_BATCH, OBSERVATION, ACTIONS, BINS, LIMIT = 512, 4096, 51, 19, 101, 250.0
CRITIC = {"n_obs": OBSERVATION, "n_act": ACTIONS, "num_atoms": BINS, "v_min": -LIMIT, "v_max": LIMIT}
# `Critic` requires these arguments. With an empty sim_type, the others have no effect.
SIMPLICIAL = {"sim_type": "", "sim_dimension": 64, "seq_len": 8}


def projected(critic, observations, actions, rewards, bootstrap, discount):
    """Target distributions `[B, S]` of both critics."""
    support = gs.Support.linear(critic.qnet1.v_min, critic.qnet1.v_max, critic.qnet1.num_atoms)
    logits = torch.stack(critic(observations, actions))
    rewards, discounts = (tensor.expand(2, -1) for tensor in (rewards, bootstrap * discount))
    return support.project(logits.softmax(-1), rewards, discounts).unbind()


def critics_loss(logits, targets):
    """The sum of the critics' cross-entropies."""
    heads = {f"q{i}": gs.SoftCrossEntropy() for i in range(len(logits))}
    predictions, targets = ({name: [x] for name, x in zip(heads, given, strict=True)} for given in (logits, targets))
    return gs.multi_step_loss(heads, predictions, targets).loss


EDITS = [
    Edit(
        "fast_td3/train.py",
        "update_main",
        "qf1_next_target_projected, qf2_next_target_projected = (",
        "qf1_next_target_value = ",
        """
        qf1_next_target_projected, qf2_next_target_projected = projected(
            qnet_target, next_critic_observations, next_state_actions, rewards, bootstrap, discount
        )
        """,
    ),
    Edit(
        "fast_td3/train.py",
        "update_main",
        "qf1_loss = -torch.sum(",
        "q_optimizer.zero_grad(",
        "qf_loss = critics_loss((qf1, qf2), (qf1_next_target_dist, qf2_next_target_dist))",
    ),
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    return _side(checkout, []), _side(checkout, EDITS)


def _side(checkout: Checkout, edits: list[Edit]) -> Side:
    from fast_td3 import Actor, Critic

    torch.manual_seed(0)
    critic, target = (Critic(**CRITIC, **SIMPLICIAL, hidden_dim=1024) for _ in range(2))
    actor = Actor(OBSERVATION, ACTIONS, num_envs=1, init_scale=0.01, hidden_dim=512)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-4, weight_decay=0.1)
    update = _update_main(checkout, edits, actor, critic, target, optimizer)

    def step(data: Any) -> dict[str, Any]:
        found = update(data, {})
        return {"loss": found["qf_loss"], "largest value": found["qf_max"], "smallest value": found["qf_min"]}

    return Side(step, [optimizer], _loss_alone(checkout, edits, Critic))


def _update_main(checkout: Checkout, edits: list[Edit], actor: Any, critic: Any, target: Any, optimizer: Any) -> Any:
    """`update_main`, with default settings for the variables of the function around it."""
    outside = {
        **{"torch": torch, "F": functional, "autocast": torch.autocast, "scaler": torch.amp.GradScaler(enabled=False)},
        **{"amp_device_type": "cpu", "amp_dtype": torch.bfloat16, "amp_enabled": False, "device": "cpu"},
        **{"policy_noise": 0.001, "noise_clip": 0.5, "action_low": -1.0, "action_high": 1.0},
        "envs": SimpleNamespace(asymmetric_obs=False),
        "args": SimpleNamespace(disable_bootstrap=False, gamma=0.99, use_cdq=True, use_grad_norm_clipping=False),
        **{"actor": actor, "qnet": critic, "qnet_target": target, "q_optimizer": optimizer},
        **{"projected": projected, "critics_loss": critics_loss},
    }
    return checkout.inner_function("fast_td3/train.py", "update_main", edits, outside)


def _loss_alone(checkout: Checkout, edits: list[Edit], critic_class: Any) -> Any:
    logits, target_logits = leaves(*[[LOSS_BATCH, BINS]] * 2), torch.randn(2, LOSS_BATCH, BINS)
    target = critic_class(**CRITIC, **SIMPLICIAL, hidden_dim=8)
    for network, given in zip((target.qnet1, target.qnet2), target_logits, strict=True):
        network.forward = lambda *_, given=given: given
    data, action = batch(0, LOSS_BATCH), torch.zeros(LOSS_BATCH, ACTIONS)
    update = _update_main(checkout, edits, lambda _: action, lambda *_: logits, target, Idle())

    def loss() -> list[torch.Tensor]:
        clear(logits)
        update(data, {})
        return logits

    return loss


def batch(seed: int, count: int = BATCH) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    observations, following = (torch.randn(count, OBSERVATION, generator=random) for _ in range(2))
    ends = torch.rand(2, count, generator=random) < 0.05
    after = {"observations": following, "rewards": torch.randn(count, generator=random)}
    after |= {"dones": ends.any(0), "truncations": ends[1], "effective_n_steps": torch.ones(count)}
    return {
        "observations": observations,
        "actions": torch.randn(count, ACTIONS, generator=random).tanh(),
        "next": after,
    }


PROJECT = Project(
    name="FastTD3",
    repository="younggyoseo/FastTD3",
    commit="229ed59bbf43ea2f7a2d5d90d1076314839944d7",
    marker="fast_td3/train.py",
    case=f"critics of HumanoidBench's settings: B {BATCH} (loss alone {LOSS_BATCH}), 2 critics of {BINS} bins",
    edits=EDITS,
    sides=sides,
    batch=batch,
    roots=["fast_td3"],
)
