"""A training run: everything that changes while the agent learns, and how it is saved."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from pathlib import Path

import numpy as np
import torch

import games
import gradscale_ext as gs
from configuration import Configuration, option_name
from learner import make_loss, make_optimizer, update_weights
from networks import MuZeroNetwork
from replay import Batch, ReplayBuffer
from self_play import SelfPlay

EPISODES_TO_SOLVE = 50


class Training:
    """Networks, optimizer, replay buffer, games, random numbers and record of a run."""

    def __init__(self, configuration: Configuration) -> None:
        """Begin a run."""
        torch.manual_seed(configuration.seed)
        self.configuration = configuration
        self.generator = np.random.default_rng(configuration.seed)
        self.self_play = SelfPlay(configuration, self.generator)
        self.game = games.load(configuration.game)
        limit, bins = configuration.support_limit, configuration.support_bins
        self.network = MuZeroNetwork(
            self.game.observation_shape,
            self.game.num_actions,
            gs.Support(-limit, limit, bins),  # symmetric, so that uniform logits mean exactly 0
            configuration.hidden_size,
            configuration.layer_size,
        )
        self.optimizer = make_optimizer(self.network, configuration.learning_rate)
        self.loss_function = make_loss(self.network.support, configuration.loss)
        self.replay = ReplayBuffer(
            configuration.replay_capacity,
            self.game.observation_shape,
            self.game.num_actions,
            configuration.unroll_steps,
            configuration.bootstrap_steps,
            configuration.signed_discount,
            configuration.priority_exponent,
            configuration.importance_exponent,
        )
        self.step_number = 0
        self.environment_steps = 0
        self.learner_steps = 0
        self.seconds = 0.0
        self.processor_seconds = 0.0
        self.curve: list[tuple[int, float]] = []  # environment steps at the end of each episode, and its return

    @property
    def learning_rate(self) -> float:
        """Falls linearly, over the steps of the run, to a tenth."""
        done = self.step_number / self.configuration.training_steps
        return self.configuration.learning_rate * (1 - 0.9 * done)

    def step(self) -> dict[str, float]:
        """A step of all games, and the learner steps that go with it. Returns scalars for the log."""
        start, processor_start = time.perf_counter(), time.process_time()
        settings = self.configuration
        scalars: dict[str, float] = {}
        finished = self.self_play.step(self.network)
        for episode in finished:
            self.replay.add(episode)
            episode_return = self.game.outcome(episode.rewards)
            self.curve.append((self.environment_steps, episode_return))
            scalars["self_play/return"] = episode_return
        self.environment_steps += settings.num_environments - len(finished)
        if len(self.replay) >= settings.minimum_replay:
            for _ in range(settings.updates_per_step):
                output = self.learn(self.replay.sample(settings.batch_size, self.generator))
            scalars |= {"loss/total": output.loss.item(), "learner/learning_rate": self.learning_rate}
            scalars |= {f"loss/{head}": mean.item() for head, mean in output.head_means.items()}
        self.step_number += 1
        self.seconds += time.perf_counter() - start
        self.processor_seconds += time.process_time() - processor_start
        return scalars

    def learn(self, batch: Batch) -> gs.MultiStepLossOutput:
        """A learner step, after which the batch gets new priorities."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        output = update_weights(
            self.network, self.optimizer, self.loss_function, batch, self.configuration.weight_decay
        )
        self.replay.update_priorities(batch.index, output.expected["value"], batch.targets["value"])
        self.learner_steps += 1
        return output

    @property
    def mean_return(self) -> float:
        """Mean return of the latest episodes; NaN before the first has ended."""
        returns = [episode_return for _, episode_return in self.curve[-EPISODES_TO_SOLVE:]]
        return sum(returns) / len(returns) if returns else float("nan")

    @property
    def solved(self) -> bool:
        """Whether the latest episodes reach the return at which the game counts as solved.

        Training ends then. Going on would soon fill the replay buffer with nothing but long episodes, and an agent that
        sees no failure forgets how to avoid it.
        """
        return len(self.curve) >= EPISODES_TO_SOLVE and self.mean_return >= self.game.return_to_solve

    def progress(self, max_seconds: float) -> dict[str, float]:
        """What ends the run, in words, and how much of each there is: the first to reach 1 ends it."""
        total, episodes = self.configuration.training_steps, len(self.curve)
        goal, mean = self.game.return_to_solve, self.mean_return if episodes else 0.0
        described = f"mean return {mean:.1f}" if math.isinf(goal) else f"mean return {mean:.0f} of {goal:.0f}"
        return {
            described: min(episodes / EPISODES_TO_SOLVE, mean / goal),
            f"step {self.step_number} of {total}": self.step_number / total,
            f"{self.seconds / 60:.1f} of {max_seconds / 60:g} minutes": self.seconds / max_seconds,
        }

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the game is solved."""
        return self.solved or self.step_number >= self.configuration.training_steps

    def save(self, path: Path) -> None:
        """Writes a checkpoint; whatever happens meanwhile, a complete one is there, this or the one before."""
        record = ("step_number", "environment_steps", "learner_steps", "seconds", "processor_seconds", "curve")
        state = {
            "configuration": dataclasses.asdict(self.configuration),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "replay": self.replay.state_dict(),
            "self_play": self.self_play.state_dict(),
            "generator": self.generator.bit_generator.state,
            "torch_generator": torch.get_rng_state(),
            "record": {name: getattr(self, name) for name in record},
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, path)

    def load(self, path: Path) -> None:
        """Goes on from a checkpoint. Games are in it as Python objects: load only what you wrote yourself.

        Raises:
            ValueError: the checkpoint's run has another configuration.
        """
        state = torch.load(path, weights_only=False)
        for name, value in dataclasses.asdict(self.configuration).items():
            saved = state["configuration"].get(name)
            if saved != value:
                raise ValueError(f"the run in {path} was begun with {option_name(name)} {saved}, not {value}")
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.replay.load_state_dict(state["replay"])
        self.self_play.load_state_dict(state["self_play"])
        self.generator.bit_generator.state = state["generator"]
        torch.set_rng_state(state["torch_generator"])
        vars(self).update(state["record"])
