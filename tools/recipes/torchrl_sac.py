"""TorchRL: the critics of `SACLoss`, an ensemble by `torch.vmap`, with squared errors and prioritised replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import gradscale_ext as gs

from .checkout import Checkout, Edit
from .lockstep import Side, clear, leaves
from .project import Project

BATCH, OBSERVATION, ACTION, HIDDEN, CRITICS = 256, 17, 6, 256, 2


def critics_loss(pred_val, target_value, weights):
    """Loss of N critics with predictions `[N, B]`, and each sample's largest error. Critics are treated as steps."""
    target = target_value.expand_as(pred_val)
    out = gs.multi_step_loss(
        {"q": gs.MeanSquaredError()},
        {"q": pred_val},
        {"q": target},
        importance_weights=None if weights is None else weights / weights.mean(),
        batch_first=False,
    )
    return out.loss, gs.priorities(pred_val, target, steps="max", eps=0.0, batch_first=False)


EDITS = [
    Edit(
        "torchrl/objectives/sac.py",
        "qvalue_v2_loss",
        "td_error = ",
        "return loss_qval",
        """
        loss_qval, td_error = critics_loss(pred_val, target_value, weights)
        metadata = {"td_error": td_error}
        """,
    ),
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    from torchrl.objectives import sac

    edited = checkout.edited("torchrl/objectives/sac.py", EDITS, {"critics_loss": critics_loss})
    return _side(sac.SACLoss), _side(edited.SACLoss)


class _Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = _mlp(OBSERVATION + ACTION, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat((observation, action), -1))


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    layers = (nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))
    return nn.Sequential(*layers)


def _side(loss_class: Any) -> Side:
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl.data import Bounded
    from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

    torch.manual_seed(0)
    network = nn.Sequential(_mlp(OBSERVATION, 2 * ACTION), NormalParamExtractor())
    module = TensorDictModule(network, ["observation"], ["loc", "scale"])
    spec = Bounded(-torch.ones(ACTION), torch.ones(ACTION), (ACTION,))
    actor = ProbabilisticActor(module, in_keys=["loc", "scale"], spec=spec, distribution_class=TanhNormal)
    critic = ValueOperator(_Critic(), in_keys=["observation", "action"])
    objective = loss_class(actor, critic, num_qvalue_nets=CRITICS, loss_function="l2")
    objective.make_value_estimator(gamma=0.99)
    optimizer = torch.optim.Adam(objective.parameters(), lr=3e-4)

    def step(data: Any) -> dict[str, Any]:
        data = data.clone()
        found = objective(data)
        optimizer.zero_grad()
        (found["loss_actor"] + found["loss_qvalue"] + found["loss_alpha"]).backward()
        optimizer.step()
        return {"loss": found["loss_qvalue"], "priorities": data["td_error"]}

    return Side(step, [optimizer], _loss_alone(loss_class))


def _loss_alone(loss_class: Any) -> Any:
    """Loss of the critics, from given predictions of the ensemble to their gradients."""
    from torchrl.envs.utils import ExplorationType
    from torchrl.objectives.utils import _reduce

    (prediction,), target, data = leaves([CRITICS, BATCH, 1]), torch.randn(BATCH), batch(0)
    stand_in = SimpleNamespace(
        _maybe_get_priority_weight=lambda found: found["priority_weight"],
        _compute_target_v2=lambda _: target,
        _vmap_qnetworkN0=lambda *_: {"value": prediction},
        _reduce_loss=lambda loss, weights, **_: _reduce(loss, "mean", weights=weights),
        qvalue_network=SimpleNamespace(in_keys=["observation", "action"]),
        qvalue_network_params=None,
        tensor_keys=SimpleNamespace(state_action_value="value"),
        loss_function="l2",
        deterministic_sampling_mode=ExplorationType.DETERMINISTIC,
    )

    def loss() -> list[torch.Tensor]:
        clear([prediction])
        loss_class.qvalue_v2_loss(stand_in, data)[0].backward()
        return [prediction]

    return loss


def batch(seed: int) -> Any:
    from tensordict import TensorDict

    random = torch.Generator().manual_seed(seed)
    observation, following = (torch.randn(BATCH, OBSERVATION, generator=random) for _ in range(2))
    done = torch.rand(BATCH, 1, generator=random) < 0.1
    after = {"observation": following, "reward": torch.randn(BATCH, 1, generator=random)}
    after |= {"done": done, "terminated": done}
    action = 2 * torch.rand(BATCH, ACTION, generator=random) - 1
    weights = torch.rand(BATCH, generator=random)
    found = {"observation": observation, "action": action, "next": after, "priority_weight": weights}
    return TensorDict(found, [BATCH])


PROJECT = Project(
    name="rl",
    repository="pytorch/rl",
    commit="ae9719f17b1517af5c2523a36c4616f003ee55cf",
    marker="torchrl/objectives/sac.py",
    case=f"SAC, {CRITICS} critics and an actor of two layers of {HIDDEN}: B {BATCH}, {OBSERVATION} observations",
    edits=EDITS,
    sides=sides,
    batch=batch,
)
