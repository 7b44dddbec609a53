"""Learning curves of the example of PPO on each of its games.

    python bench/ppo_curves.py --json bench/results/ppo.json

A run ends when its game is solved, or after the game's number of steps. Two runs share the machine, and the file is
written after each. `bench/plot.py` draws them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

import curves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import ppo


def learned(seed: int, game: str) -> dict[str, Any]:
    torch.set_num_threads(1)  # as in the example
    began = time.process_time()
    training = ppo.Training(game, seed)
    while not training.finished:
        training.step()
    processor_seconds = time.process_time() - began
    players = {"the agent": training.agent, "random play": None}
    evaluation = {player: ppo.evaluate(game, agent, seed + 1_000) for player, agent in players.items()}
    return curves.record(game, seed, training, training.episodes, processor_seconds, evaluation)


if __name__ == "__main__":
    curves.run(__doc__, learned, ppo.SETTINGS, "ppo")
