"""Acting by search in parallel environments: to gather episodes, and to evaluate."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from configuration import Configuration
from networks import MuZeroNetwork
from replay import Episode
from search import search

ENVIRONMENT = "CartPole-v1"

# Evaluation resets the environments with seeds from here on, training with the run's own.
FIRST_EVALUATION_SEED = 1_000_000


def make_environments(num_environments: int) -> gymnasium.vector.VectorEnv:
    """CartPole-v1, many times over in one process. Its time limit is 500 steps."""
    return gymnasium.make_vec(ENVIRONMENT, num_environments, vectorization_mode="vector_entry_point")


class SelfPlay:
    """Plays all environments in step, and hands every episode out when it has ended."""

    def __init__(self, configuration: Configuration, generator: np.random.Generator) -> None:
        """Begin an episode in every environment."""
        self.configuration = configuration
        self.generator = generator
        self.environments = make_environments(configuration.num_environments)
        self.observation, _ = self.environments.reset(seed=configuration.seed)
        self.ended = np.zeros(configuration.num_environments, dtype=bool)
        self.episodes = [Episode() for _ in range(configuration.num_environments)]

    def step(self, network: MuZeroNetwork) -> list[tuple[Episode, float]]:
        """Acts once in every environment. Returns the episodes that have ended, each with the value of its final state.

        An environment shows the final state of its episode for one more step, and ignores the action then ("next step"
        autoreset of Gymnasium). So the final state is searched like any other, which gives its value: an episode that
        the time limit cut off bootstraps from it, and only a terminated one ends with 0.
        """
        settings = self.configuration
        num_actions = self.environments.single_action_space.n
        noise = self.generator.dirichlet([settings.dirichlet_alpha] * num_actions, size=settings.num_environments)
        result = search(
            network,
            self.observation,
            settings.num_simulations,
            settings.discount,
            noise.astype(np.float32),
            settings.dirichlet_fraction,
        )
        action = draw_actions(result.policy, self.generator)
        next_observation, reward, terminated, truncated, _ = self.environments.step(action)
        finished = []
        for i, episode in enumerate(self.episodes):
            if self.ended[i]:
                finished.append((episode, 0.0 if episode.terminated else float(result.value[i])))
                self.episodes[i] = Episode()
                continue
            episode.observations.append(self.observation[i])
            episode.actions.append(int(action[i]))
            episode.rewards.append(float(reward[i]))
            episode.search_policies.append(result.policy[i])
            episode.search_values.append(float(result.value[i]))
            episode.terminated = bool(terminated[i])
        self.observation, self.ended = next_observation, terminated | truncated
        return finished

    def state_dict(self) -> dict[str, Any]:
        """The environments and their unfinished episodes, for a checkpoint."""
        return {name: getattr(self, name) for name in ("environments", "observation", "ended", "episodes")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the environments of a checkpoint."""
        vars(self).update(state)


def draw_actions(policy: NDArray[np.float32], generator: np.random.Generator) -> NDArray[np.int64]:
    """Draws an action from each row of probabilities `[E, A]`."""
    draws = generator.random((len(policy), 1))
    return (policy.cumsum(axis=-1) <= draws).sum(axis=-1).clip(max=policy.shape[-1] - 1)


def evaluate(network: MuZeroNetwork, configuration: Configuration, num_episodes: int) -> NDArray[np.float64]:
    """Returns of episodes played in parallel, without noise, by the best action of each search."""
    environments = make_environments(num_episodes)
    observation, _ = environments.reset(seed=FIRST_EVALUATION_SEED + configuration.seed)
    returns = np.zeros(num_episodes)
    running = np.ones(num_episodes, dtype=bool)
    while running.any():
        result = search(network, observation, configuration.num_simulations, configuration.discount)
        observation, reward, terminated, truncated, _ = environments.step(result.best_action)
        returns += np.where(running, reward, 0)
        running &= ~(terminated | truncated)
    return returns
