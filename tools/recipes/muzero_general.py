"""muzero-general: `Trainer.update_weights` with the loss of CartPole's configuration. Stubs replace Ray and gym."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import torch

import gradscale_ext as gs

from .checkout import Checkout, Edit
from .lockstep import CPU, Idle, Side, clear, leaves
from .project import Project

BATCH, STEPS, ACTIONS = 128, 11, 2


def losses(config, predictions, target_value, target_reward, target_policy, weights, gradient_scale):
    """Loss, priorities of all steps, and the sums over steps that are logged: value, reward and policy."""
    value, reward, policy = zip(*predictions, strict=True)
    support = gs.Support.muzero(config.support_size)
    heads = {
        "value": gs.TwoHot(support, weight=config.value_loss_weight),
        "reward": gs.TwoHot(support, first_step=1),
        "policy": gs.SoftCrossEntropy(),
    }
    scale = 1 / gradient_scale
    scale[:, 0] = 1
    out = gs.multi_step_loss(
        heads,
        {"value": value, "reward": reward[1:], "policy": policy},
        {"value": target_value, "reward": target_reward[:, 1:], "policy": target_policy},
        step_gradient_scale=scale,
        importance_weights=weights if config.PER else None,
    )
    priorities = gs.priorities(out.expected["value"], target_value, steps="all", alpha=config.PER_alpha, eps=0.0)
    return out.loss, priorities, *(out.per_step[name].sum(1) for name in heads)


EDITS = [
    Edit("trainer.py", "update_weights", "target_value = models.scalar_to_support", "## Generate predictions"),
    Edit(
        "trainer.py",
        "update_weights",
        "value_loss, reward_loss, policy_loss = (0",
        "# Optimize",
        """
        loss, priorities, value_loss, reward_loss, policy_loss = losses(
            self.config, predictions, target_value, target_reward, target_policy, weight_batch, gradient_scale_batch
        )
        """,
    ),
    Edit(
        "trainer.py",
        "update_weights",
        "return (",
        "# For log purpose",
        """
        return (
            priorities.cpu().numpy(),
        """,
    ),
]


def sides(checkout: Checkout, device: torch.device = CPU) -> tuple[Side, Side]:
    import trainer

    edited = checkout.edited("trainer.py", EDITS, {"losses": losses})
    return _side(trainer.Trainer, device), _side(edited.Trainer, device)


def _side(trainer_class: Any, device: torch.device) -> Side:
    trainer = _trainer(trainer_class, device)

    def prepare(data: Any) -> tuple[Any, ...]:
        trainer.update_lr()
        return (data,)

    step = lambda data: _named(trainer.update_weights(data))
    return Side(step, [trainer.optimizer], _loss_alone(trainer_class, trainer.config, device), [trainer.model], prepare)


def _named(results: Any) -> dict[str, Any]:
    names = ("priorities", "loss", "logged value", "logged reward", "logged policy")
    return dict(zip(names, results, strict=True))


def _trainer(trainer_class: Any, device: torch.device) -> Any:
    import models

    from games.cartpole import MuZeroConfig

    config = MuZeroConfig()
    config.train_on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    start = {"weights": models.MuZeroNetwork(config).get_weights(), "training_step": 0, "optimizer_state": None}
    return trainer_class(start, config)


def _loss_alone(trainer_class: Any, config: Any, device: torch.device) -> Any:
    bins = 2 * config.support_size + 1
    made = lambda size: leaves(*[[BATCH, size]] * STEPS, device=device)
    value, reward, policy, hidden = map(made, (bins, bins, ACTIONS, config.encoding_size))
    predicted = list(zip(value, reward, policy, hidden, strict=True))
    every = [*value, *reward, *policy]
    data = batch(0)

    def loss() -> list[torch.Tensor]:
        clear(every)
        steps = iter(predicted)
        model = SimpleNamespace(
            parameters=lambda: iter(every),
            initial_inference=lambda _: next(steps),
            recurrent_inference=lambda *_: next(steps),
        )
        function = trainer_class.loss_function
        parts = {"config": config, "model": model, "optimizer": Idle(), "loss_function": function, "training_step": 0}
        trainer_class.update_weights(SimpleNamespace(**parts), data)
        return every

    return loss


def batch(seed: int) -> tuple[Any, ...]:
    random = numpy.random.default_rng(seed)
    policy = random.dirichlet([1.0] * ACTIONS, (BATCH, STEPS))
    remaining = random.integers(1, STEPS, (BATCH, 1)).repeat(STEPS, 1)
    return (
        random.normal(size=(BATCH, 1, 1, 4)),
        random.integers(0, ACTIONS, (BATCH, STEPS)),
        random.normal(scale=20, size=(BATCH, STEPS)),
        random.normal(size=(BATCH, STEPS)),
        policy,
        random.random(BATCH),
        remaining,
    )


# ---- As one CUDA graph -----------------------------------------------------------------------------------------------


def tensors(batch, device):
    """The tensors that `update_weights` makes from NumPy arrays."""
    observation, action, value, reward, policy, weights, gradient_scale = (torch.tensor(part) for part in batch)
    numbers = (part.float().to(device) for part in (value, reward, policy, weights, gradient_scale))
    return observation.float().to(device), action.long().to(device).unsqueeze(-1), *numbers


TRAINER_EDITS = [
    Edit(
        "trainer.py",
        "__init__",
        "self.optimizer = torch.optim.Adam(",
        "else:",
        """
        self.optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=torch.tensor(self.config.lr_init, device=next(self.model.parameters()).device),
            weight_decay=self.config.weight_decay,
            fused=True,
        )
        """,
    ),
    Edit("trainer.py", "update_weights", "# Keep values as scalars", "# observation_batch: batch, channels"),
    Edit(
        "trainer.py",
        "update_weights",
        "self.training_step += 1",
        "def update_lr(",
        """
        return priorities, loss, value_loss.mean(), reward_loss.mean(), policy_loss.mean()

        """,
    ),
    Edit("trainer.py", "update_lr", 'param_group["lr"] = lr', "@staticmethod", 'param_group["lr"].fill_(lr)'),
]


def without_mask(function: str, scale: str, end: str) -> Edit:
    """Add to small scales by `torch.where`, because a mask as an index has a size that a graph cannot know."""
    added = f"""
        small = {scale} < 1e-5
        {scale} = torch.where(small, {scale} + 1e-5, {scale})
        """
    return Edit("models.py", function, f"{scale}[{scale} < 1e-5]", end, added)


MODEL_EDITS = [
    without_mask("representation", "scale_encoded_state", "encoded_state_normalized"),
    Edit(
        "models.py",
        "dynamics",
        "action_one_hot = (",
        "action_one_hot.scatter_",
        "action_one_hot = torch.zeros((action.shape[0], self.action_space_size), device=action.device)",
    ),
    without_mask("dynamics", "scale_next_encoded_state", "next_encoded_state_normalized"),
    Edit(
        "models.py",
        "initial_inference",
        "reward = torch.log(",
        "return (",
        """
        reward = value.new_full((len(observation), self.full_support_size), -math.inf)
        reward[:, self.full_support_size // 2] = 0

        """,
    ),
]


def captured(checkout: Checkout, device: torch.device) -> Side:
    edited = checkout.edited("trainer.py", [*EDITS, *TRAINER_EDITS], {"losses": losses})
    edited.models = checkout.edited("models.py", MODEL_EDITS, {})
    trainer = _trainer(edited.Trainer, device)

    def prepare(data: Any) -> tuple[torch.Tensor, ...]:
        trainer.update_lr()
        trainer.training_step += 1
        return tensors(data, device)

    step = lambda *data: _named(trainer.update_weights(data))
    return Side(step, [trainer.optimizer], modules=[trainer.model], prepare=prepare)


PROJECT = Project(
    name="muzero-general",
    repository="werner-duvaud/muzero-general",
    commit="0825bd544fc172a2e2dcc96d43711123222c4a2f",
    marker="trainer.py",
    case=f"CartPole's fully connected network: B {BATCH}, K {STEPS - 1}, 21 bins",
    edits=EDITS,
    sides=sides,
    batch=batch,
    captured=captured,
    capture_edits=[*TRAINER_EDITS, *MODEL_EDITS],
    stand_ins={"ray": {"remote": lambda found: found}, "gym": {}},
)
