"""Transitions per second of the example agent on CartPole, with 0 (a single process), 1, 2 and 4 actors on Ray.

    python bench/throughput.py --json bench/results/actors.json --seconds 100

The numbers of actors take turns, in each of three modes: 32 games in total, divided among the actors, without learning;
the same with two learner steps for each step of all games; and 32 games per actor, without learning. The time of a turn
includes the wait for all pending calls of the actors. The load measured at the start shows how much else was running.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ray
import torch

import harness

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "muzero"))
from actors import ActorTraining
from configuration import Configuration
from training import Training

ACTORS = (0, 1, 2, 4)
GAMES = 32
NEVER = 2_000_000  # more transitions than a measurement has
MODES = {  # True if each actor plays GAMES games; the number of transitions at which learning begins
    "32 games in all": (False, NEVER),
    "32 games an actor": (True, NEVER),
    "32 games in all, with learning": (False, 500),
}
QUANTILES = {"median_per_s": 0.5, "p20_per_s": 0.2, "p80_per_s": 0.8}
TURN = 5.0


def begin(actors: int, each: bool, minimum_replay: int, folder: str) -> Training:
    games = GAMES * actors if each and actors else GAMES
    configuration = Configuration(
        actors=actors,
        num_environments=games,
        minimum_replay=minimum_replay,
        replay_capacity=max(minimum_replay, Configuration.replay_capacity),
        training_steps=10**9,
    )
    directory = Path(tempfile.mkdtemp(dir=folder))
    training = ActorTraining(configuration, directory, "local") if actors else Training(configuration)
    while training.environment_steps < 1500:
        training.step()
    finish(training)
    return training


def finish(training: Training) -> None:
    """Wait for the actors' pending calls."""
    if isinstance(training, ActorTraining):
        training.environment_steps += sum(transitions for _, transitions, _ in ray.get(list(training.calls)))
        training.calls.clear()


def transitions_per_second(training: Training) -> Callable[[], float]:
    def turn() -> float:
        start, before = time.perf_counter(), training.environment_steps
        while time.perf_counter() < start + TURN:
            training.step()
        finish(training)
        return (training.environment_steps - before) / (time.perf_counter() - start)

    return turn


def measured(each: bool, minimum_replay: int, seconds: float) -> dict[int, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        turns = {actors: transitions_per_second(begin(actors, each, minimum_replay, folder)) for actors in ACTORS}
        rates: dict[int, list[float]] = {actors: [] for actors in ACTORS}
        for _ in range(max(5, round(seconds / TURN / len(ACTORS)))):
            for actors, turn in turns.items():
                rates[actors].append(turn())
        ray.shutdown()
    found = {}
    for actors, values in rates.items():
        ordered = sorted(values)
        pick = {name: ordered[int(quantile * len(ordered))] for name, quantile in QUANTILES.items()}
        found[actors] = {**pick, "turns": len(ordered)}
    return found


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join((sys.path[0], os.environ.get("PYTHONPATH", "")))  # for the actors
    arguments = harness.arguments(__doc__)
    torch.set_num_threads(1)  # as in the example
    harness.show_machine()
    results, load = [], os.getloadavg()[0]
    for mode, (each, minimum_replay) in MODES.items():
        for actors, row in measured(each, minimum_replay, arguments.seconds).items():
            results.append({"mode": mode, "actors": actors, "load_before": load, **row})
            print(mode, actors, *(f"{name} {value:.0f}" for name, value in row.items()), sep="  ", flush=True)
    harness.write(arguments.json, "actors", results)


if __name__ == "__main__":
    main()
