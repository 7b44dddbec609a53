"""The hyperparameters of a run. Each of them is also an option of `train.py`, and games may have other defaults."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

import games


def option(default: int | float | str, description: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field of the configuration with what the command line's help says about it."""
    return dataclasses.field(default=default, metadata={"help": description, "choices": choices})


@dataclass(frozen=True)
class Configuration:
    """All that a run is determined by. A run goes on from a checkpoint only with the configuration it began with."""

    game: str = option("cartpole", "what is played", choices=games.names())
    seed: int = option(0, "seed of the networks, the environments, the search and the replay")
    loss: str = option("fused", "implementation of the loss", choices=("fused", "reference"))

    actors: int = option(0, "actors on Ray that play and keep the replay buffer; 0 plays in this process")
    num_environments: int = option(32, "environments played at once")
    training_steps: int = option(
        3_000, "steps of all environments after which training ends, if the game is not solved before"
    )
    num_simulations: int = option(25, "simulations of a search")
    discount: float = option(0.997, "discount of the return")
    dirichlet_alpha: float = option(0.3, "concentration of the noise on the root's prior")
    dirichlet_fraction: float = option(0.25, "share of the noise in the root's prior")
    random_actions: float = option(0.0, "share of self-play's actions for which all legal ones are equally likely")

    unroll_steps: int = option(5, "K, the steps that the model is unrolled for in training")
    bootstrap_steps: int = option(50, "n of the n-step return")
    replay_capacity: int = option(30_000, "transitions that the replay buffer holds")
    minimum_replay: int = option(1_000, "transitions in the replay buffer at which learning begins")
    priority_exponent: float = option(0.6, "alpha of prioritised replay; 0 samples uniformly")
    importance_exponent: float = option(0.4, "beta of prioritised replay; 1 corrects all of the bias")

    support_limit: float = option(20.0, "largest value and reward, in the coordinates of the paper's transform")
    support_bins: int = option(161, "bins of value and reward; an odd number, so that one of them is 0")
    hidden_size: int = option(32, "size of the hidden state")
    layer_size: int = option(64, "size of the networks' hidden layers")
    batch_size: int = option(128, "positions in the batch of a learner step")
    updates_per_step: int = option(2, "learner steps for each step of the environments")
    learning_rate: float = option(2e-3, "Adam's step size at the beginning; it falls linearly to a tenth of it")
    weight_decay: float = option(1e-5, "weight of the L2 loss")

    def share(self, part: int, parts: int, *names: str) -> Configuration:
        """What one of several processes does: its part of these numbers, with a seed of its own."""
        shares = {name: (getattr(self, name) + part) // parts for name in names}
        for name in shares:
            if getattr(self, name) < parts:
                raise ValueError(f"{parts} processes cannot share {option_name(name)} {getattr(self, name)}")
        return dataclasses.replace(self, seed=self.seed + 1000 * part, **shares)

    @property
    def signed_discount(self) -> float:
        """What a value counts a step earlier: γ; and -γ with two players, as what one of them wins the other loses."""
        return self.discount if games.load(self.game).players == 1 else -self.discount


def add_options(parser: argparse.ArgumentParser, game: str) -> None:
    """Adds an option for every hyperparameter, with the defaults of a game."""
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
    """The configuration that the command line asks for."""
    return Configuration(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Configuration)})


def option_name(field_name: str) -> str:
    """The option of a field: `training_steps` is `--training-steps`."""
    return "--" + field_name.replace("_", "-")
