"""Games, one file each. The base class defines the interface; the `GAME` of a file is its class."""

from __future__ import annotations

import abc
import importlib
import pkgutil
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


class Game(abc.ABC):
    """E games in parallel, each of which restarts after its end.

    A game shows its final state for one more step, and ignores the action then ("next step" autoreset of Gymnasium).
    All state is in the object, which is pickled into checkpoints.
    """

    title: ClassVar[str]
    observation_shape: ClassVar[tuple[int, ...]]  # of one game: a vector, or planes [C, H, W]
    num_actions: ClassVar[int]
    players: ClassVar[int] = 1  # or 2, which take turns in a zero-sum game
    return_to_solve: ClassVar[float] = np.inf  # training ends when self-play has this mean return
    hyperparameters: ClassVar[dict[str, Any]] = {}  # values that differ from the configuration's defaults
    max_minutes: ClassVar[float] = 10
    evaluation_episodes: ClassVar[int] = 100
    opponent: ClassVar[str] = "random play"  # what `opponent_actions` plays: against the agent, or for comparison

    def __init__(self, num_games: int) -> None:
        """Make the games; `reset` begins them."""
        self.num_games = num_games

    @abc.abstractmethod
    def reset(self, seed: int) -> Floats:
        """Begin all games. Returns observations `[E, *observation_shape]`, as seen by the player to move."""

    @abc.abstractmethod
    def step(self, action: Integers) -> tuple[Floats, Floats, Booleans, Booleans]:
        """Act in all games. Returns observations, rewards of the acting players, terminations and truncations.

        The last two are bool, `[E]` like the rewards; a truncation is an end by the time limit.
        """

    def legal_actions(self) -> Booleans:
        """The legal actions in the last observed states, `[E, A]`; at least one, also in final states."""
        return np.ones((self.num_games, self.num_actions), dtype=bool)

    def opponent_actions(self, generator: np.random.Generator) -> Integers:
        """Actions of the opponent in an evaluation, `[E]`: any legal action, unless a game overrides this."""
        return (generator.random((self.num_games, self.num_actions)) + self.legal_actions()).argmax(axis=-1)

    @classmethod
    def outcome(cls, rewards: list[float]) -> float:
        """The return of the player who began."""
        return sum(rewards) if cls.players == 1 else sum(rewards[::2]) - sum(rewards[1::2])


def names() -> tuple[str, ...]:
    """The available games."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> type[Game]:
    """The class of a game."""
    return importlib.import_module(f"{__name__}.{name}").GAME
