"""Learning curves of the example agent on each of its games.

    python bench/curves.py --json bench/results/curves.json

A run ends when its game is solved, after the game's number of steps, or after the minutes of the game, counted as
processor time, so that a busy machine learns the same. Two runs share the machine, and the file is written after each.
`bench/plot.py` draws them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harness

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "muzero"))
import games
from configuration import Configuration
from self_play import evaluate
from training import Training

SEEDS = (0, 1)
WINDOW = 50
POINTS = 100


def curve_of(episodes: list[tuple[int, float]]) -> list[dict[str, float]]:
    """Mean, 20th and 80th percentile of the returns of the latest episodes, at up to `POINTS` numbers of steps."""
    steps, returns = np.asarray(episodes, dtype=float).T
    ends = np.unique(np.linspace(min(WINDOW, len(returns)), len(returns), POINTS).round().astype(int))
    found = []
    for end in ends:
        latest = returns[max(end - WINDOW, 0) : end]
        low, high = np.quantile(latest, (0.2, 0.8))
        found.append({"steps": int(steps[end - 1]), "mean": round(latest.mean(), 4), "p20": low, "p80": high})
    return found


def learned(seed: int, game: str) -> dict[str, Any]:
    torch.set_num_threads(1)  # as in the example
    training = Training(Configuration(game=game, seed=seed, **games.load(game).hyperparameters))
    limit = 60 * training.game.max_minutes
    while not training.finished and training.processor_seconds < limit:
        training.step()
    evaluation = evaluate(training.acting_network, training.share)
    return record(game, seed, training, training.curve, training.processor_seconds, evaluation)


def record(
    game: str,
    seed: int,
    training: Any,
    episodes: list[tuple[int, float]],
    processor_seconds: float,
    evaluation: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """The row of a finished run. `evaluation` has the returns of each player."""
    return {
        "game": game,
        "title": training.game.title,
        "players": training.game.players,
        "seed": seed,
        "curve": curve_of(episodes),
        "environment_steps": training.environment_steps,
        "learner_steps": training.learner_steps,
        "episodes": len(episodes),
        "solved": training.solved,
        "processor_s": round(processor_seconds),
        "evaluation": {
            player: {"episodes": len(returns), "mean": round(float(returns.mean()), 4), "min": float(returns.min())}
            for player, returns in evaluation.items()
        },
    }


def run(description: str | None, learned: Callable[[int, str], dict[str, Any]], names: Iterable[str], benchmark: str):
    """Train on each of the games with each seed, and write the rows."""
    arguments = harness.arguments(description)
    torch.set_num_threads(1)
    harness.show_machine()
    results = []
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed(itertools.starmap(pool.submit, itertools.product([learned], SEEDS, names))):
            results.append(done.result())
            row = {name: value for name, value in results[-1].items() if name != "curve"}
            print(*(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)
            ordered = sorted(results, key=lambda row: (row["game"], row["seed"]))
            harness.write(arguments.json, benchmark, ordered)


if __name__ == "__main__":
    run(__doc__, learned, games.names(), "curves")
