"""TD-MPC2: `TDMPC2._update` and `update_pi` for states and actions of dog-run's sizes, not compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import gradscale_ext as gs

from .checkout import Checkout, Edit
from .lockstep import CPU, Idle, Side, clear, leaves, on
from .project import Project

BATCH, HORIZON, OBSERVATION, ACTION, LATENT, CRITICS, BINS = 256, 3, 223, 38, 512, 5, 101


def losses(agent, obs, action, next_z, reward, terminated, td_targets, task):
    """The unroll, the loss, its parts for the log, and the logits of the end of the episode."""
    cfg, model = agent.cfg, agent.model
    states = [model.encode(obs[0], task)]
    for chosen in action:
        states.append(model.next(states[-1], chosen, task))
    zs = torch.stack(states)

    critics = {f"q{i}": gs.TwoHot(gs.Support.tdmpc2(), weight=cfg.value_coef / cfg.num_q) for i in range(cfg.num_q)}
    heads = critics | {
        "reward": gs.TwoHot(gs.Support.tdmpc2(), weight=cfg.reward_coef),
        "consistency": gs.MeanSquaredError(weight=cfg.consistency_coef),
    }
    predictions = dict(zip(critics, model.Q(zs[:-1], action, task, return_type="all"), strict=True))
    predictions |= {"reward": model.reward(zs[:-1], action, task), "consistency": zs[1:]}
    targets = dict.fromkeys(critics, td_targets.squeeze(-1))
    targets |= {"reward": reward.squeeze(-1), "consistency": next_z}
    decay = [cfg.rho**t / cfg.horizon for t in range(cfg.horizon)]
    weights = {name: decay for name in heads}

    ends = None
    if cfg.episodic:
        ends = model.termination(zs[1:], task, unnormalized=True)
        heads["end"] = gs.BinaryCrossEntropy(weight=cfg.termination_coef)
        predictions["end"], targets["end"] = ends.squeeze(-1), terminated.squeeze(-1)
        weights["end"] = [1 / cfg.horizon] * cfg.horizon

    out = gs.multi_step_loss(heads, predictions, targets, step_weights=weights, batch_first=False)
    parts = {name: out.head_losses[name] / head.weight for name, head in heads.items()}
    parts["value"] = sum(parts[name] for name in critics) / cfg.num_q
    return zs, out.loss, parts, ends


def policy_loss(cfg, entropy, qs):
    """The policy's loss over all H + 1 states; `entropy` and `qs` are `[H + 1, B, 1]`."""
    decay = [cfg.rho**t / len(qs) for t in range(len(qs))]
    losses = -(cfg.entropy_coef * entropy + qs).squeeze(-1)
    return gs.reduce_multi_step(losses, step_weights=decay, batch_first=False).loss


EDITS = [
    Edit(
        "tdmpc2/tdmpc2.py",
        "update_pi",
        "rho = torch.pow",
        "pi_loss.backward()",
        'pi_loss = policy_loss(self.cfg, info["scaled_entropy"], qs)',
    ),
    Edit(
        "tdmpc2/tdmpc2.py",
        "_update",
        "# Latent rollout",
        "# Update model",
        """
        zs, total_loss, parts, termination_pred = losses(
        \tself, obs, action, next_z, reward, terminated, td_targets, task
        )
        consistency_loss, reward_loss, value_loss = (parts[name] for name in ("consistency", "reward", "value"))
        termination_loss = parts.get("end", 0.0)
        """,
    ),
]


NAMES = {"losses": losses, "policy_loss": policy_loss}


def sides(checkout: Checkout, device: torch.device = CPU) -> tuple[Side, Side]:
    import tdmpc2

    edited = checkout.edited("tdmpc2/tdmpc2.py", EDITS, NAMES)
    return _side(tdmpc2.TDMPC2, device), _side(edited.TDMPC2, device)


def _config() -> SimpleNamespace:
    return SimpleNamespace(
        **dict.fromkeys(("multitask", "compile"), False),
        **{"episodic": True, "batch_size": BATCH, "reward_coef": 0.1, "value_coef": 0.1, "termination_coef": 1},
        **{"consistency_coef": 20, "rho": 0.5, "lr": 3e-4, "enc_lr_scale": 0.3, "grad_clip_norm": 20, "tau": 0.01},
        **{"discount_denom": 5, "discount_min": 0.95, "discount_max": 0.995, "iterations": 6, "horizon": HORIZON},
        **{"log_std_min": -10, "log_std_max": 2, "entropy_coef": 1e-4, "num_bins": BINS, "vmin": -10, "vmax": 10},
        **{"bin_size": 20 / (BINS - 1), "num_enc_layers": 2, "enc_dim": 256, "mlp_dim": 512, "latent_dim": LATENT},
        **{"task_dim": 0, "num_q": CRITICS, "dropout": 0.01, "simnorm_dim": 8, "episode_length": 500, "obs": "state"},
        **{"obs_shape": {"state": (OBSERVATION,)}, "action_dim": ACTION},
    )


def _side(agent_class: Any, device: torch.device) -> Side:
    torch.manual_seed(0)
    with device:
        agent = agent_class(_config())

    def step(*data: torch.Tensor) -> dict[str, Any]:
        found = agent._update(*data)
        kept = ("total_loss", "pi_loss", "consistency_loss", "reward_loss", "value_loss", "termination_loss")
        return {"loss" if name == "total_loss" else name: found[name] for name in kept}

    return Side(step, [agent.optim, agent.pi_optim], _loss_alone(agent_class, device), [agent], tuple)


def _loss_alone(agent_class: Any, device: torch.device) -> Any:
    """Loss of the model, without the policy."""
    states = leaves(*[[BATCH, LATENT]] * (HORIZON + 1), device=device)
    sizes = [CRITICS, HORIZON, BATCH, BINS], [HORIZON, BATCH, BINS], [HORIZON, BATCH, 1]
    q, reward, ends = leaves(*sizes, device=device)
    every, data, cfg = [*states, q, reward, ends], on(device, batch(0)), _config()
    following, returns = torch.randn(HORIZON, BATCH, LATENT).to(device), torch.randn(HORIZON, BATCH, 1).to(device)

    def loss() -> list[torch.Tensor]:
        clear(every)
        unrolled = iter(states[1:])
        nothing = lambda *_: None
        model = SimpleNamespace(
            encode=lambda obs, _: following if obs.ndim == 3 else states[0],
            next=lambda *_: next(unrolled),
            Q=lambda *_, **__: q,
            reward=lambda *_: reward,
            termination=lambda *_, **__: ends,
            parameters=list,
            **dict.fromkeys(("train", "eval", "soft_update_target_Q"), nothing),
        )
        parts = {"cfg": cfg, "device": device, "model": model, "optim": Idle()}
        parts |= {"_td_target": lambda *_: returns, "update_pi": lambda *_: {}}
        agent_class._update(SimpleNamespace(**parts), *data)
        return every

    return loss


def batch(seed: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=random)
    terminated = (torch.rand(HORIZON, BATCH, 1, generator=random) < 0.05).to(torch.get_default_dtype())
    observations, actions = normal(HORIZON + 1, BATCH, OBSERVATION), normal(HORIZON, BATCH, ACTION).tanh()
    return observations, actions, normal(HORIZON, BATCH, 1), terminated


# ---- As one CUDA graph -----------------------------------------------------------------------------------------------

AGENT_EDITS = [
    Edit(
        "tdmpc2/tdmpc2.py",
        "__init__",
        "], lr=self.cfg.lr, capturable=True)",
        "self.model.eval()",
        """
        ], lr=self.cfg.lr, fused=True, capturable=True)
        policy = self.model._pi.parameters()
        self.pi_optim = torch.optim.Adam(policy, lr=self.cfg.lr, eps=1e-5, fused=True, capturable=True)
        """,
    ),
]
MODEL_EDITS = [
    Edit("tdmpc2/common/world_model.py", "pi", '"action_prob"', '"entropy"', '"action_prob": mean.new_ones(()),'),
]


def captured(checkout: Checkout, device: torch.device) -> Side:
    edited = checkout.edited("tdmpc2/tdmpc2.py", [*EDITS, *AGENT_EDITS], NAMES)
    edited.WorldModel = checkout.edited("tdmpc2/common/world_model.py", MODEL_EDITS, {}).WorldModel
    return _side(edited.TDMPC2, device)


PROJECT = Project(
    name="tdmpc2",
    repository="nicklashansen/tdmpc2",
    commit="e9f59321933cbc8e11a002b842adc7d4ffae8ff1",
    marker="tdmpc2/tdmpc2.py",
    case=f"the model of 5 M parameters: B {BATCH}, H {HORIZON}, {CRITICS} critics of {BINS} bins, episodic",
    edits=EDITS,
    sides=sides,
    batch=batch,
    captured=captured,
    capture_edits=[*AGENT_EDITS, *MODEL_EDITS],
    roots=["tdmpc2"],
    # The networks are made on the device, because to() refuses parameters that tensordict leaves on the meta device.
    texts={"WorldModel(cfg).to(self.device)": "WorldModel(cfg)"},
    texts_on_cpu={"'cuda:0'": "'cpu'", "capturable=True": "capturable=False"},
)
