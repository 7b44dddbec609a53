"""Self-play and replay by actors on Ray, beside the learner.

Each player has a share of the games. It plays with the weights that the learner last put into Ray's object store, and
hands the episodes that have ended to the keeper of the replay buffer, who has them on disk before it acknowledges them.
Ray starts an actor that was killed anew, and repeats the calls that it left unanswered: a player begins new games then,
the keeper reads its file.
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
from configuration import Configuration
from games import Integers
from parallel import Ranks
from replay import Batch, Episode
from self_play import SelfPlay
from training import Training, make_network, make_replay

STEPS_PER_CALL = 8  # that a player plays with the same weights
STEPS_PER_WEIGHTS = 4  # of the learner, after which it hands its weights over
BATCHES_AHEAD = 4

immortal = ray.remote(max_restarts=-1, max_task_retries=-1)


class Keeper:
    """Keeps the replay buffer, and the episodes in it in a file as well."""

    def __init__(self, configuration: Configuration, path: str) -> None:
        """Read what an earlier keeper has acknowledged, into the places that it had."""
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
        """Adds episodes once, however often Ray repeats the call. Returns the transitions there are."""
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
        """Begin games; whoever takes the place of a killed player does not repeat what that one played."""
        torch.set_num_threads(1)
        seed = secrets.randbits(31)
        self.self_play = SelfPlay(dataclasses.replace(configuration, seed=seed), np.random.default_rng(seed))
        self.network = make_network(configuration)
        self.outcome = games.load(configuration.game).outcome

    def play(self, weights: dict[str, Tensor], keeper: Any) -> tuple[list[float], int, int]:
        """Some steps. Returns what the episodes that ended brought, the transitions, and those in the replay buffer."""
        self.network.load_state_dict(weights)
        finished = [episode for _ in range(STEPS_PER_CALL) for episode in self.self_play.step(self.network)]
        size = ray.get(keeper.add.remote(uuid.uuid4().hex, finished))
        transitions = STEPS_PER_CALL * self.self_play.game.num_games - len(finished)
        return [self.outcome(episode.rewards) for episode in finished], transitions, size


class KeptReplay:
    """The learner's view of the replay buffer: batches are asked for before they are needed."""

    def __init__(self, keeper: Any) -> None:
        """Wait until the keeper has read its file."""
        self.keeper = keeper
        self.size: int = ray.get(keeper.size.remote())
        self.batches: deque[Any] = deque()

    def __len__(self) -> int:
        """Transitions when a player was last heard of."""
        return self.size

    def sample(self, batch_size: int, _: np.random.Generator, normalize: bool = True) -> Batch:
        """A batch that was drawn some learner steps ago, with the keeper's own random numbers."""
        while len(self.batches) <= BATCHES_AHEAD:
            self.batches.append(self.keeper.sample.remote(batch_size, normalize))
        return ray.get(self.batches.popleft())

    def update_priorities(self, index: Integers, expected_value: Tensor, value_targets: Tensor) -> None:
        """Sends priorities, and does not wait."""
        self.keeper.update_priorities.remote(index, expected_value.detach(), value_targets)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the keeper has a file of its own."""
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Nothing: the keeper has read its file."""


class ActorTraining(Training):
    """A run whose games are played by actors, while it learns. Its order depends on who is faster, not on its seed."""

    def __init__(self, configuration: Configuration, directory: Path, address: str, ranks: Ranks | None = None) -> None:
        """Begin a run with local actors (`"local"`), or on the cluster at an address."""
        super().__init__(configuration, ranks)
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # Machines of a cluster are sent the folder of this file.
            sent = {"working_dir": str(Path(__file__).parent), "excludes": ["runs", "__pycache__"]}
            environment = None if address == "local" else sent
            ray.init(address, include_dashboard=False, logging_level=logging.ERROR, runtime_env=environment)
        here = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )  # has the run's folder
        path = directory.resolve() / f"replay.{self.ranks.rank}.sqlite"
        keeper = immortal(Keeper).options(scheduling_strategy=here).remote(self.share, str(path))
        self.replay = KeptReplay(keeper)
        shares = [self.share.share(i, configuration.actors, "num_environments") for i in range(configuration.actors)]
        self.players = [immortal(Player).remote(share) for share in shares]
        self.calls: dict[Any, Any] = {}  # what players were asked for, and who
        self.weights: Any = None
        self.transitions_ahead = 0

    def play(self) -> tuple[list[float], int]:
        """Waits until a step of all games has been played; players that have answered go on with the latest weights."""
        if self.weights is None or self.step_number % STEPS_PER_WEIGHTS == 0:
            self.weights = ray.put(self.network.state_dict())
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
        """Has a player go on."""
        self.calls[player.play.remote(self.weights, self.replay.keeper)] = player
