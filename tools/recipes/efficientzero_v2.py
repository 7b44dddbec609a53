"""EfficientZeroV2: `Agent.update_weights` for Atari, with its networks, on the CPU and not compiled.

Stubs replace Ray, the environments, the replay buffer and the augmentation.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import torch

import gradscale_ext as gs

from .checkout import Checkout, Edit, Settings
from .lockstep import Idle, Side, clear, leaves
from .project import Project

BATCH, LOSS_BATCH, STEPS, SIZE, ACTIONS, BINS, PROJECTED = 8, 256, 5, 96, 18, 601, 1024
UPDATES = 100_000  # from 30,000 on, the targets of values are mixed


def losses(agent, model, observations, root, action, mask, reward, value, target_policy, weights):
    """The result of `multi_step_loss` for the unroll from `root`, a tuple of state, values and policy logits."""
    config, (state, values, policy) = agent.config, root
    steps, coefficients = config.rl.unroll_steps, config.train
    channels, stack = config.env.obs_shape[0], config.env.n_stack
    critics = [f"value{i}" for i in range(len(values))]
    predictions = {name: [critic] for name, critic in zip(critics, values, strict=True)}
    predictions |= {"policy": [policy], "reward": [], "consistency": []}
    hidden, observed = agent.init_reward_hidden(len(policy)), []
    for k in range(steps):
        state, prefix, values, policy, hidden = model.recurrent_inference(state, action[:, k], hidden, training=True)
        following = model.do_representation(observations[:, channels * k : channels * (k + stack)])
        predictions["consistency"].append(model.do_projection(state, with_grad=True))
        observed.append(model.do_projection(following, with_grad=False))
        found = {"policy": policy, "reward": prefix, **dict(zip(critics, values, strict=True))}
        for name, prediction in found.items():
            predictions[name].append(prediction)
        state.register_hook(lambda gradient: gradient * 0.5)
        if config.model.value_prefix and (k + 1) % config.model.lstm_horizon_len == 0:
            hidden = agent.init_reward_hidden(len(policy))

    support = gs.Support.muzero(config.model.value_support.range[1])
    heads = {name: gs.TwoHot(support, weight=coefficients.value_loss_coeff * 0.5 / len(critics)) for name in critics}
    heads |= {
        "policy": gs.SoftCrossEntropy(weight=coefficients.policy_loss_coeff),
        "reward": gs.TwoHot(support, weight=coefficients.reward_loss_coeff, first_step=1),
        "consistency": gs.NegativeCosine(eps=1e-5, weight=coefficients.consistency_coeff, first_step=1),
    }
    targets = dict.fromkeys(critics, value) | {"policy": target_policy, "reward": reward, "consistency": observed}
    return gs.multi_step_loss(
        heads,
        predictions,
        targets,
        step_gradient_scale=[1 / steps] * (steps + 1),
        importance_weights=weights,
        mask=torch.cat((torch.ones_like(mask[:, :1]), mask[:, :steps]), 1).bool(),
    )


EDITS = [
    Edit("ez/agents/base.py", "update_weights", "# transform value and reward to support", "with autocast():"),
    Edit(
        "ez/agents/base.py",
        "update_weights",
        "if self.config.model.value_support.type == 'symlog':",
        "# loss of first step",
    ),
    Edit(
        "ez/agents/base.py",
        "update_weights",
        "# update priority",
        "optimizer.zero_grad()",
        """
        with autocast():
            out = losses(
                self, model, obs_target_batch, (states, values, policies), action_batch, mask_batch,
                target_value_prefixes, this_target_values, target_policies, weights
            )
        critics = [name for name in out.expected if name.startswith("value")]
        smallest = torch.stack([out.expected[name] for name in critics]).amin(0)
        fresh_priority = gs.priorities(smallest, this_target_values, eps=self.config.priority.min_prior).cpu().numpy()
        replay_buffer.update_priorities.remote(indices, fresh_priority, make_time)
        weighted_loss, loss, mask = out.loss, out.per_sample, mask_batch[:, -1]
        value_loss = 0.5 * sum(out.per_step[name].sum(1) for name in critics) / len(critics)
        value_prefix_loss, policy_loss = out.per_step["reward"].sum(1), out.per_step["policy"].sum(1)
        consistency_loss, policy_entropy_loss = out.per_step["consistency"].sum(1), torch.zeros(batch_size)
        parameters = model.parameters()
        """,
    ),
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    from ez.agents import base, ez_atari

    edited = checkout.edited("ez/agents/base.py", EDITS, {"losses": losses, "gs": gs})
    ez_atari.EZAtariAgent.update_config = lambda _: None  # would need an environment
    return tuple(_side(checkout, ez_atari, module.Agent.update_weights) for module in (base, edited))


def _config(checkout: Checkout, count: int) -> Settings:
    """The project's settings for Atari."""
    config = checkout.settings("ez/config/config.yaml").updated(checkout.settings("ez/config/exp/atari.yaml"))
    config.env.obs_shape = [3, SIZE, SIZE]
    config.model.init_zero = False  # layers that start at zero output little more than rounding errors
    config.train.batch_size = count
    for support in (config.model.reward_support, config.model.value_support):
        support.size = BINS
    return config


def _side(checkout: Checkout, module: Any, update: Any) -> Side:
    torch.manual_seed(0)
    config = _config(checkout, BATCH)
    agent = module.EZAtariAgent(config)
    agent.obs_shape, agent.action_space_size = config.env.obs_shape, ACTIONS
    agent.input_shape = [config.env.n_stack * 3, SIZE, SIZE]
    model = agent.build_model()
    settings = {name: config.optimizer[name] for name in ("lr", "momentum", "weight_decay")}
    optimizer = torch.optim.SGD(model.parameters(), **settings)

    def step(data: Any) -> dict[str, Any]:
        _, (found, _, distributions) = update(agent, model, data, optimizer, *_surroundings(), model)
        logged = {name.removeprefix("loss/"): value for name, value in found.items()}
        logged["loss"] = logged.pop("weighted")
        return {**logged, "priorities": distributions["dist/recent_priority"]}

    return Side(step, [optimizer], _loss_alone(_config(checkout, LOSS_BATCH), update))


def _surroundings() -> tuple[Any, Any, int]:
    """A replay buffer, a scaler of losses and the number of updates."""
    buffer = SimpleNamespace(update_priorities=SimpleNamespace(remote=lambda *_: None))
    return buffer, torch.amp.GradScaler(enabled=False), UPDATES


def _loss_alone(config: Settings, update: Any) -> Any:
    states, projections = leaves(*[[LOSS_BATCH, 8]] * (STEPS + 1)), leaves(*[[LOSS_BATCH, PROJECTED]] * STEPS)
    values, policies = leaves(*[[1, LOSS_BATCH, BINS]] * (STEPS + 1)), leaves(*[[LOSS_BATCH, ACTIONS]] * (STEPS + 1))
    rewards, observed = leaves(*[[LOSS_BATCH, BINS]] * STEPS), torch.randn(LOSS_BATCH, PROJECTED)
    every, data = [*projections, *values, *policies, *rewards], batch(0, LOSS_BATCH, size=1)
    agent = SimpleNamespace(config=config, init_reward_hidden=lambda _: None, transform=lambda found: found)

    def loss() -> list[torch.Tensor]:
        clear(every)
        following = iter(zip(states[1:], rewards, values[1:], policies[1:], [None] * STEPS, strict=True))
        projected = iter(projections)
        model = SimpleNamespace(
            initial_inference=lambda *_, **__: (states[0], values[0], policies[0]),
            recurrent_inference=lambda *_, **__: next(following),
            do_representation=lambda _: None,
            do_projection=lambda _, with_grad: next(projected) if with_grad else observed,
            parameters=list,
            eval=lambda: None,
        )
        update(agent, model, data, Idle(), *_surroundings(), model)
        return every

    return loss


def batch(seed: int, count: int = BATCH, size: int = SIZE) -> Any:
    random = numpy.random.default_rng(seed)
    observations = random.integers(0, 256, (count, 3 * (4 + STEPS), size, size), dtype=numpy.uint8)
    valid = (numpy.arange(1, STEPS + 1) < random.integers(2, STEPS + 2, (count, 1))).astype(float)
    actions, indices = random.integers(0, ACTIONS, (count, STEPS)), numpy.arange(count)
    rewards = random.normal(size=(count, STEPS + 1))
    values, searched = random.normal(scale=20, size=(2, count, STEPS + 1))
    policies = random.dirichlet([1.0] * ACTIONS, (count, STEPS + 1))
    mixed, unused = (random.random(count) < 0.5).astype(float), numpy.zeros((count, STEPS + 1))
    current = [observations, actions, valid, indices, random.random(count), None, random.random(count)]
    return current, [rewards, values, unused, policies, unused, mixed, unused, searched]


PROJECT = Project(
    name="EfficientZeroV2",
    repository="Shengjiewang-Jason/EfficientZeroV2",
    commit="12b9e775df1f8afb4a1dc854cf722ea84fbfb61d",
    marker="ez/agents/base.py",
    case=f"Atari's networks: B {BATCH} (loss alone {LOSS_BATCH}), K {STEPS}, {BINS} bins",
    edits=EDITS,
    sides=sides,
    batch=batch,
    steps=5,
    stand_ins={
        **{name: {} for name in ("cv2", "wandb", "omegaconf", "ez.envs", "ez.data", "ez.mcts")},
        "ray": {"remote": lambda *_, **__: lambda found: found},
    },
    texts={
        ".cuda()": "",
        # In the project's transform, epsilon x has the wrong sign for x < 0.
        "epsilon * x / scale)": "epsilon * torch.abs(x) / scale)",
    },
)
