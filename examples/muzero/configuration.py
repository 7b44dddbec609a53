"""The hyperparameters of a run. Each of them is also an option of `train.py`, and games may have other defaults."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import games
import gradscale_ext as gs

# The numbers that an option accepts, in words and as a condition. NaN satisfies none of them.
Accepted = tuple[str, Callable[[float], bool]]
ZERO_OR_MORE: Accepted = ("at least 0 and finite", lambda number: 0 <= number < math.inf)
ONE_OR_MORE: Accepted = ("at least 1", lambda number: number >= 1)
TWO_OR_MORE: Accepted = ("at least 2", lambda number: number >= 2)
POSITIVE: Accepted = ("above 0 and finite", lambda number: 0 < number < math.inf)
FRACTION: Accepted = ("from 0 to 1", lambda number: 0 <= number <= 1)
SEED: Accepted = ("from 0 to 2147483647", lambda number: 0 <= number < 2**31)
COUNT: Accepted = ("at most 2147483647", lambda number: number < 2**31)


class RunError(ValueError):
    """A run cannot begin or go on, because of an option, a file or the machine: the message says what to change."""


def check_option(name: str, number: float, accepted: Accepted) -> None:
    """Raises a RunError unless an option is one of the accepted numbers."""
    words, condition = accepted
    if not condition(number):
        raise RunError(f"{name} must be {words}, not {number}")


def choice(default: str, description: str, choices: tuple[str, ...]) -> Any:
    """A field of the configuration with one of several names, and its help text on the command line."""
    return dataclasses.field(default=default, metadata={"help": description, "choices": choices, "accepted": None})


def option(default: float, description: str, accepted: Accepted) -> Any:
    """A field of the configuration with a number, and its help text on the command line."""
    return dataclasses.field(default=default, metadata={"help": description, "choices": None, "accepted": accepted})


@dataclass(frozen=True)
class Configuration:
    """Everything that determines a run. A run continues from a checkpoint only with the configuration it began with."""

    game: str = choice("cartpole", "what is played", games.names())
    seed: int = option(0, "seed of the networks, the environments, the search and the replay", SEED)
    loss: str = choice("fused", "implementation of the loss", ("fused", "reference"))

    actors: int = option(0, "actors on Ray that play and keep the replay buffer; 0 plays in this process", ZERO_OR_MORE)
    num_environments: int = option(32, "environments played at once", ONE_OR_MORE)
    training_steps: int = option(
        3_000, "steps of all environments after which training ends, if the game is not solved before", ONE_OR_MORE
    )
    num_simulations: int = option(25, "simulations of a search", ONE_OR_MORE)
    discount: float = option(0.997, "discount of the return", FRACTION)
    dirichlet_alpha: float = option(0.3, "concentration of the noise on the root's prior", POSITIVE)
    dirichlet_fraction: float = option(0.25, "share of the noise in the root's prior", FRACTION)
    random_actions: float = option(
        0.0, "share of self-play's actions for which all legal ones are equally likely", FRACTION
    )

    unroll_steps: int = option(5, "K, the steps that the model is unrolled for in training", ONE_OR_MORE)
    bootstrap_steps: int = option(50, "n of the n-step return", ONE_OR_MORE)
    replay_capacity: int = option(30_000, "transitions that the replay buffer holds", ONE_OR_MORE)
    minimum_replay: int = option(1_000, "transitions in the replay buffer at which learning begins", ONE_OR_MORE)
    priority_exponent: float = option(0.6, "alpha of prioritised replay; 0 samples uniformly", FRACTION)
    importance_exponent: float = option(0.4, "beta of prioritised replay; 1 corrects all of the bias", FRACTION)

    support_limit: float = option(
        20.0, "largest value and reward, in the coordinates of the paper's transform", POSITIVE
    )
    support_bins: int = option(161, "bins of value and reward; an odd number, so that one of them is 0", TWO_OR_MORE)
    hidden_size: int = option(32, "size of the hidden state", ONE_OR_MORE)
    layer_size: int = option(64, "size of the networks' hidden layers", ONE_OR_MORE)
    batch_size: int = option(128, "positions in the batch of a learner step", ONE_OR_MORE)
    updates_per_step: int = option(2, "learner steps for each step of the environments", ONE_OR_MORE)
    learning_rate: float = option(
        2e-3, "Adam's step size at the beginning; it falls linearly to a tenth of it", POSITIVE
    )
    weight_decay: float = option(1e-5, "weight of the L2 loss", ZERO_OR_MORE)

    def __post_init__(self) -> None:
        """Check every number, so that a run that cannot work is rejected before it begins.

        Raises:
            RunError: an option is not among the numbers that make sense.
        """
        for field in dataclasses.fields(self):
            name, value = option_name(field.name), getattr(self, field.name)
            if field.metadata["accepted"] is not None:
                check_option(name, value, field.metadata["accepted"])
            if isinstance(value, int):
                check_option(name, value, COUNT)
        if self.minimum_replay > self.replay_capacity:
            raise RunError(
                f"--minimum-replay must be at most --replay-capacity {self.replay_capacity}, not {self.minimum_replay}"
            )
        try:
            self.support()
        except ValueError as error:
            limits = f"--support-limit {self.support_limit} and --support-bins {self.support_bins}"
            raise RunError(f"{limits} make no support: {error}") from error

    def support(self) -> gs.Support:
        """The support of value and reward. It is symmetric, so that uniform logits mean exactly 0."""
        return gs.Support(-self.support_limit, self.support_limit, self.support_bins)

    def share(self, part: int, parts: int, *names: str) -> Configuration:
        """The share of one of several processes: its part of these numbers, and its own seed."""
        shares = {name: (getattr(self, name) + part) // parts for name in names}
        for name in shares:
            if getattr(self, name) < parts:
                raise RunError(f"{parts} processes cannot share {option_name(name)} {getattr(self, name)}")
        return dataclasses.replace(self, seed=(self.seed + 1000 * part) % 2**31, **shares)

    @property
    def signed_discount(self) -> float:
        """Discount of a value one step earlier: γ; with two players -γ, because the game is zero-sum."""
        return self.discount if games.load(self.game).players == 1 else -self.discount


def add_options(parser: argparse.ArgumentParser, game: str) -> None:
    """Add an option for every hyperparameter, with the defaults of a game."""
    defaults = dataclasses.asdict(Configuration(game=game, **games.load(game).hyperparameters))
    for field in dataclasses.fields(Configuration):
        default = defaults[field.name]
        parser.add_argument(
            option_name(field.name),
            type=type(field.default),
            default=default,
            choices=field.metadata["choices"],
            metavar=None if field.metadata["choices"] else "N" if isinstance(field.default, int) else "X",
            help=f"{field.metadata['help']} (default: {default})",
        )


def from_options(options: argparse.Namespace) -> Configuration:
    """The configuration given on the command line."""
    return Configuration(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Configuration)})


def option_name(field_name: str) -> str:
    """The option of a field: `training_steps` becomes `--training-steps`."""
    return "--" + field_name.replace("_", "-")
