"""Whole learner steps, in the usual PyTorch and with this package: networks, loss, backward pass, clipping, optimizer.

Both steps of a pair have networks of the same weights and the same batch, and `check` compares their losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gradscale_ext as gs
import usual

Step = Callable[..., torch.Tensor]
NUM_UNROLL_STEPS = 5
CAPTURABLE = {"fused": True, "capturable": True}
"""Options of optimizers that PyTorch asks for when a step is captured by hand."""


@dataclass
class Pair:
    """A learner step in two ways, each with a model and an optimizer of its own."""

    batch: tuple[torch.Tensor, ...]
    usual: Step
    ours: Step
    states: dict[str, tuple[Any, ...]]
    """What each of the steps changes."""
    networks: dict[str, nn.Module]
    """The networks of each step, whose functions a compiler may replace."""

    def check(self) -> None:
        """Raise if the two steps have other losses."""
        first = [getattr(self, name)(*self.batch).detach() for name in ("usual", "ours")]
        torch.testing.assert_close(first[0], first[1], rtol=1e-3, atol=1e-4)


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width in (inputs, hidden):
        layers += [nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


# ---- MuZero ---------------------------------------------------------------------------------------------------------


class Perceptrons(nn.Module):
    """MuZero's three functions as perceptrons of 256 units."""

    observation = (32,)

    def __init__(self, num_bins: int, actions: int, width: int = 256) -> None:
        super().__init__()
        self.actions = actions
        self.encoder, self.dynamics = mlp(*self.observation, width, width), mlp(width + actions, width, width)
        self.heads = nn.ModuleDict(
            {name: mlp(width, width, size) for name, size in sizes_of(num_bins, actions).items()}
        )

    def predict(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: head(hidden) for name, head in self.heads.items()}

    def initial(self, observation: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        hidden = self.encoder(observation)
        return self.predict(hidden), hidden

    def recurrent(self, hidden: torch.Tensor, action: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        hidden = self.dynamics(torch.cat([hidden, F.one_hot(action, self.actions).float()], 1))
        return self.predict(hidden), hidden


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        block: list[nn.Module] = []
        for _ in range(2):
            block += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        self.block = nn.Sequential(*block[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.block(x))


class Convolutions(Perceptrons):
    """A small residual network of 64 channels on 6 x 6 planes, as for Atari after downsampling."""

    observation = (4, 6, 6)  # type: ignore[assignment]

    def __init__(self, num_bins: int, actions: int, width: int = 64) -> None:
        nn.Module.__init__(self)
        self.actions = actions
        self.encoder = nn.Sequential(nn.Conv2d(4, width, 3, padding=1), *(Residual(width) for _ in range(3)))
        self.dynamics = nn.Sequential(nn.Conv2d(width + 1, width, 3, padding=1), Residual(width))
        self.heads = nn.ModuleDict(
            {name: self._head(width, size) for name, size in sizes_of(num_bins, actions).items()}
        )

    @staticmethod
    def _head(width: int, outputs: int) -> nn.Module:
        planes = nn.Sequential(nn.Conv2d(width, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
        return nn.Sequential(planes, nn.Linear(16 * 36, 32), nn.ReLU(), nn.Linear(32, outputs))

    def recurrent(self, hidden: torch.Tensor, action: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        plane = (action.float() / self.actions).view(-1, 1, 1, 1).expand(-1, 1, *hidden.shape[2:])
        hidden = self.dynamics(torch.cat([hidden, plane], 1))
        return self.predict(hidden), hidden


def sizes_of(num_bins: int, actions: int) -> dict[str, int]:
    return {"value": num_bins, "reward": num_bins, "policy": actions}


def usual_muzero_loss(model: Perceptrons, batch: tuple[torch.Tensor, ...], num_bins: int) -> torch.Tensor:
    """The loss as projects write it: a loop over steps and heads, with targets encoded one by one."""
    observation, actions, weights, *wanted = batch
    targets = dict(zip(("value", "reward", "policy"), wanted, strict=True))
    limit = (num_bins - 1) / 2
    outputs, hidden = model.initial(observation)
    total = torch.zeros_like(weights)
    for k in range(NUM_UNROLL_STEPS + 1):
        if k:
            outputs, hidden = model.recurrent(hidden, actions[:, k - 1])
            hidden = 0.5 * hidden + 0.5 * hidden.detach()
        loss = usual.cross_entropy(outputs["policy"], targets["policy"][:, k])
        for name in ("value", "reward"):
            encoded = usual.two_hot(usual.h(targets[name][:, k]), num_bins, limit)
            loss = loss + usual.cross_entropy(outputs[name], encoded)
        total = total + (loss / NUM_UNROLL_STEPS + loss.detach() * (1 - 1 / NUM_UNROLL_STEPS) if k else loss)
    return (total * weights).mean()


def muzero(kind: type[Perceptrons], num_bins: int, actions: int, batch_size: int, device: torch.device) -> Pair:
    """The learner step of MuZero."""
    torch.manual_seed(0)
    model = kind(num_bins, actions).to(device)
    models = {"usual": model, "ours": copy.deepcopy(model)}
    optimizers = {name: torch.optim.AdamW(own.parameters(), lr=1e-3, **CAPTURABLE) for name, own in models.items()}
    loss_fn = gs.MultiStepLoss.muzero(gs.Support.muzero((num_bins - 1) // 2))
    draw = lambda *shape: torch.randn(shape, device=device)
    steps = NUM_UNROLL_STEPS + 1
    batch = (
        draw(batch_size, *kind.observation),
        torch.randint(actions, (batch_size, NUM_UNROLL_STEPS), device=device),
        torch.rand(batch_size, device=device),
        draw(batch_size, steps),
        draw(batch_size, steps),
        draw(batch_size, steps, actions).softmax(-1),
    )

    def usual_step(*given: torch.Tensor) -> torch.Tensor:
        loss = usual_muzero_loss(models["usual"], given, num_bins)
        optimizers["usual"].zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(models["usual"].parameters(), 5.0)
        optimizers["usual"].step()
        return loss

    def our_step(
        observation: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *wanted: torch.Tensor
    ) -> torch.Tensor:
        own = models["ours"]
        targets = dict(zip(("value", "reward", "policy"), wanted, strict=True))
        predictions = gs.unroll(own.initial, own.recurrent, observation, chosen)
        loss = loss_fn(predictions, targets, step_gradient_scale="unroll", importance_weights=weights).loss
        optimizers["ours"].zero_grad()
        loss.backward()
        gs.clip_gradients_(own, 5.0)
        optimizers["ours"].step()
        return loss

    states = {name: (models[name], optimizers[name]) for name in models}
    return Pair(batch, usual_step, our_step, states, dict(models))


# ---- TD-MPC2 ---------------------------------------------------------------------------------------------------------


class WorldModel(nn.Module):
    """TD-MPC2's networks: latents of 512 in groups of 8, five critics, 101 bins."""

    num_bins, num_critics = 101, 5

    def __init__(self, observation: int = 39, actions: int = 4, latent: int = 512) -> None:
        super().__init__()
        self.encoder, self.dynamics = mlp(observation, 256, latent), mlp(latent + actions, 512, latent)
        self.reward, self.policy = mlp(latent + actions, 512, self.num_bins), mlp(latent, 512, actions)
        self.critics = nn.ModuleList(mlp(latent + actions, 512, self.num_bins) for _ in range(self.num_critics))

    @staticmethod
    def normalized(latent: torch.Tensor) -> torch.Tensor:
        return latent.unflatten(-1, (-1, 8)).softmax(-1).flatten(-2)

    def encode(self, observation: torch.Tensor) -> torch.Tensor:
        return self.normalized(self.encoder(observation))

    def next(self, latent: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.normalized(self.dynamics(torch.cat([latent, action], -1)))


def tdmpc2(batch_size: int, device: torch.device, horizon: int = 3, rho: float = 0.5) -> Pair:
    """The model's update of TD-MPC2: consistency of latents, rewards and five critics over a horizon."""
    torch.manual_seed(0)
    model = WorldModel().to(device)
    models = {"usual": model, "ours": copy.deepcopy(model)}
    optimizers = {name: torch.optim.Adam(own.parameters(), lr=3e-4, **CAPTURABLE) for name, own in models.items()}
    support = gs.Support.tdmpc2()
    heads: dict[str, Any] = {f"q{i}": gs.TwoHot(support, weight=0.1 / WorldModel.num_critics) for i in range(5)}
    heads |= {"reward": gs.TwoHot(support, weight=0.1), "latent": gs.MeanSquaredError(weight=20.0)}
    loss_fn = gs.MultiStepLoss(**heads)
    weights = [rho**t for t in range(horizon)]
    draw = lambda *shape: torch.randn(shape, device=device)
    batch = (
        draw(horizon + 1, batch_size, 39),
        draw(horizon, batch_size, 4).tanh(),
        draw(horizon, batch_size),
        draw(horizon, batch_size),
    )

    def rolled_out(own: WorldModel, observations: torch.Tensor, actions: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        with torch.no_grad():
            wanted = own.encode(observations[1:])
        latent, found = own.encode(observations[0]), {name: [] for name in (*heads, "wanted")}  # type: ignore[var-annotated]
        for t in range(horizon):
            pair = torch.cat([latent, actions[t]], -1)
            found["reward"].append(own.reward(pair))
            for i, critic in enumerate(own.critics):
                found[f"q{i}"].append(critic(pair))
            latent = own.next(latent, actions[t])
            found["latent"].append(latent)
            found["wanted"].append(wanted[t])
        return found

    def usual_step(
        observations: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        found = rolled_out(models["usual"], observations, actions)
        loss = torch.zeros((), device=device)
        for t, weight in enumerate(weights):
            loss = loss + 20.0 * weight * F.mse_loss(found["latent"][t], found["wanted"][t])
            encoded = usual.two_hot(5 * usual.symlog(rewards[t]), 101, 50.0)
            loss = loss + 0.1 * weight * usual.cross_entropy(found["reward"][t], encoded).mean()
            encoded = usual.two_hot(5 * usual.symlog(values[t]), 101, 50.0)
            for i in range(5):
                loss = loss + 0.1 / 5 * weight * usual.cross_entropy(found[f"q{i}"][t], encoded).mean()
        optimizers["usual"].zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(models["usual"].parameters(), 20.0)
        optimizers["usual"].step()
        return loss

    def our_step(
        observations: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        found = rolled_out(models["ours"], observations, actions)
        targets: dict[str, Any] = {f"q{i}": list(values.unbind()) for i in range(5)}
        targets |= {"reward": list(rewards.unbind()), "latent": found.pop("wanted")}
        loss = loss_fn(found, targets, step_weights=weights).loss
        optimizers["ours"].zero_grad(set_to_none=True)
        loss.backward()
        gs.clip_gradients_(models["ours"], 20.0)
        optimizers["ours"].step()
        return loss

    states = {name: (models[name], optimizers[name]) for name in models}
    return Pair(batch, usual_step, our_step, states, dict(models))


def pairs(device: torch.device, batch_size: int = 256) -> dict[str, Callable[[], Pair]]:
    """The pairs, by name."""
    return {
        "MuZero, perceptrons of 256, S 21, A 6": lambda: muzero(Perceptrons, 21, 6, batch_size, device),
        "MuZero, 64 channels of 6 x 6, S 601, A 18": lambda: muzero(Convolutions, 601, 18, batch_size, device),
        "TD-MPC2, latents of 512": lambda: tdmpc2(batch_size, device),
    }
