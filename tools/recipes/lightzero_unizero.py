"""LightZero: UniZero's `_forward_learn` and `compute_loss` with prioritised replay and CartPole's networks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn

import gradscale_ext as gs

from . import lightzero
from .checkout import Checkout, Edit, Settings
from .lockstep import Idle, Side, clear, leaves
from .project import Project

BATCH, STEPS, OBSERVATION, ACTIONS, BINS, EMBEDDING = 256, 5, 4, 2, 101, 64
POLICY, WORLD_MODEL = "lzero/policy/unizero.py", "lzero/model/unizero_world_models/world_model.py"


def losses(world_model, outputs, latent, batch):
    """The result of `multi_step_loss`: losses are averaged over a sample's valid steps.

    `latent` contains the target network's embeddings of the observations.
    """
    mask = batch["mask_padding"]
    steps, bins = mask.shape[1], outputs.logits_value.shape[2]
    scalars = {"label_smoothing": batch["label_smoothing"]}
    heads = {
        "value": gs.TwoHot(gs.Support.muzero(bins // 2), weight=0.5, **scalars),
        "rewards": gs.TwoHot(gs.Support.muzero(bins // 2), **scalars),
        "policy": gs.SoftCrossEntropy(entropy_weight=world_model.policy_entropy_weight),
        "obs": gs.MeanSquaredError(weight=10.0, first_step=1),
    }
    targets = {"value": batch["target_value"], "rewards": batch["rewards"], "policy": batch["target_policy"]}
    decay = world_model.gamma ** torch.arange(steps, device=mask.device)
    average = {name: decay / mask.sum(1, keepdim=True).clamp_min(1) for name in targets}
    average["obs"] = decay / mask[:, 1:].sum(1, keepdim=True).clamp_min(1)
    predictions = {name: getattr(outputs, f"logits_{name}") for name in targets}
    predictions["obs"] = outputs.logits_observations[:, :-1]
    targets["obs"] = latent.reshape(len(mask), steps, -1)[:, 1:]
    return gs.multi_step_loss(
        heads, predictions, targets, step_weights=average, importance_weights=batch["weights"], mask=mask
    )


def priorities(expected, targets, mask):
    """Mean absolute error of the valid steps."""
    return gs.priorities(expected, targets, steps="mean", eps=0.0, mask=mask)


EDITS = [
    Edit(POLICY, "_forward_learn", "# Convert to categorical distributions", "# Prepare batch for GPT model"),
    Edit(
        POLICY,
        "_forward_learn",
        "batch_for_gpt['rewards'] = ",
        "batch_for_gpt['mask_padding'] = ",
        """
        batch_for_gpt['rewards'], batch_for_gpt['weights'] = target_reward[:, :-1], weights
        batch_for_gpt['label_smoothing'] = self._cfg.label_smoothing_eps
        """,
    ),
    Edit(
        POLICY,
        "_forward_learn",
        "batch_for_gpt['target_value'] = ",
        "# ====",
        "batch_for_gpt['target_value'] = target_value[:, :-1]",
    ),
    Edit(
        POLICY,
        "_forward_learn",
        "weighted_total_loss = apply_per_sample_is_weights(",
        "# ====",
        "weighted_total_loss = losses.intermediate_losses['weighted_total']",
    ),
    Edit(WORLD_MODEL, "compute_loss", "if self.config.use_priority:", "if self.obs_type == 'image':"),
    Edit(
        WORLD_MODEL,
        "compute_loss",
        "# Compute labels for observations, rewards, and ends",
        "# Compute timesteps",
        """
        out = losses(self, outputs, target_obs_embeddings, batch)
        loss_obs, loss_rewards, loss_value, loss_policy = (
            out.per_step[name] for name in ('obs', 'rewards', 'value', 'policy')
        )
        policy_entropy = torch.where(batch['mask_padding'], out.entropy['policy'], 0)
        orig_policy_loss = loss_policy + self.policy_entropy_weight * policy_entropy
        value_priority = priorities(out.expected['value'], batch['target_value'], batch['mask_padding'])
        """,
    ),
    Edit(
        WORLD_MODEL,
        "compute_loss",
        "per_sample_kwargs = {}",
        "# ====",
        "per_sample_kwargs = {'weighted_total': out.loss}",
    ),
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    from lzero.model.unizero_world_models import world_model
    from lzero.policy import unizero

    def edited(file: str) -> Any:
        names = {"losses": losses, "priorities": priorities}
        return checkout.edited(file, [edit for edit in EDITS if edit.file == file], names)

    ours = _side(edited(POLICY).UniZeroPolicy, edited(WORLD_MODEL).WorldModel)
    return _side(unizero.UniZeroPolicy, world_model.WorldModel), ours


def _config(policy_class: Any) -> Settings:
    """The policy's defaults, updated by CartPole's configuration."""
    from zoo.classic_control.cartpole.config import cartpole_unizero_config

    changes = cartpole_unizero_config.main_config["policy"]
    config = Settings(policy_class.config).updated(Settings(changes))
    model = {"device": "cpu", "use_priority": True, "num_unroll_steps": STEPS, "last_linear_layer_init_zero": False}
    changes = {"cuda": False, "device": "cpu", "batch_size": BATCH, "monitor_norm_freq": 0, "accumulation_steps": 1}
    return config.updated(Settings(changes | {"model": {"world_model_cfg": model}}))


def _policy(policy_class: Any, world_model_class: Any) -> Any:
    from lzero.model.common import RepresentationNetworkMLP
    from lzero.model.unizero_world_models.tokenizer import Tokenizer

    torch.manual_seed(0)
    policy = policy_class()
    policy._cfg = config = _config(policy_class)
    encoder = RepresentationNetworkMLP(OBSERVATION, EMBEDDING)
    policy._model = model = nn.Module()  # `UniZeroModel` passes arguments that the encoder of vectors does not accept
    model.tokenizer = Tokenizer(encoder, None, with_lpips=False, obs_type="vector")
    model.world_model = world_model_class(config.model.world_model_cfg, model.tokenizer)
    policy._init_learn()
    policy._collect_mcts_temperature = policy._collect_epsilon = 0.0
    return policy


def _side(policy_class: Any, world_model_class: Any) -> Side:
    policy = _policy(policy_class, world_model_class)

    def step(data: Any) -> dict[str, Any]:
        found = policy._forward_learn(data)
        names = {"weighted_total_loss": "loss", "value_priority_orig": "priorities"}
        logged = ("obs_loss", "reward_loss", "value_loss", "policy_loss", "orig_policy_loss", "policy_entropy")
        names |= {name: name for name in logged}
        return {name: found[key] for key, name in names.items()}

    return Side(step, [policy._optimizer_world_model], _loss_alone(_policy(policy_class, world_model_class)))


def _loss_alone(policy: Any) -> Any:
    """Losses for given outputs of the transformer and given latent states."""
    sizes = {"observations": EMBEDDING, "rewards": BINS, "value": BINS, "policy": ACTIONS}
    every = leaves(*([BATCH, STEPS, size] for size in sizes.values()))
    outputs = SimpleNamespace(**{f"logits_{name}": leaf for name, leaf in zip(sizes, every, strict=True)})
    outputs.output_sequence = torch.zeros(1)
    latent, data = torch.randn(BATCH * STEPS, 1, EMBEDDING), batch(0)
    model, target = policy._learn_model.world_model, policy._target_model.world_model
    model.forward = lambda *_, **__: outputs
    for tokenizer in (model.tokenizer, target.tokenizer):
        tokenizer.encode_to_obs_embeddings = lambda _: latent
    policy._optimizer_world_model = Idle()

    def loss() -> list[torch.Tensor]:
        clear(every)
        policy._forward_learn(data)
        return every

    return loss


def batch(seed: int) -> Any:
    random = numpy.random.default_rng(seed)
    valid = (numpy.arange(STEPS + 1) < random.integers(2, STEPS + 2, (BATCH, 1))).astype(float)
    observations = random.normal(size=(BATCH, OBSERVATION * (STEPS + 1)))
    actions, times = random.integers(0, ACTIONS, (BATCH, STEPS)), numpy.arange(STEPS) + numpy.zeros((BATCH, 1), int)
    rewards, values = random.normal(size=(BATCH, STEPS + 1)), random.normal(scale=20, size=(BATCH, STEPS + 1))
    policies = random.dirichlet([1.0] * ACTIONS, (BATCH, STEPS + 1))
    current = [observations, actions, None, valid, numpy.arange(BATCH), random.random(BATCH), None, times]
    return current, [rewards, values, policies], seed


class _Target:
    """A target network, which is not updated here."""

    def __init__(self, model: Any, **_: Any):
        self.world_model = copy.deepcopy(model.world_model)

    def train(self) -> None: ...

    def update(self, _: Any) -> None: ...


PROJECT = Project(
    name="LightZero-unizero",
    repository=lightzero.PROJECT.repository,
    commit=lightzero.PROJECT.commit,
    marker=POLICY,
    case=f"UniZero policy with priorities, CartPole's networks: B {BATCH}, T {STEPS}, {BINS} bins",
    edits=EDITS,
    sides=sides,
    batch=batch,
    stand_ins={
        **lightzero.PROJECT.stand_ins,
        **{name: {} for name in ("torchvision", "xxhash")},
        "ding.model": {"model_wrap": _Target},
        "easydict": {"EasyDict": lambda found: found},
    },
)
