"""Acting by search in parallel games: to collect episodes, and to evaluate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import games
from configuration import Configuration
from games import Booleans, Floats, Game, Integers
from networks import MuZeroNetwork
from replay import Episode
from search import SearchResult, search

# Evaluation resets the games with seeds from this value on; training uses the run's own seed.
FIRST_EVALUATION_SEED = 1_000_000
STATE = ("game", "observation", "ended", "episodes")  # of self-play, in a checkpoint

Player = Callable[[Game, Floats], Integers]  # maps games and their observations to actions


class SelfPlay:
    """Plays all games in lockstep, and yields every episode after its end."""

    def __init__(self, configuration: Configuration, generator: np.random.Generator) -> None:
        """Begin all games."""
        self.configuration = configuration
        self.generator = generator
        self.game = games.load(configuration.game)(configuration.num_environments)
        self.observation = self.game.reset(configuration.seed)
        self.ended = np.zeros(configuration.num_environments, dtype=bool)
        self.episodes = [Episode() for _ in range(configuration.num_environments)]

    def step(self, network: MuZeroNetwork) -> list[Episode]:
        """Act once in every game. Returns the finished episodes.

        A game shows its final state for one more step, and ignores the action then. The search evaluates the final
        state like any other: an episode that a time limit cut off bootstraps from this value, and only a terminated one
        ends with 0.
        """
        legal_actions = self.game.legal_actions()
        result = self.search(network, legal_actions)
        policy = explored(result.policy, legal_actions, self.configuration.random_actions)
        action = draw_actions(policy, self.generator)
        next_observation, reward, terminated, truncated = self.game.step(action)
        finished = []
        for i, episode in enumerate(self.episodes):
            if self.ended[i]:
                episode.final_value = 0.0 if episode.terminated else float(result.value[i])
                finished.append(episode)
                self.episodes[i] = Episode()
                continue
            episode.observations.append(self.observation[i])
            episode.legal_actions.append(legal_actions[i])
            episode.actions.append(int(action[i]))
            episode.rewards.append(float(reward[i]))
            episode.search_policies.append(result.policy[i])
            episode.search_values.append(float(result.value[i]))
            episode.terminated = bool(terminated[i])
        self.observation, self.ended = next_observation, terminated | truncated
        return finished

    def search(self, network: MuZeroNetwork, legal_actions: Booleans) -> SearchResult:
        """Search all games, with noise at the roots."""
        settings = self.configuration
        return search(
            network,
            self.observation,
            legal_actions,
            settings.num_simulations,
            settings.signed_discount,
            dirichlet_noise(legal_actions, settings.dirichlet_alpha, self.generator),
            settings.dirichlet_fraction,
        )

    def state_dict(self) -> dict[str, Any]:
        """The games and their unfinished episodes, for a checkpoint."""
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the games of a checkpoint."""
        for name in STATE:
            setattr(self, name, state[name])


def dirichlet_noise(legal_actions: Booleans, alpha: float, generator: np.random.Generator) -> Floats:
    """A symmetric Dirichlet distribution over each row's legal actions `[E, A]`: normalised gamma variates."""
    variates = generator.standard_gamma(alpha, size=legal_actions.shape)
    variates = np.maximum(variates, np.finfo(float).tiny) * legal_actions  # with a small alpha a whole row may be 0
    return (variates / variates.sum(axis=-1, keepdims=True)).astype(np.float32)


def explored(policy: Floats, legal_actions: Booleans, share: float) -> Floats:
    """Probabilities `[E, A]` of a mixture of uniformly random legal actions and actions drawn from the policy."""
    if share == 0:
        return policy
    return (1 - share) * policy + share * (legal_actions / legal_actions.sum(axis=-1, keepdims=True))


def draw_actions(policy: Floats, generator: np.random.Generator) -> Integers:
    """Draw an action from each row of probabilities `[E, A]`, never one of probability 0."""
    cumulated = policy.cumsum(axis=-1)
    return (cumulated <= generator.random((len(policy), 1)) * cumulated[:, -1:]).sum(axis=-1)


def evaluate(network: MuZeroNetwork, configuration: Configuration) -> dict[str, Floats]:
    """Returns of the agent, which takes the best action of each search without noise, and of its opponent.

    Each plays a game of one player alone; in a game of two players they play against each other.
    """
    game = games.load(configuration.game)
    generator = np.random.default_rng(configuration.seed)

    def agent(game: Game, observation: Floats) -> Integers:
        settings = configuration
        return search(
            network, observation, game.legal_actions(), settings.num_simulations, settings.signed_discount
        ).best_action

    def opponent(game: Game, _: Floats) -> Integers:
        return game.opponent_actions(generator)

    def returns(*players: Player) -> Floats:
        return play(game(game.evaluation_episodes), players, FIRST_EVALUATION_SEED + configuration.seed)

    if game.players == 1:
        return {"the agent": returns(agent), game.opponent: returns(opponent)}
    return {
        f"the agent, which begins, against {game.opponent}": returns(agent, opponent),
        f"the agent against {game.opponent}, which begins": -returns(opponent, agent),
    }


def play(game: Game, players: tuple[Player, ...], seed: int) -> Floats:
    """Play one episode of every game, in which the players take turns. Returns the return of the first player."""
    observation = game.reset(seed)
    returns = np.zeros(game.num_games)
    running = np.ones(game.num_games, dtype=bool)
    turn = 0
    while running.any():
        observation, reward, terminated, truncated = game.step(players[turn](game, observation))
        returns += np.where(running, reward if turn == 0 else -reward, 0)
        running &= ~(terminated | truncated)
        turn = (turn + 1) % len(players)
    return returns
