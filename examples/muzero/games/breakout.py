"""Breakout of MinAtar (Young & Tian 2019), on planes of 10 x 10 squares: paddle, ball, its trail, bricks."""

from __future__ import annotations

import logging
from typing import ClassVar

import numpy as np

from games import Booleans, Floats, Game, Integers

try:
    logging.disable()  # MinAtar warns that it cannot draw without seaborn
    from minatar import Environment
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the game breakout needs MinAtar: pip install --no-deps minatar") from error
finally:
    logging.disable(logging.NOTSET)

TIME_LIMIT = 500  # steps; MinAtar itself has no limit


class Breakout(Game):
    """A reward of 1 for every brick, until the ball is lost. With probability 0.1 the last action is repeated."""

    title = "Breakout of MinAtar"
    observation_shape = (4, 10, 10)
    num_actions = 3  # no-op, left, right
    hyperparameters: ClassVar = {
        "training_steps": 5_000,
        "discount": 0.97,
        "bootstrap_steps": 10,
        "support_limit": 10.0,
        "support_bins": 81,
        "hidden_size": 64,
        "layer_size": 128,
        "learning_rate": 1e-3,
    }

    def __init__(self, num_games: int) -> None:
        """Make the environments, each with its own random number generator."""
        super().__init__(num_games)
        self.environments = [Environment("breakout") for _ in range(num_games)]
        self.actions = self.environments[0].minimal_action_set()
        self.steps = np.zeros(num_games, dtype=np.int64)
        self.ended = np.zeros(num_games, dtype=bool)

    def reset(self, seed: int) -> Floats:
        for i, environment in enumerate(self.environments):
            environment.seed(seed + i)
            environment.reset()
        self.steps[:], self.ended[:] = 0, False
        return self.observation()

    def step(self, action: Integers) -> tuple[Floats, Floats, Booleans, Booleans]:
        reward, terminated = np.zeros(self.num_games, dtype=np.float32), np.zeros(self.num_games, dtype=bool)
        for i, environment in enumerate(self.environments):
            if self.ended[i]:
                environment.reset()
            else:
                reward[i], terminated[i] = environment.act(self.actions[action[i]])
        self.steps = np.where(self.ended, 0, self.steps + 1)
        truncated = self.steps >= TIME_LIMIT
        self.ended = terminated | truncated
        return self.observation(), reward, terminated, truncated

    def observation(self) -> Floats:
        planes = np.stack([environment.state() for environment in self.environments])
        return np.ascontiguousarray(np.moveaxis(planes, -1, 1), dtype=np.float32)


GAME = Breakout
