"""A training run: all state that changes while the agent learns, and its checkpoints."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import math
import os
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import games
import gradscale_ext as gs
from configuration import Configuration, RunError, option_name
from learner import make_loss, make_optimizer, make_update, set_learning_rate
from networks import MuZeroNetwork
from parallel import Ranks
from replay import Batch, ReplayBuffer
from self_play import SelfPlay

EPISODES_TO_SOLVE = 50
RECORD = ("step_number", "environment_steps", "learner_steps", "seconds", "processor_seconds", "curve")
CHECKPOINT = {"configuration", "network", "optimizer", "shares", "torch_generator", "record"}  # contents of the file
SHARED = ("num_environments", "batch_size", "replay_capacity", "minimum_replay")  # among the ranks


def make_network(configuration: Configuration) -> MuZeroNetwork:
    """The networks for a game, initialised from torch's random numbers."""
    game = games.load(configuration.game)
    return MuZeroNetwork(
        game.observation_shape,
        game.num_actions,
        configuration.support(),
        configuration.hidden_size,
        configuration.layer_size,
    )


def make_replay(configuration: Configuration) -> ReplayBuffer:
    """A replay buffer for a game."""
    game = games.load(configuration.game)
    return ReplayBuffer(
        configuration.replay_capacity,
        game.observation_shape,
        game.num_actions,
        configuration.unroll_steps,
        configuration.bootstrap_steps,
        configuration.signed_discount,
        configuration.priority_exponent,
        configuration.importance_exponent,
    )


class Training:
    """Networks, optimizer, replay buffer, games, random numbers and record of a run.

    Each of several ranks has a share of the games, and its own replay buffer with the episodes that it played.
    Networks, optimizer and record are the same on all ranks.
    """

    def __init__(
        self, configuration: Configuration, ranks: Ranks | None = None, device: str = "cpu", captured: bool = False
    ) -> None:
        """Begin a run. The learner step runs on the device; captured, as one launch on a GPU."""
        torch.manual_seed(configuration.seed)
        self.configuration = configuration
        self.ranks = ranks or Ranks()
        self.share = configuration.share(self.ranks.rank, self.ranks.size, *SHARED)
        self.generator = np.random.default_rng(self.share.seed)
        self.self_play = SelfPlay(self.share, self.generator)
        self.game = games.load(configuration.game)
        self.device = torch.device(device)
        self.acting_network = make_network(configuration)  # plays on the CPU, where small networks are faster
        is_on_cpu = self.device.type == "cpu"
        self.network = self.acting_network if is_on_cpu else copy.deepcopy(self.acting_network).to(self.device)
        rate = configuration.learning_rate
        self.optimizer = make_optimizer(self.network, torch.tensor(rate, device=self.device) if captured else rate)
        loss_function = make_loss(self.network.support, configuration.loss, self.ranks.process_group)
        parallel_network = self.ranks.parallel(self.network)
        self.update = make_update(parallel_network, self.optimizer, loss_function, configuration.weight_decay, captured)
        self.replay = make_replay(self.share)
        self.step_number = 0
        self.environment_steps = 0
        self.learner_steps = 0
        self.seconds = 0.0
        self.processor_seconds = 0.0
        self.curve: list[tuple[int, float]] = []  # environment steps at the end of each episode, and its return

    @property
    def learning_rate(self) -> float:
        """Learning rate, which decreases linearly over the run to a tenth."""
        done = self.step_number / self.configuration.training_steps
        return self.configuration.learning_rate * (1 - 0.9 * done)

    def step(self) -> dict[str, float]:
        """Run a step of all games and its learner steps. Returns scalars for the log."""
        start, processor_start = time.perf_counter(), time.process_time()
        scalars: dict[str, float] = {}
        learning = True
        for returns, transitions, is_ready in self.ranks.gather((*self.play(), self.is_ready)):
            for episode_return in returns:
                self.curve.append((self.environment_steps, episode_return))
                scalars["self_play/return"] = episode_return
            self.environment_steps += transitions
            learning &= is_ready
        if learning:
            for _ in range(self.configuration.updates_per_step):
                output = self.learn(self.replay.sample(self.share.batch_size, self.generator, self.ranks.size == 1))
            self.copy_weights()
            scalars |= {"loss/total": output.loss.item(), "learner/learning_rate": self.learning_rate}
            scalars |= {f"loss/{head}": mean.item() for head, mean in output.head_means.items()}
        self.step_number += 1
        self.seconds += time.perf_counter() - start
        self.processor_seconds += time.process_time() - processor_start
        return scalars

    def play(self) -> tuple[list[float], int]:
        """Run a step of this rank's games. Returns the returns of finished episodes, and the number of transitions."""
        finished = self.self_play.step(self.acting_network)
        for episode in finished:
            self.replay.add(episode)
        returns = [self.game.outcome(episode.rewards) for episode in finished]
        return returns, self.share.num_environments - len(finished)

    @property
    def is_ready(self) -> bool:
        """True if this rank's replay buffer holds enough transitions to learn from."""
        return len(self.replay) >= self.share.minimum_replay

    def learn(self, batch: Batch) -> gs.MultiStepLossOutput:
        """Run a learner step, and update the priorities of the batch."""
        set_learning_rate(self.optimizer, self.learning_rate)
        output = self.update(batch.to(self.device))
        self.replay.update_priorities(batch.index, output.expected["value"].cpu(), batch.targets["value"])
        self.learner_steps += 1
        return output

    def copy_weights(self) -> None:
        """Let the network that plays have the weights of the one that learns."""
        if self.acting_network is not self.network:
            self.acting_network.load_state_dict(self.network.state_dict())

    @property
    def mean_return(self) -> float:
        """Mean return of the latest episodes; NaN before the first has ended."""
        returns = [episode_return for _, episode_return in self.curve[-EPISODES_TO_SOLVE:]]
        return sum(returns) / len(returns) if returns else float("nan")

    @property
    def solved(self) -> bool:
        """True if the latest episodes reach the return at which the game counts as solved.

        Training then ends. Continuing would soon fill the replay buffer with long episodes only, and an agent that sees
        no failure forgets how to avoid it.
        """
        return len(self.curve) >= EPISODES_TO_SOLVE and self.mean_return >= self.game.return_to_solve

    def progress(self, max_seconds: float) -> dict[str, float]:
        """Name and progress of each criterion that ends the run: the first one to reach 1 ends it."""
        total, episodes = self.configuration.training_steps, len(self.curve)
        goal, mean = self.game.return_to_solve, self.mean_return if episodes else 0.0
        described = f"mean return {mean:.1f}" if math.isinf(goal) else f"mean return {mean:.0f} of {goal:.0f}"
        return {
            described: min(episodes / EPISODES_TO_SOLVE, mean / goal),
            f"step {self.step_number} of {total} of the games": self.step_number / total,
            f"{self.seconds / 60:.1f} of {max_seconds / 60:g} minutes": self.seconds / max_seconds,
        }

    @property
    def finished(self) -> bool:
        """True if all steps are done, or the game is solved."""
        return self.solved or self.step_number >= self.configuration.training_steps

    def save(self, path: Path) -> None:
        """Write a checkpoint in rank 0; a complete file always exists, this one or the previous one.

        Raises:
            RunError: the file cannot be written.
        """
        share = {
            "replay": self.replay.state_dict(),
            "self_play": self.self_play.state_dict(),
            "generator": self.generator.bit_generator.state,
        }
        state = {
            "configuration": dataclasses.asdict(self.configuration),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "shares": self.ranks.gather(share, everywhere=False),
            "torch_generator": torch.get_rng_state(),
            "record": {name: getattr(self, name) for name in RECORD},
        }
        self.ranks.agree(write_checkpoint(path, state) if self.ranks.rank == 0 else "")

    def load(self, path: Path) -> None:
        """Continue from a checkpoint, which only rank 0 reads. It contains pickled Python objects: load only your own
        files.

        Raises:
            RunError: the file is not a checkpoint, or belongs to a run with another configuration or number of ranks.
        """
        state, problem = self.ranks.from_first(read_checkpoint(path) if self.ranks.rank == 0 else None)
        unreadable = f"{path} cannot be read as a checkpoint: "
        problem = problem and unreadable + problem
        try:
            if not problem:
                self.restore(state, path)
        except RunError as error:
            problem = str(error)
        except Exception as error:  # of many types, depending on what is missing or has another form
            problem = unreadable + one_line(error)
        self.ranks.agree(problem)

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Continue from the contents of a checkpoint.

        Raises:
            RunError: it belongs to a run with another configuration or number of ranks.
        """
        for name, value in dataclasses.asdict(self.configuration).items():
            saved = state["configuration"].get(name)
            if saved != value:
                name = option_name(name)
                raise RunError(
                    f"the run in {path} was begun with {name} {saved}, not {value}, and can only continue with it"
                )
        if len(state["shares"]) != self.ranks.size:
            raise RunError(f"the run in {path} was begun by {len(state['shares'])} processes, not {self.ranks.size}")
        share = state["shares"][self.ranks.rank]
        self.network.load_state_dict(state["network"])
        self.copy_weights()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # a tensor or a number, as in this run
        self.replay.load_state_dict(share["replay"])
        self.self_play.load_state_dict(share["self_play"])
        self.generator.bit_generator.state = share["generator"]
        torch.set_rng_state(state["torch_generator"])
        for name in RECORD:
            setattr(self, name, state["record"][name])


def write_checkpoint(path: Path, state: dict[str, Any]) -> str:
    """Replace a file in one step. Returns an error message, which is empty if the file was written."""
    content = io.BytesIO()
    torch.save(state, content)  # torch.save to a file hides why the file cannot be written
    unfinished = path.with_suffix(".unfinished")
    try:
        with open(unfinished, "wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        return f"{path} cannot be written: {error}. When it can, the same command continues from the last checkpoint"
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return ""


def read_checkpoint(path: Path) -> tuple[dict[str, Any], str]:
    """The contents that `save` has written, and an error message for the file; one of them is empty."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # of many types, depending on where the file is damaged
        return {}, one_line(error)
    if not (isinstance(state, dict) and state.keys() >= CHECKPOINT):
        return {}, "it holds something else"
    return state, ""


def one_line(error: Exception) -> str:
    """Type and message of an error, in one line."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300)}"
