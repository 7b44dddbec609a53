"""Prioritised replay, and the targets of MuZero.

Schaul et al., "Prioritized experience replay", ICLR 2016; Schrittwieser et al. 2020, Methods, "Training", and
`make_target` of its pseudocode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gradscale_ext as gs
from games import Booleans, Floats, Integers


@dataclass
class Episode:
    """A played episode, with an entry for every transition."""

    observations: list[Floats] = field(default_factory=list)
    legal_actions: list[Booleans] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    search_policies: list[Floats] = field(default_factory=list)
    search_values: list[float] = field(default_factory=list)
    terminated: bool = False  # True if the rules of the game ended it, False for a time limit
    final_value: float = 0.0  # search value of the final state, for an episode that was not terminated

    def __len__(self) -> int:
        """Number of transitions so far."""
        return len(self.rewards)


def n_step_returns(
    rewards: list[float], search_values: list[float], final_value: float, bootstrap_steps: int, discount: float
) -> Floats:
    """z_t = r_t + γ r_{t+1} + … + γ^(n-1) r_{t+n-1} + γ^n ν_{t+n}, where ν is the search value.

    Args:
        rewards: r, of L transitions.
        search_values: ν of the states in which the transitions begin.
        final_value: ν of the state after the last transition: 0 if the episode terminated there. Returns that reach the
            end of the episode bootstrap from it.
        bootstrap_steps: n.
        discount: γ. It is negative with two players: rewards and values belong to the player to move.
    """
    root_values = torch.tensor([[*search_values, final_value]], dtype=torch.float64)
    targets = gs.muzero_targets(
        torch.tensor([rewards], dtype=torch.float64),
        root_values,
        num_unroll_steps=len(rewards),
        td_steps=bootstrap_steps,
        discount=discount,
    )
    return targets.values[0, :-1].numpy().astype(np.float32)


@dataclass
class Batch:
    """B positions from the replay buffer, with the K actions that followed, and targets for T = K + 1 predictions."""

    index: Integers | None  # [B], positions in the replay buffer
    observation: Tensor  # [B, *observation_shape]
    legal_actions: Tensor  # [B, A], bool: legal actions of the root
    actions: Tensor  # [B, K], int64
    targets: dict[str, Tensor]  # value [B, T], reward [B, K] (the root has none), policy [B, T, A]
    mask: dict[str, Tensor]  # [B, T], bool: True where the target exists
    importance_weights: Tensor  # [B]

    def to(self, device: torch.device) -> Batch:
        """What a learner step needs, on a device."""
        return Batch(
            index=None,
            observation=self.observation.to(device),
            legal_actions=self.legal_actions.to(device),
            actions=self.actions.to(device),
            targets={name: target.to(device) for name, target in self.targets.items()},
            mask={name: mask.to(device) for name, mask in self.mask.items()},
            importance_weights=self.importance_weights.to(device),
        )


class ReplayBuffer:
    """A ring buffer of transitions, sampled by priority."""

    def __init__(
        self,
        capacity: int,
        observation_shape: tuple[int, ...],
        num_actions: int,
        unroll_steps: int,
        bootstrap_steps: int,
        discount: float,
        priority_exponent: float,
        importance_exponent: float,
    ) -> None:
        """Make an empty ring buffer."""
        self.capacity = capacity
        self.num_actions = num_actions
        self.unroll_steps = unroll_steps
        self.bootstrap_steps = bootstrap_steps
        self.discount = discount
        self.priority_exponent = priority_exponent
        self.importance_exponent = importance_exponent
        self.num_added = 0
        self.observation = np.zeros((capacity, *observation_shape), dtype=np.float32)
        self.legal_actions = np.zeros((capacity, num_actions), dtype=bool)
        self.action = np.zeros(capacity, dtype=np.int64)
        self.reward = np.zeros(capacity, dtype=np.float32)
        self.policy = np.zeros((capacity, num_actions), dtype=np.float32)
        self.value = np.zeros(capacity, dtype=np.float32)
        self.steps_left = np.zeros(capacity, dtype=np.int64)  # up to the episode's end, including this one
        self.terminated = np.zeros(capacity, dtype=bool)  # True if that end is a termination
        self.priority = np.zeros(capacity, dtype=np.float64)  # priorities raised to the priority exponent

    def __len__(self) -> int:
        """Number of transitions in the ring."""
        return min(self.num_added, self.capacity)

    def add(self, episode: Episode) -> None:
        """Add an episode. Its initial priorities follow the paper: |ν - z| with the search value ν."""
        value_targets = n_step_returns(
            episode.rewards, episode.search_values, episode.final_value, self.bootstrap_steps, self.discount
        )
        index = (self.num_added + np.arange(len(episode))) % self.capacity
        self.observation[index] = episode.observations
        self.legal_actions[index] = episode.legal_actions
        self.action[index] = episode.actions
        self.reward[index] = episode.rewards
        self.policy[index] = episode.search_policies
        self.value[index] = value_targets
        self.steps_left[index] = np.arange(len(episode), 0, -1)
        self.terminated[index] = episode.terminated
        self.update_priorities(
            index, torch.tensor(episode.search_values)[:, None], torch.from_numpy(value_targets)[:, None]
        )
        self.num_added += len(episode)

    def update_priorities(self, index: Integers, expected_value: Tensor, value_targets: Tensor) -> None:
        """Set the priorities of positions from `[B, T]` expected values and targets; only the root counts."""
        priority = gs.priorities(expected_value, value_targets, steps="first", alpha=self.priority_exponent, eps=1e-3)
        self.priority[index] = priority.numpy()

    def sample(self, batch_size: int, generator: np.random.Generator, normalize: bool = True) -> Batch:
        """Draw positions i with P(i) = p_i / Σp, and weights (N P(i))^-β, scaled so that the largest of the batch is 1.

        Without `normalize` the weights are not scaled: the loss does so by the largest weight of all ranks' batches.
        """
        cumulated = np.cumsum(self.priority[: len(self)])
        draws = generator.random(batch_size) * cumulated[-1]
        index = np.minimum(np.searchsorted(cumulated, draws, side="right"), len(self) - 1)
        probability = self.priority[index] / cumulated[-1]
        weights = (len(self) * probability) ** -self.importance_exponent
        if normalize:
            weights /= weights.max()
        position, inside, absorbing = self.window(index)
        targets = {
            "value": np.where(inside, self.value[position], 0),
            "reward": np.where(inside, self.reward[position], 0)[:, :-1],
            "policy": self.policy[position],
        }
        # Prediction k of the reward is for transition k - 1; the first column of its mask, for the root, is not read.
        known = inside | absorbing
        mask = {"value": known, "reward": np.roll(known, 1, axis=1), "policy": inside}
        random_actions = generator.integers(self.num_actions, size=position.shape)
        actions = np.where(inside, self.action[position], random_actions)[:, :-1]
        return Batch(
            index=index,
            observation=torch.from_numpy(self.observation[index]),
            legal_actions=torch.from_numpy(self.legal_actions[index]),
            actions=torch.from_numpy(actions),
            targets={name: torch.from_numpy(target) for name, target in targets.items()},
            mask={name: torch.from_numpy(head_mask) for name, head_mask in mask.items()},
            importance_weights=torch.from_numpy(weights.astype(np.float32)),
        )

    def window(self, index: Integers) -> tuple[Integers, Booleans, Booleans]:
        """The T positions from each index on, and masks of the positions inside the episode and absorbing. `[B, T]`
        each.

        States after a termination are absorbing: for any action, reward and value are 0, as in the pseudocode. Nothing
        is known after a time limit, so these positions are neither.
        """
        steps = np.arange(self.unroll_steps + 1)
        position = (index[:, None] + steps) % self.capacity
        inside = steps < self.steps_left[index, None]
        absorbing = ~inside & self.terminated[index, None]
        return position, inside, absorbing

    def state_dict(self) -> dict[str, Any]:
        """The transitions, for a checkpoint."""
        return {"num_added": self.num_added, "arrays": self.filled()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the transitions of a checkpoint."""
        self.num_added = state["num_added"]
        for name, array in self.filled().items():
            array[:] = state["arrays"][name]

    def filled(self) -> dict[str, Any]:
        """The part of each array that holds transitions."""
        return {name: value[: len(self)] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
