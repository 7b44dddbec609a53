"""LightZero: `MuZeroPolicy._forward_learn` with CartPole's networks. Stubs replace DI-engine, wandb and the search."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn

import gradscale_ext as gs

from .checkout import Checkout, Edit
from .lockstep import Idle, Side, clear, leaves
from .project import Project

BATCH, STEPS, OBSERVATION, ACTIONS, BINS, PROJECTED = 256, 5, 4, 2, 601, 1024


def losses(policy, observations, root, action, mask, reward, value, target_policy, weights):
    """The result of `multi_step_loss` for the unroll from `root`, a tuple of latent state, value and policy logits."""
    cfg, model, steps = policy._cfg, policy._learn_model, policy._cfg.num_unroll_steps
    latent, *predicted = root
    predictions = {"value": [predicted[0]], "policy": [predicted[1]], "reward": [], "consistency": []}
    observed = []
    for k in range(steps):
        found = model.recurrent_inference(latent, action[:, k])
        latent = found.latent_state
        predictions["value"].append(found.value)
        predictions["policy"].append(found.policy_logits)
        predictions["reward"].append(found.reward)
        first, stop = policy._get_target_obs_index_in_step_k(k)
        following = model.initial_inference(observations[:, first:stop]).latent_state
        predictions["consistency"].append(model.project(latent, with_grad=True))
        observed.append(model.project(following, with_grad=False))

    limit = lambda support: gs.Support.muzero(int(support.arange[0, -1]))
    entropy = cfg.policy_entropy_weight / cfg.policy_loss_weight
    heads = {
        "value": gs.TwoHot(limit(policy.value_support), weight=cfg.value_loss_weight),
        "policy": gs.SoftCrossEntropy(
            label_smoothing=cfg.policy_label_smoothing, entropy_weight=entropy, weight=cfg.policy_loss_weight
        ),
        "reward": gs.TwoHot(limit(policy.reward_support), weight=cfg.reward_loss_weight, first_step=1),
        "consistency": gs.NegativeCosine(eps=1e-5, weight=cfg.ssl_loss_weight, first_step=1),
    }
    targets = {"value": value, "policy": target_policy, "reward": reward[:, :steps], "consistency": observed}
    return gs.multi_step_loss(
        heads,
        predictions,
        targets,
        step_gradient_scale=[1 / steps] * (steps + 1),
        importance_weights=weights,
        mask={"consistency": torch.cat((torch.ones_like(mask[:, :1]), mask[:, :steps]), 1).bool()},
    )


def target_entropy(target_policy, mask):
    """Entropy of the target policy, for the log: means over unmasked samples, summed over the steps after the root."""
    p = target_policy[:, 1:] + 1e-6
    mask = mask[:, 1 : p.shape[1] + 1]
    entropy = torch.where(mask.bool(), -(p * p.log()).sum(-1), 0)
    mean = entropy.sum(0) / mask.sum(0).clamp(min=1)
    return torch.where(mask.any(0), mean, math.log(p.shape[-1])).sum()


EDITS = [
    Edit("lzero/policy/muzero.py", "_forward_learn", "target_reward_categorical = ", "# ===="),
    Edit(
        "lzero/policy/muzero.py",
        "_forward_learn",
        "# transform the scaled value",
        "self._optimizer.zero_grad()",
        """
        root = (latent_state, value, policy_logits)
        out = losses(
            self, obs_target_batch, root, action_batch, mask_batch, target_reward, target_value, target_policy, weights
        )
        weighted_total_loss, loss = out.loss, out.per_sample
        policy_entropy_loss = -out.entropy["policy"].sum(1)
        policy_loss = out.per_step["policy"].sum(1) - self._cfg.policy_entropy_weight * policy_entropy_loss
        value_loss, reward_loss = out.per_step["value"].sum(1), out.per_step["reward"].sum(1)
        consistency_loss = out.per_step["consistency"].sum(1)
        value_priority = gs.priorities(out.expected["value"], target_value).cpu().numpy()
        target_policy_entropy = target_entropy(target_policy, mask_batch)
        predicted_values = out.expected["value"]
        predicted_rewards = list(out.expected["reward"].unsqueeze(-1).unbind(1))
        """,
    ),
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    from lzero.policy import muzero

    names = {"losses": losses, "target_entropy": target_entropy, "gs": gs}
    edited = checkout.edited("lzero/policy/muzero.py", EDITS, names)
    return _side(muzero.MuZeroPolicy), _side(edited.MuZeroPolicy)


def _config(policy_class: Any) -> SimpleNamespace:
    """The policy's defaults, updated by CartPole's configuration."""
    model = policy_class.config["model"] | {"model_type": "mlp", "observation_shape": OBSERVATION}
    model["self_supervised_learning_loss"] = True
    settings = policy_class.config | {"model": SimpleNamespace(**model), "device": "cpu", "batch_size": BATCH}
    settings |= {"optim_type": "Adam", "piecewise_decay_lr_scheduler": False, "learning_rate": 0.003}
    return SimpleNamespace(**settings | {"ssl_loss_weight": 2, "num_unroll_steps": STEPS})


def _side(policy_class: Any) -> Side:
    from lzero.model.muzero_model_mlp import MuZeroModelMLP

    torch.manual_seed(0)
    policy = policy_class()
    policy._cfg = _config(policy_class)
    policy._model = MuZeroModelMLP(
        observation_shape=OBSERVATION,
        action_space_size=ACTIONS,
        latent_state_dim=128,
        self_supervised_learning_loss=True,
        res_connection_in_dynamics=True,
    )
    for parameter in policy._model.parameters():
        if (
            parameter.dim() > 1 and not parameter.any()
        ):  # a layer that starts at zero outputs little more than rounding errors
            nn.init.xavier_uniform_(parameter)
    policy._init_learn()
    policy._collect_mcts_temperature = policy.collect_epsilon = 0.0

    step = lambda data: _reported(policy._forward_learn(data))
    return Side(step, [policy._optimizer], _loss_alone(policy), [policy._model])


def _reported(found: dict[str, Any]) -> dict[str, Any]:
    names = {"weighted_total_loss": "loss", "value_priority_orig": "priorities"}
    logged = ("total_loss", "policy_loss", "policy_entropy", "target_policy_entropy", "reward_loss", "value_loss")
    names |= {name: name for name in (*logged, "consistency_loss")}
    return {names[name]: value for name, value in found.items() if name in names}


def _loss_alone(policy: Any) -> Any:
    sizes = {"value": BINS, "reward": BINS, "policy_logits": ACTIONS, "latent_state": 8}
    outputs = [
        SimpleNamespace(**dict(zip(sizes, leaves(*([BATCH, size] for size in sizes.values())), strict=True)))
        for _ in range(STEPS + 1)
    ]
    projections, observed = leaves(*[[BATCH, PROJECTED]] * STEPS), torch.randn(BATCH, PROJECTED)
    every = [*projections, *(value for output in outputs for value in vars(output).values())]
    data = batch(0)

    def loss() -> list[torch.Tensor]:
        clear(every)
        recurrent, projected = iter(outputs[1:]), iter(projections)
        model = SimpleNamespace(
            initial_inference=lambda _: outputs[0],
            recurrent_inference=lambda *_: next(recurrent),
            project=lambda _, with_grad: next(projected) if with_grad else observed,
            parameters=list,
            train=lambda: None,
            state_dict=dict,
        )
        parts = dict(vars(policy)) | {"_learn_model": model, "_optimizer": Idle(), "_target_model": _Target()}
        stand_in = SimpleNamespace(**parts)
        stand_in._get_target_obs_index_in_step_k = policy._get_target_obs_index_in_step_k
        type(policy)._forward_learn(stand_in, data)
        return every

    return loss


def batch(seed: int) -> Any:
    random = numpy.random.default_rng(seed)
    valid = numpy.arange(STEPS + 1) < random.integers(2, STEPS + 2, (BATCH, 1))
    observations = random.normal(size=(BATCH, OBSERVATION * (STEPS + 1)))
    actions = random.integers(0, ACTIONS, (BATCH, STEPS))
    rewards, values = random.normal(size=(BATCH, STEPS + 1)), random.normal(scale=20, size=(BATCH, STEPS + 1))
    policies = random.dirichlet([1.0] * ACTIONS, (BATCH, STEPS + 1))
    current = [observations, actions, valid.astype(float), None, random.random(BATCH), None]
    return current, [rewards, values, policies]


# ---- Stand-ins -------------------------------------------------------------------------------------------------------


class _Target:
    """A target network, which this loss does not use."""

    def __init__(self, *_: Any, **__: Any): ...

    def train(self) -> None: ...

    def update(self, _: Any) -> None: ...


def _mlp(in_channels: int, hidden_channels: int, out_channels: int, layer_num: int, **options: Any) -> nn.Sequential:
    """Linear layers, each followed by normalisation and activation, as in DI-engine."""
    sizes = [in_channels, *[hidden_channels] * (layer_num - 1), out_channels]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), options["activation"]]
    return nn.Sequential(*layers)


class _Registry:
    def register(self, _: str) -> Any:
        return lambda found: found


_REGISTRIES = {f"{name}_REGISTRY": _Registry() for name in ("POLICY", "MODEL")}
PROJECT = Project(
    name="LightZero",
    repository="opendilab/LightZero",
    commit="9f717c80c86d5c69b39a56d8ade18e684ce6311a",
    marker="lzero/policy/muzero.py",
    case=f"MuZero policy, CartPole's networks: B {BATCH}, K {STEPS}, {BINS} bins, consistency of {PROJECTED}",
    edits=EDITS,
    sides=sides,
    batch=batch,
    stand_ins={
        **{name: {} for name in ("ditk", "ding", "easydict", "wandb", "transformers", "nltk", "scipy", "matplotlib")},
        "lzero.mcts": {},
        "ding.torch_utils": {"MLP": _mlp, "to_tensor": lambda found: found},
        "ding.torch_utils.network.normalization": {"build_normalization": lambda *_, **__: nn.BatchNorm1d},
        "ding.model": {"model_wrap": _Target},
        "ding.utils": {**_REGISTRIES, "SequenceType": list},
    },
)
