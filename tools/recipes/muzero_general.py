"""muzero-general: `Trainer.update_weights` with the loss of CartPole's configuration. Stubs replace Ray and gym."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy
import torch

import gradscale_ext as gs

from .checkout import Checkout, Edit
from .lockstep import Idle, Side, clear, leaves
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
    return out.loss, priorities.cpu().numpy(), *(out.per_step[name].sum(1) for name in heads)


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
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    import models
    import trainer

    from games.cartpole import MuZeroConfig

    config = MuZeroConfig()
    config.train_on_gpu = False
    torch.manual_seed(0)
    start = {"weights": models.MuZeroNetwork(config).get_weights(), "training_step": 0, "optimizer_state": None}
    edited = checkout.edited("trainer.py", EDITS, {"losses": losses})
    return _side(trainer.Trainer, start, config), _side(edited.Trainer, start, config)


def _side(trainer_class: Any, start: dict[str, Any], config: Any) -> Side:
    trainer = trainer_class(copy.deepcopy(start), config)

    def step(data: Any) -> dict[str, Any]:
        names = ("priorities", "loss", "logged value", "logged reward", "logged policy")
        return dict(zip(names, trainer.update_weights(data), strict=True))

    return Side(step, [trainer.optimizer], _loss_alone(trainer_class, config), [trainer.model])


def _loss_alone(trainer_class: Any, config: Any) -> Any:
    bins = 2 * config.support_size + 1
    value, reward, hidden = (leaves(*[[BATCH, size]] * STEPS) for size in (bins, bins, config.encoding_size))
    policy = leaves(*[[BATCH, ACTIONS]] * STEPS)
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


PROJECT = Project(
    name="muzero-general",
    repository="werner-duvaud/muzero-general",
    commit="0825bd544fc172a2e2dcc96d43711123222c4a2f",
    marker="trainer.py",
    case=f"CartPole's fully connected network: B {BATCH}, K {STEPS - 1}, 21 bins",
    edits=EDITS,
    sides=sides,
    batch=batch,
    stand_ins={"ray": {"remote": lambda found: found}, "gym": {}},
)
