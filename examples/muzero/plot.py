"""Plots of a run: the returns of its episodes and of the evaluation, and the gradients of the hidden state."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no display needed; must precede the import of pyplot
from matplotlib import pyplot

from games import Floats

WINDOW = 50  # window of the moving average in episodes, or a fiftieth of all episodes if that is more
EXPLORING = "episode of self-play, which explores: actions drawn at temperature 1, noise at the root"


def plot_learning_curve(
    path: Path,
    title: str,
    ylabel: str,
    curve: list[tuple[int, float]],
    environment_steps: int,
    evaluation: dict[str, Floats],
) -> None:
    """Write the plot as a PNG.

    Args:
        path: the file.
        title: the title above the plot.
        ylabel: the label of the returns.
        curve: for each episode of self-play the environment steps at its end, and its return.
        environment_steps: environment steps of the whole run, after which the agent was evaluated.
        evaluation: the returns of the evaluation's episodes, by player.
    """
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    if curve:
        steps, returns = np.asarray(curve, dtype=float).T
        axes.scatter(steps, returns, s=9, alpha=0.3, color="tab:blue", linewidths=0, label=EXPLORING)
        window = max(WINDOW, len(returns) // WINDOW)
        label = f"mean of the last {window:,} episodes"
        axes.plot(steps, moving_average(returns, window), color="tab:blue", linewidth=2, label=label)
    for (player, returns), color in zip(evaluation.items(), ("tab:orange", "tab:gray"), strict=True):
        label = f"evaluation, {player}: mean of {len(returns)} episodes, {returns.mean():.2f}"
        axes.plot(
            environment_steps, returns.mean(), "D", color=color, markersize=8, clip_on=False, zorder=3, label=label
        )
    axes.set(title=title, xlabel="environment steps", ylabel=ylabel, xlim=(0, environment_steps))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower left", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_hidden_state_gradients(path: Path, norms: dict[float, list[float]]) -> None:
    """Write the norm of the gradient at each unrolled step, by the scale of the hidden state, as a PNG."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for (scale, values), color in zip(sorted(norms.items()), ("tab:blue", "tab:orange"), strict=True):
        axes.plot(values, "o-", color=color, linewidth=2, label=f"hidden_scale {scale}")
    steps = max(map(len, norms.values()))
    axes.set(
        title="What the scale of the hidden state does to its gradient",
        xlabel="unrolled step (0: the root)",
        ylabel="norm of the gradient",
        xticks=range(steps),
        yscale="log",
    )
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def moving_average(values: Floats, window: int) -> Floats:
    """Mean of the last `window` values, or of fewer at the beginning."""
    return np.array([values[max(end - window, 0) : end].mean() for end in range(1, len(values) + 1)])
