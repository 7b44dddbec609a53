"""Draws bench/results/loss.svg from bench/results/loss.json: time of a MuZero update's loss against the batch size.

python bench/plot.py
"""

from __future__ import annotations

import json
import re

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from harness import RESULTS

COLORS = {"eager": "#b2522f", "torch.compile": "#c9a227", "fused": "#1f5f8b"}


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "gradscale_ext"  # the same file for the same numbers
    data = json.loads((RESULTS / "loss.json").read_text())
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
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
        axis.set(xscale="log", yscale="log", xlabel="batch size", title=wanted)
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.grid(which="major", alpha=0.3)
    axes[0].set_ylabel("ms (median; shaded: 20th to 80th percentile)")
    axes[0].legend(frameon=False)
    machine = data["machine"]
    figure.suptitle(
        "Loss of one MuZero update: 3 heads, 6 steps, 601 bins, 18 actions, fp32\n"
        f"{machine['cpu']}, {machine['threads']} threads, PyTorch {machine['torch']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(RESULTS / "loss.svg", metadata={"Date": None})
    print(f"written to {RESULTS / 'loss.svg'}")


if __name__ == "__main__":
    main()
