"""Games, one file each. The base class says what a game is; a file's `GAME` is its class."""

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
    """E games side by side, each of which begins anew when it has ended.

    A game shows its final state for one more step, and ignores the action then ("next step" autoreset of Gymnasium).
    All that changes is in the object, which is pickled into checkpoints.
    """

    title: ClassVar[str]
    observation_shape: ClassVar[tuple[int, ...]]  # of one game: a vector, or planes [C, H, W]
    num_actions: ClassVar[int]
    players: ClassVar[int] = 1  # or 2 that take turns, and of whom one wins what the other loses
    return_to_solve: ClassVar[float] = np.inf  # training ends when self-play has this mean return
    hyperparameters: ClassVar[dict[str, Any]] = {}  # where they differ from the defaults of the configuration
    max_minutes: ClassVar[float] = 10
    evaluation_episodes: ClassVar[int] = 100
    opponent: ClassVar[str] = "random play"  # what `opponent_actions` is: plays against the agent, or for comparison

    def __init__(self, num_games: int) -> None:
        """Make the games; `reset` begins them."""
        self.num_games = num_games

    @abc.abstractmethod
    def reset(self, seed: int) -> Floats:
        """Begins all games. Returns observations `[E, *observation_shape]`, as the player to move sees them."""

    @abc.abstractmethod
    def step(self, action: Integers) -> tuple[Floats, Floats, Booleans, Booleans]:
        """Acts in all games. Returns observations, rewards of who acted, whether games ended, whether by a time limit.

        The last two are called terminated and truncated, `[E]` as the rewards are.
        """

    def legal_actions(self) -> Booleans:
        """The actions that are allowed in the states observed last, `[E, A]`; at least one, in final states too."""
        return np.ones((self.num_games, self.num_actions), dtype=bool)

    def opponent_actions(self, generator: np.random.Generator) -> Integers:
        """Actions to measure the agent by, `[E]`: unless a game knows better, any that is legal."""
        return (generator.random((self.num_games, self.num_actions)) + self.legal_actions()).argmax(axis=-1)

    @classmethod
    def outcome(cls, rewards: list[float]) -> float:
        """The return of the player who began."""
        return sum(rewards) if cls.players == 1 else sum(rewards[::2]) - sum(rewards[1::2])


def names() -> tuple[str, ...]:
    """The games there are."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> type[Game]:
    """The class of a game."""
    return importlib.import_module(f"{__name__}.{name}").GAME
