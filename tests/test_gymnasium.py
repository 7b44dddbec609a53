"""The documentation's rollouts of vector environments, against advantages that are computed episode by episode."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import gradscale_ext as gs

gymnasium = pytest.importorskip("gymnasium")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "how_to" / "gymnasium.md"
NUM_ENVS, STEPS, DISCOUNT, LAMBDA = 3, 40, 0.9, 0.7
LENGTHS = (4, 1, 7, 3, 1, 1)  # of the episodes


class Scripted(gymnasium.Env):
    """Observations are (environment, episode, step). Episodes have fixed lengths; each third one is terminated, each
    third truncated, each third both."""

    observation_space = gymnasium.spaces.Box(-1e3, 1e3, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, number):
        self.number, self.episode = number, -1

    def observation(self):
        return np.array([self.number, self.episode, self.time], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.time = 0
        return self.observation(), {}

    def step(self, action):
        self.time += 1
        is_end = self.time >= LENGTHS[(self.episode + self.number) % len(LENGTHS)]
        kind = (self.episode + self.number) % 3
        return self.observation(), reward(self.observation()), is_end and kind != 1, is_end and kind != 0, {}


def reward(observation):
    number, episode, time = map(float, observation)
    return math.cos(5 * number + 3 * episode + time)


def value(observation):
    number, episode, time = map(float, observation)
    return 2 + math.sin(number + 2 * episode + 7 * time)


def episodes(number, transitions):
    """Advantages of an environment's first transitions, by the definition of GAE, one episode after the other."""
    environment, found = Scripted(number), []
    while len(found) < transitions:
        observation, _ = environment.reset()
        deltas, is_end = [], False
        while not is_end and len(found) + len(deltas) < transitions:
            following, gained, terminated, truncated, _ = environment.step(0)
            after = 0 if terminated else value(following)
            deltas.append(gained + DISCOUNT * after - value(observation))
            observation, is_end = following, terminated or truncated
        for start in range(len(deltas)):
            found.append(sum((DISCOUNT * LAMBDA) ** k * delta for k, delta in enumerate(deltas[start:])))
    return found


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_rollouts_give_the_advantages_of_each_episode(mode):
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    namespace = {}
    exec(snippets[["SAME_STEP", "NEXT_STEP"].index(mode)].partition("\ndef make")[0], namespace)
    envs = gymnasium.vector.SyncVectorEnv(
        [lambda number=number: Scripted(number) for number in range(NUM_ENVS)],
        autoreset_mode=gymnasium.vector.AutoresetMode[mode],
    )
    rollout = namespace["collect"](
        envs,
        lambda observation: np.zeros(NUM_ENVS, dtype=np.int64),
        lambda observation: torch.tensor([value(row) for row in observation], dtype=torch.float64),
        STEPS,
    )
    rollout["rewards"] = rollout["rewards"].double()
    advantages = gs.generalized_advantages(**rollout, discount=DISCOUNT, lambda_=LAMBDA).advantages
    mask = rollout.get("mask", torch.ones(NUM_ENVS, STEPS, dtype=torch.bool))
    assert mask.all() == (mode == "SAME_STEP")
    for number, (row, is_transition) in enumerate(zip(advantages, mask, strict=True)):
        expected = torch.tensor(episodes(number, int(is_transition.sum())), dtype=torch.float64)
        torch.testing.assert_close(row[is_transition], expected, rtol=1e-6, atol=1e-6)
        assert (row[~is_transition] == 0).all()
