"""PPO (Schulman et al. 2017) on CartPole, or on Breakout of MinAtar, in a minute or a few of one processor.

    pip install ".[examples]"
    python examples/ppo.py
    pip install --no-deps minatar                  # its other dependencies are only needed for drawing
    python examples/ppo.py --game breakout

The learner step is `Learner.update_weights`: `gs.MultiStepLoss.ppo` on a minibatch without a dimension of steps. On a
GPU (`--device cuda`) it is one launch from its fourth call on; the games run on the CPU. The games are those of
`examples/muzero/games/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gradscale_ext as gs

sys.path.append(str(Path(__file__).resolve().parent / "muzero"))
import games

WINDOW = 50  # episodes that a mean return is over


@dataclasses.dataclass(frozen=True)
class Settings:
    """Hyperparameters. The learning rate falls to 0 over `steps`."""

    steps: int = 150_000
    num_games: int = 16
    rollout_steps: int = 64
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 2e-3
    discount: float = 0.99
    lambda_: float = 0.95
    clip: float = 0.2
    entropy_weight: float = 0.01
    max_norm: float = 0.5


SETTINGS = {
    "cartpole": Settings(),
    "breakout": Settings(steps=400_000, num_games=32, minibatches=8, learning_rate=2.5e-3),
}


class Agent(nn.Module):
    """A policy and a value function, without shared layers."""

    def __init__(self, observation_shape: tuple[int, ...], num_actions: int) -> None:
        super().__init__()
        self.policy = network(observation_shape, num_actions, scale=0.01)
        self.value = network(observation_shape, 1, scale=1.0)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[B, A]` and values `[B]`."""
        return self.policy(observation), self.value(observation).squeeze(-1)


def network(observation_shape: tuple[int, ...], outputs: int, scale: float) -> nn.Sequential:
    """A perceptron for vectors, or a convolution and a perceptron for planes."""
    if len(observation_shape) == 1:
        layers = [nn.Linear(*observation_shape, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    else:
        planes, height, width = observation_shape
        size = 16 * (height - 2) * (width - 2)
        layers = [nn.Conv2d(planes, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(size, 128), nn.ReLU()]
        layers.append(nn.Linear(128, outputs))
    for layer in layers:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, scale if layer is layers[-1] else 2**0.5)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Learner:
    """The learner step, with everything that it changes."""

    def __init__(self, agent: Agent, settings: Settings, device: str) -> None:
        self.agent, self.settings = agent, settings
        self.learning_rate = torch.tensor(settings.learning_rate, device=device)  # of the device: a graph reads it
        self.optimizer = torch.optim.AdamW(
            agent.parameters(), lr=self.learning_rate, eps=1e-5, weight_decay=0.0, fused=True
        )
        self.loss = gs.MultiStepLoss.ppo(clip=settings.clip, entropy_weight=settings.entropy_weight)
        self.update = gs.CapturedStep(self.update_weights, agent, self.optimizer)

    def update_weights(
        self, observation: torch.Tensor, policy: dict[str, torch.Tensor], returns: torch.Tensor, mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """One step of the optimizer on a minibatch. The mask is False for transitions that are resets."""
        logits, values = self.agent(observation)
        out = self.loss(
            {"policy": logits, "value": values},
            {"policy": policy, "value": {"returns": returns}},
            mask=mask,
            reduction="valid_mean",
            steps=False,
        )
        self.optimizer.zero_grad()
        out.loss.backward()
        gs.clip_gradients_(self.agent, self.settings.max_norm)
        self.optimizer.step()
        return {
            "loss": out.loss.detach(),
            "approx_kl": out.approx_kl["policy"],
            "clip_fraction": out.clip_fraction["policy"],
        }


class Training:
    """A run: rollouts of all games, and the learner steps after each.

    Attributes:
        episodes: pairs of the number of steps of the game at an episode's end, and its return.
    """

    def __init__(self, game: str, seed: int, settings: Settings | None = None, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        self.settings, self.device = settings or SETTINGS[game], device
        self.game = games.load(game)(self.settings.num_games)
        self.agent = Agent(self.game.observation_shape, self.game.num_actions).to(device)
        self.learner = Learner(self.agent, self.settings, device)
        self.observation = torch.from_numpy(self.game.reset(seed)).to(device)
        self.is_reset = np.zeros(self.settings.num_games, dtype=bool)  # of the coming step
        self.returns = np.zeros(self.settings.num_games)  # of the episodes that are being played
        self.episodes: list[tuple[int, float]] = []
        self.environment_steps = self.learner_steps = 0

    @property
    def mean_return(self) -> float:
        """Mean return of the latest episodes; NaN before the first one."""
        return float(np.mean([found for _, found in self.episodes[-WINDOW:]] or [np.nan]))

    @property
    def solved(self) -> bool:
        """True if the latest episodes reach the return at which the game counts as solved."""
        return len(self.episodes) >= WINDOW and self.mean_return >= self.game.return_to_solve

    @property
    def finished(self) -> bool:
        """True if the game is solved, or all steps are done."""
        return self.solved or self.environment_steps >= self.settings.steps

    def rollout(self) -> dict[str, torch.Tensor]:
        """Transitions `[T, E]` of all games, and `values` `[T + 1, E]`."""
        steps: list[list[torch.Tensor]] = []
        for _ in range(self.settings.rollout_steps):
            with torch.no_grad():
                logits, values = self.agent(self.observation)
            distribution = torch.distributions.Categorical(logits=logits)
            actions = distribution.sample()
            following, reward, terminated, truncated = self.game.step(actions.cpu().numpy())
            own = [torch.from_numpy(x).to(self.device) for x in (reward, terminated, ~self.is_reset)]
            steps.append([self.observation, actions, distribution.log_prob(actions), values, *own])
            self._count(reward, terminated | truncated)
            self.observation = torch.from_numpy(following).to(self.device)
        names = ("observation", "actions", "log_probs", "values", "rewards", "terminated", "mask")
        found = {name: torch.stack(column) for name, column in zip(names, zip(*steps, strict=True), strict=True)}
        with torch.no_grad():
            last = self.agent(self.observation)[1]
        return {**found, "values": torch.cat([found["values"], last[None]])}

    def _count(self, reward: np.ndarray, ended: np.ndarray) -> None:
        self.environment_steps += int((~self.is_reset).sum())
        self.returns += reward
        self.episodes += [(self.environment_steps, float(found)) for found in self.returns[ended]]
        self.returns[ended] = 0
        self.is_reset = ended

    def minibatches(self, data: dict[str, torch.Tensor]) -> Iterator[tuple]:
        """Arguments of `Learner.update_weights`, for all epochs."""
        given = {name: data[name] for name in ("rewards", "values", "terminated", "mask")}
        numbers = {"discount": self.settings.discount, "lambda_": self.settings.lambda_}
        gae = gs.generalized_advantages(**given, **numbers, batch_first=False)
        names = ("observation", "actions", "log_probs", "mask")
        flat = {name: data[name].flatten(0, 1) for name in names}
        advantages, returns = gae.advantages.flatten(), gae.returns.flatten()
        count = len(returns)
        for _ in range(self.settings.epochs):
            for rows in torch.randperm(count, device=self.device).chunk(self.settings.minibatches):
                mask = flat["mask"][rows]
                policy = {
                    "actions": flat["actions"][rows],
                    "log_probs": flat["log_probs"][rows],
                    "advantages": gs.standardize(advantages[rows], mask=mask),
                }
                yield flat["observation"][rows], policy, returns[rows], mask

    def step(self) -> dict[str, torch.Tensor]:
        """One rollout and its learner steps. Returns the numbers of the last one."""
        left = max(1 - self.environment_steps / self.settings.steps, 0.0)
        self.learner.learning_rate.fill_(left * self.settings.learning_rate)
        for batch in self.minibatches(self.rollout()):
            numbers = self.learner.update(*batch)
            self.learner_steps += 1
        return numbers


def evaluate(game: str, agent: Agent | None, seed: int) -> np.ndarray:
    """Returns of one episode in each of the game's evaluation: of the most probable actions, or of random play."""
    played = games.load(game)(games.load(game).evaluation_episodes)
    generator = np.random.default_rng(seed)
    observation, returns = played.reset(seed), np.zeros(played.num_games)
    running = np.ones(played.num_games, dtype=bool)
    while running.any():
        if agent is None:
            actions = played.opponent_actions(generator)
        else:
            device = next(agent.parameters()).device
            with torch.no_grad():
                actions = agent.policy(torch.from_numpy(observation).to(device)).argmax(-1).cpu().numpy()
        observation, reward, terminated, truncated = played.step(actions)
        returns += np.where(running, reward, 0)
        running &= ~(terminated | truncated)
    return returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", choices=SETTINGS, default="cartpole", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="of the agent (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the networks are small
    training = Training(options.game, options.seed, device=options.device)
    began = shown = time.monotonic()
    while not training.finished:
        numbers = training.step()
        if time.monotonic() - shown > 2 or training.finished:
            shown = time.monotonic()
            print(
                f"{training.environment_steps:>9,} steps  {training.learner_steps:>6,} learner steps  "
                f"return {training.mean_return:6.1f}  approx_kl {numbers['approx_kl'].item():.4f}  "
                f"clip_fraction {numbers['clip_fraction'].item():.2f}  {shown - began:4.0f} s",
                flush=True,
            )
    for player, agent in (("the agent", training.agent), ("random play", None)):
        returns = evaluate(options.game, agent, seed=options.seed + 1_000)
        print(f"evaluation of {player}: {returns.mean():.4g} in {len(returns)} episodes, at least {returns.min():.4g}")


if __name__ == "__main__":
    main()
