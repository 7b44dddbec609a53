"""CartPole of Gymnasium: balance a pole on a cart by pushing the cart left or right."""

from __future__ import annotations

import gymnasium

from games import Booleans, Floats, Game, Integers


class CartPole(Game):
    """A reward of 1 for every step, until the pole falls, the cart leaves the track, or 500 steps are over."""

    title = "CartPole-v1"
    observation_shape = (4,)
    num_actions = 2
    return_to_solve = gymnasium.spec(title).reward_threshold
    max_minutes = 4.5
    evaluation_episodes = 20

    def __init__(self, num_games: int) -> None:
        """Make the environments, which step together as arrays."""
        super().__init__(num_games)
        self.environments = gymnasium.make_vec(self.title, num_games, vectorization_mode="vector_entry_point")

    def reset(self, seed: int) -> Floats:
        return self.environments.reset(seed=seed)[0]

    def step(self, action: Integers) -> tuple[Floats, Floats, Booleans, Booleans]:
        return self.environments.step(action)[:4]


GAME = CartPole
