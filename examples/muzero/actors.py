"""Self-play and replay by actors on Ray, concurrent with the learner.

Each player has a share of the games. It plays with the weights that the learner last put into Ray's object store, and
sends finished episodes to the keeper of the replay buffer, which writes them to disk before it acknowledges them. Ray
restarts an actor that was killed, and repeats its unanswered calls: a player then begins new games, and the keeper
reads its file.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import secrets
import sqlite3
import uuid
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

import games
from configuration import Configuration, RunError
from games import Integers
from parallel import Ranks
from replay import Batch, Episode
from self_play import SelfPlay
from training import Training, make_network, make_replay, one_line

STEPS_PER_CALL = 8  # during which a player uses the same weights
STEPS_PER_WEIGHTS = 4  # learner steps between two publications of the weights
BATCHES_AHEAD = 4

immortal = ray.remote(max_restarts=-1, max_task_retries=-1)


class Keeper:
    """Keeps the replay buffer, and also stores its episodes in a file."""

    def __init__(self, configuration: Configuration, path: str) -> None:
        """Read the episodes that an earlier keeper acknowledged, into their previous places."""
        torch.set_num_threads(1)
        self.buffer = make_replay(configuration)
        self.generator = np.random.default_rng()
        self.file = sqlite3.connect(path)
        columns = "call TEXT PRIMARY KEY, first INTEGER, last INTEGER, episodes BLOB"
        self.file.execute(f"CREATE TABLE IF NOT EXISTS added ({columns})")
        for first, episodes in self.file.execute("SELECT first, episodes FROM added ORDER BY first"):
            self.buffer.num_added = first
            self.fill(pickle.loads(episodes))

    def fill(self, episodes: list[Episode]) -> None:
        for episode in episodes:
            self.buffer.add(episode)

    def add(self, call: str, episodes: list[Episode]) -> int:
        """Add episodes exactly once, even if Ray repeats the call. Returns the number of transitions."""
        first = self.buffer.num_added
        last = first + sum(map(len, episodes))
        with self.file:  # a transaction, which is on disk when it ends
            row = (call, first, last, pickle.dumps(episodes))
            if not self.file.execute("INSERT OR IGNORE INTO added VALUES (?, ?, ?, ?)", row).rowcount:
                return len(self.buffer)
            self.file.execute("DELETE FROM added WHERE last <= ?", (last - self.buffer.capacity,))
        self.fill(episodes)
        return len(self.buffer)

    def size(self) -> int:
        return len(self.buffer)

    def sample(self, batch_size: int, normalize: bool) -> Batch:
        return self.buffer.sample(batch_size, self.generator, normalize)

    def update_priorities(self, index: Integers, expected_value: Tensor, value_targets: Tensor) -> None:
        self.buffer.update_priorities(index, expected_value, value_targets)


class Player:
    """Plays a share of the games."""

    def __init__(self, configuration: Configuration) -> None:
        """Begin games; the replacement of a killed player does not repeat the games of its predecessor."""
        torch.set_num_threads(1)
        seed = secrets.randbits(31)
        self.self_play = SelfPlay(dataclasses.replace(configuration, seed=seed), np.random.default_rng(seed))
        self.network = make_network(configuration)
        self.outcome = games.load(configuration.game).outcome

    def play(self, weights: dict[str, Tensor], keeper: Any) -> tuple[list[float], int, int]:
        """Play some steps. Returns the finished episodes' returns, and the transitions played and in the buffer."""
        self.network.load_state_dict(weights)
        finished = [episode for _ in range(STEPS_PER_CALL) for episode in self.self_play.step(self.network)]
        size = ray.get(keeper.add.remote(uuid.uuid4().hex, finished))
        transitions = STEPS_PER_CALL * self.self_play.game.num_games - len(finished)
        return [self.outcome(episode.rewards) for episode in finished], transitions, size


class KeptReplay:
    """The learner's view of the replay buffer: batches are requested before they are needed."""

    def __init__(self, keeper: Any) -> None:
        """Wait until the keeper has read its file."""
        self.keeper = keeper
        self.size: int = ray.get(keeper.size.remote())
        self.batches: deque[Any] = deque()

    def __len__(self) -> int:
        """Number of transitions at the last answer of a player."""
        return self.size

    def sample(self, batch_size: int, _: np.random.Generator, normalize: bool = True) -> Batch:
        """A batch that was drawn some learner steps ago, with the keeper's own random numbers."""
        while len(self.batches) <= BATCHES_AHEAD:
            self.batches.append(self.keeper.sample.remote(batch_size, normalize))
        return ray.get(self.batches.popleft())

    def update_priorities(self, index: Integers, expected_value: Tensor, value_targets: Tensor) -> None:
        """Send priorities without waiting."""
        self.keeper.update_priorities.remote(index, expected_value.detach(), value_targets)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the keeper has its own file."""
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Nothing: the keeper has read its file."""


class ActorTraining(Training):
    """A run in which actors play while the learner learns. Its order depends on their speed, not only on the seed."""

    def __init__(
        self,
        configuration: Configuration,
        directory: Path,
        address: str,
        ranks: Ranks | None = None,
        device: str = "cpu",
        captured: bool = False,
    ) -> None:
        """Begin a run with local actors (`"local"`), or on the cluster at an address."""
        super().__init__(configuration, ranks, device, captured)
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # Ray sends the folder of this file to the machines of a cluster.
            sent = {"working_dir": str(Path(__file__).parent), "excludes": ["runs", "__pycache__"]}
            environment = None if address == "local" else sent
            try:
                ray.init(address, include_dashboard=False, logging_level=logging.ERROR, runtime_env=environment)
            except Exception as error:  # of several types, depending on the address
                raise RunError(f"--ray {address} is not a Ray cluster that answers: {one_line(error)}") from error
        here = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )  # contains the run's folder
        path = directory.resolve() / f"replay.{self.ranks.rank}.sqlite"
        keeper = immortal(Keeper).options(scheduling_strategy=here).remote(self.share, str(path))
        try:
            self.replay = KeptReplay(keeper)
        except ray.exceptions.RayError as error:
            cause = str(error).strip().splitlines()[-1]  # below the traceback of the keeper
            problem = f"{path} cannot be read as a replay buffer: {cause}"
            raise RunError(f"{problem}. Use another --directory, or --fresh to delete this run.") from error
        shares = [self.share.share(i, configuration.actors, "num_environments") for i in range(configuration.actors)]
        self.players = [immortal(Player).remote(share) for share in shares]
        self.calls: dict[Any, Any] = {}  # pending call and its player
        self.weights: Any = None
        self.transitions_ahead = 0

    def play(self) -> tuple[list[float], int]:
        """Wait until a step of all games has been played; players that have answered continue with new weights."""
        if self.weights is None or self.step_number % STEPS_PER_WEIGHTS == 0:
            self.weights = ray.put(self.acting_network.state_dict())
        if not self.calls:
            for player in self.players:
                self.ask(player)
        all_returns, all_transitions = [], 0
        while self.transitions_ahead < self.share.num_environments:
            (call,), _ = ray.wait(list(self.calls))
            returns, transitions, self.replay.size = ray.get(call)
            player = self.calls.pop(call)
            self.ask(player)
            all_returns += returns
            all_transitions += transitions
            self.transitions_ahead += transitions
        self.transitions_ahead -= self.share.num_environments
        return all_returns, all_transitions

    def ask(self, player: Any) -> None:
        """Let a player continue."""
        self.calls[player.play.remote(self.weights, self.replay.keeper)] = player
