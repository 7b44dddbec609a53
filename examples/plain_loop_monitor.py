"""Watching the gradients of a plain training loop: one line attaches the monitor, and the loop stays as it was.

    pip install ".[monitor]"
    python examples/plain_loop_monitor.py
    tensorboard --logdir runs/plain_loop

A small network learns whether two points are in the same quadrant. It ends within seconds, and writes logs for
TensorBoard and a picture.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import gradscale_ext as gs


def batch_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of points `[size, 4]`, and a flag for each pair: both in the same quadrant `[size]`."""
    points = torch.randn(size, 2, 2)
    same = (points[:, 0].sign() == points[:, 1].sign()).all(dim=1)
    return points.flatten(1), same.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/plain_loop"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=600, help="training steps (default: %(default)s)")
    options = parser.parse_args()
    directory = options.directory.expanduser()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    with (
        SummaryWriter(directory) as writer,
        gs.GradientMonitor(model, optimizer, writer=writer, every=10) as monitor,
    ):
        for _ in range(options.steps):
            points, same = batch_of(256)
            loss = nn.functional.binary_cross_entropy_with_logits(model(points).squeeze(1), same)
            optimizer.zero_grad()
            loss.backward()
            gs.clip_gradients_(model, max_norm=0.3)
            optimizer.step()

    picture = directory / "gradients.png"
    monitor.plot(picture)
    clip_rate = monitor.history["clip_rate"][-1][1]
    print(f"loss of the last step {loss.item():.3f}; clipped at {100 * clip_rate:.0f} % of the last steps")
    print(f"picture: {picture}")
    print(f"logs: tensorboard --logdir {directory}")


if __name__ == "__main__":
    main()
