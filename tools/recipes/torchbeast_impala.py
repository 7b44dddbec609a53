"""TorchBeast: `learn` of `monobeast.py`, IMPALA's learner step, with its network for Atari."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import gradscale_ext as gs

from .checkout import Checkout, Edit
from .lockstep import Idle, Side, clear, leaves
from .project import Project

BATCH, STEPS, ACTIONS, LOSS_BATCH = 4, 20, 6, 32
FRAME = (4, 84, 84)
SCRIPT = "torchbeast/monobeast.py"


def log_probs_of(logits, actions):
    return logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def losses_of(outputs, batch, rewards, bootstrap_value, flags):
    """The output of the loss, and its terms as TorchBeast has them. All tensors are `[T, B]`."""
    logits, values, actions = outputs["policy_logits"], outputs["baseline"], batch["action"]
    with torch.no_grad():
        behaviour = log_probs_of(batch["policy_logits"], actions)
        vtrace = gs.vtrace(
            rewards,
            torch.cat([values.detach(), bootstrap_value.detach()[None]]),
            ratios=(log_probs_of(logits, actions) - behaviour).exp(),
            discount=flags.discounting,
            terminated=batch["done"],
            batch_first=False,
        )
    loss_fn = gs.MultiStepLoss(
        policy=gs.PolicyGradient(surrogate="log", entropy_weight=flags.entropy_cost),
        value=gs.ClippedSquaredError(clip=None, weight=flags.baseline_cost / 2),
    )
    fields = {"actions": actions, "advantages": vtrace.advantages}
    targets = {"policy": fields, "value": {"returns": vtrace.targets}}
    out = loss_fn({"policy": logits, "value": values}, targets, reduction="sum", batch_first=False)
    entropy_loss = -flags.entropy_cost * out.entropy["policy"].sum()
    return out.loss, out.head_losses["policy"] - entropy_loss, out.head_losses["value"], entropy_loss


EDITS = [
    Edit(
        SCRIPT,
        "learn",
        'discounts = (~batch["done"])',
        "episode_returns = batch[",
        """
        total_loss, pg_loss, baseline_loss, entropy_loss = losses_of(
            learner_outputs, batch, clipped_rewards, bootstrap_value, flags
        )
        """,
    ),
    Edit(
        SCRIPT,
        "learn",
        "nn.utils.clip_grad_norm_(",
        "optimizer.step()",
        "gs.clip_gradients_(model.parameters(), flags.grad_norm_clipping)",
    ),
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    from torchbeast import monobeast

    edited = checkout.edited(SCRIPT, EDITS, {"gs": gs, "losses_of": losses_of})
    return _side(monobeast), _side(edited)


def _side(module: Any) -> Side:
    torch.manual_seed(0)
    model, actor = (module.Net(FRAME, ACTIONS) for _ in range(2))
    flags = module.parser.parse_args([])
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=flags.learning_rate, momentum=flags.momentum, eps=flags.epsilon, alpha=flags.alpha
    )

    def step(data: Any) -> dict[str, Any]:
        found = module.learn(flags, actor, model, data, (), optimizer, SimpleNamespace(step=lambda: None))
        return {name: torch.tensor(value) for name, value in found.items() if name.endswith("loss")}

    return Side(step, [optimizer], _loss_alone(module, flags), [model, actor])


def _loss_alone(module: Any, flags: Any) -> Any:
    policy, values = leaves([STEPS + 1, LOSS_BATCH, ACTIONS], [STEPS + 1, LOSS_BATCH])
    data = batch(0, LOSS_BATCH, frame=(1,))
    nothing = SimpleNamespace(step=lambda: None, load_state_dict=lambda _: None)

    class Model:
        def __call__(self, *_: Any) -> Any:
            return {"policy_logits": policy, "baseline": values}, ()

        def parameters(self) -> list[Any]:
            return []

        def state_dict(self) -> dict[str, Any]:
            return {}

    def loss() -> list[torch.Tensor]:
        clear([policy, values])
        module.learn(flags, nothing, Model(), data, (), Idle(), nothing)
        return [policy, values]

    return loss


def batch(seed: int, count: int = BATCH, frame: tuple[int, ...] = FRAME) -> dict[str, Any]:
    """Rollouts of actors, with one step in twenty ending an episode."""
    random = torch.Generator().manual_seed(seed)
    shape = (STEPS + 1, count)
    numbers = lambda *sizes: torch.randn(*shape, *sizes, generator=random)
    draw = lambda high, *sizes: torch.randint(high, (*shape, *sizes), generator=random)
    return {
        "frame": draw(256, *frame).to(torch.uint8),
        "reward": numbers(),
        "done": torch.rand(shape, generator=random) < 0.05,
        "episode_return": numbers(),
        "policy_logits": 0.3 * numbers(ACTIONS),
        "action": draw(ACTIONS),
        "last_action": draw(ACTIONS),
    }


PROJECT = Project(
    name="torchbeast",
    repository="facebookresearch/torchbeast",
    commit="0af07b051a2176a8f9fd20c36891ba2bba6bae68",
    marker=SCRIPT,
    case=f"IMPALA, Atari's network: B {BATCH} (loss alone {LOSS_BATCH}), T {STEPS}, {ACTIONS} actions",
    edits=EDITS,
    sides=sides,
    batch=batch,
    steps=5,
    stand_ins={"torchbeast.atari_wrappers": {}, "torchbeast.core.file_writer": {}},
)
