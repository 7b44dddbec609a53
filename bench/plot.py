"""Draws pictures of results: loss.svg, the time of a MuZero update's loss against the batch size; speed.svg, a table of
README as bars; learning.svg and learning_ppo.svg, the learning curves of bench/curves.py and bench/ppo_curves.py.

python bench/plot.py

Pictures of the site are at most 4.6 inches wide, so that a phone shows all of it, with words that can be read.
"""

from __future__ import annotations

import json
import re

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness import RESULTS
from readme import source_of, speed_rows

COLORS = {"eager": "#b2522f", "torch.compile": "#c9a227", "fused": "#1f5f8b"}


def draw_bars() -> None:
    """Times of each contestant relative to the fused call."""
    rows = speed_rows()
    figure, axis = plt.subplots(figsize=(8, 3.2))
    for number, (contestant, color) in enumerate(COLORS.items()):
        ratios = [found[contestant]["median_ms"] / found["fused"]["median_ms"] for found in rows.values()]
        places = [place + 0.27 * (number - 1) for place in range(len(rows))]
        bars = axis.barh(places, ratios, height=0.25, color=color, label=contestant)
        times = [found[contestant]["median_ms"] for found in rows.values()]
        labels = [f" {1e3 * ms:.0f} µs" if ms < 0.1 else f" {ms:.2f} ms" for ms in times]
        axis.bar_label(bars, labels, fontsize=7, color=color)
    axis.set_yticks(range(len(rows)), [name.replace("`", "").replace(": ", "\n") for name in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("time relative to gradscale_ext (fused)", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.12)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(COLORS), frameon=False, fontsize=8)
    figure.tight_layout()
    save(figure, "speed")


def save(figure: Figure, name: str) -> None:
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None, "Source": source_of(name)})
    print(f"written to {RESULTS / name}.svg")


def draw_lines() -> None:
    """Time against batch size, forward and with backward."""
    data = json.loads((RESULTS / "loss.json").read_text())
    figure, axes = plt.subplots(2, 1, figsize=(4.6, 6), sharex=True, sharey=True)
    for axis, wanted in zip(axes, ("forward", "forward+backward"), strict=True):
        for contestant, color in COLORS.items():
            points = sorted(
                (int(found.group(1)), row["median_ms"], row["p20_ms"], row["p80_ms"])
                for row in data["rows"]
                if row["contestant"] == contestant
                and row["pass"] == wanted
                and row["dtype"] == "fp32"
                and row["threads"] == int(data["machine"]["threads"])
                and (found := re.fullmatch(r"B (\d+) K 5 S 601 A 18", row["size"]))
            )
            batches, medians, low, high = zip(*points, strict=True)
            axis.plot(batches, medians, marker="o", markersize=4, color=color, label=contestant)
            axis.fill_between(batches, low, high, color=color, alpha=0.15, linewidth=0)
        axis.set(xscale="log", yscale="log", ylabel="ms", title=wanted.replace("+", " + "))
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.grid(which="major", alpha=0.3)
    axes[1].set_xlabel("batch size")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    save(figure, "loss")


SEEDS = [{"color": "#1f5f8b", "linestyle": "-"}, {"color": "#b2522f", "linestyle": "--"}]  # also apart without colour
MARKS = "Dx"  # markers of the two results of an evaluation


def draw_learning(results: str, playing: str, picture: str) -> None:
    """Returns during training by steps of the game, and the evaluation at the end, for each game and seed."""
    rows = json.loads((RESULTS / f"{results}.json").read_text())["rows"]
    titles = list(dict.fromkeys(row["title"] for row in rows))
    figure, panels = plt.subplots(len(titles), 1, figsize=(4.6, 0.6 + 2.3 * len(titles)), squeeze=False)
    for axis, title in zip(panels[:, 0], titles, strict=True):
        own = [row for row in rows if row["title"] == title]
        for run, style in zip(own, SEEDS, strict=True):
            steps, means, lows, highs = zip(*(point.values() for point in run["curve"]), strict=True)
            axis.fill_between(steps, lows, highs, color=style["color"], alpha=0.12, linewidth=0)
            axis.plot(steps, means, **style)
            for found, mark in zip(run["evaluation"].values(), MARKS, strict=True):
                axis.plot(run["environment_steps"], found["mean"], mark, color=style["color"], clip_on=False, zorder=3)
        axis.set(title=title, ylabel="return" if own[0]["players"] == 1 else "return, first player")
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.locator_params(axis="x", nbins=4)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("steps of the game")
    # One legend for all games.
    lines = [Line2D([], [], **style, label=f"{playing}, seed {seed}") for seed, style in enumerate(SEEDS)]
    names = ("the agent at the end", "compared with")
    points = [Line2D([], [], color="0.4", linestyle="", marker=m, label=n) for m, n in zip(MARKS, names, strict=True)]
    figure.legend(handles=[*lines, *points], loc="upper center", ncols=2, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.55 / figure.get_figheight()))
    save(figure, picture)


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "gradscale_ext"  # same numbers, same file
    draw_lines()
    draw_bars()
    draw_learning("curves", "self-play", "learning")
    draw_learning("ppo", "training", "learning_ppo")
