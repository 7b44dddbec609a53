"""The picture of a monitor: gradient norms of the layers over the steps, and histograms of the last step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._charts import FINITE_EDGES, Record, Selection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LAYERS = 16
"""Most rows of the picture; more layers are merged into the modules around them."""

History = dict[str, list[tuple[int, float]]]


def draw(history: History, record: Record, selection: Selection, path: str | Path | None) -> Figure:
    """Draw the norms on the left, and one histogram of `record` for each layer on the right."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("GradientMonitor.plot needs matplotlib: python -m pip install matplotlib") from error

    histograms = _histograms(record, selection)
    layers = list(histograms)
    colors = dict(
        zip(layers, colormaps["viridis"]([0.85 * i / max(len(layers) - 1, 1) for i in range(len(layers))]), strict=True)
    )
    figure = Figure(figsize=(12, max(4.5, 1.6 + 0.26 * len(layers))), layout="constrained")
    norms, bins = figure.subplots(1, 2, width_ratios=(1.35, 1))
    _draw_norms(norms, history, colors)
    _draw_histograms(bins, histograms, colors, record)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def layers_of(names: Sequence[str], most: int = MOST_LAYERS) -> dict[str, list[str]]:
    """Parameters by module, at the greatest depth of the tree with at most `most` modules."""
    paths = {name: name.split(".")[:-1] or [name] for name in names}
    depth = max(map(len, paths.values()), default=1)
    while True:
        layers: dict[str, list[str]] = {}
        for name, parts in paths.items():
            layers.setdefault(".".join(parts[:depth]), []).append(name)
        if len(layers) <= most or depth == 1:
            return layers
        depth -= 1


def _histograms(record: Record, selection: Selection) -> dict[str, list[int]]:
    """Counts of each layer, in the order of the model."""
    statistics = record.gradients
    columns = zip(statistics.names, statistics.histogram.tolist(), statistics.missing.tolist(), strict=True)
    rows = {name: row for name, row, missing in columns if not missing and selection.has(name)}
    return {
        layer: [sum(bins) for bins in zip(*map(rows.__getitem__, names), strict=True)]
        for layer, names in layers_of(list(rows)).items()
    }


def _draw_norms(axes: Any, history: History, colors: dict[str, Any]) -> None:
    for layer, color in colors.items():
        series = history.get(f"module_gradient_norm/{layer}") or history.get(f"gradient_norm/{layer}")
        if series:
            _draw_line(axes, series, color=color, linewidth=1.2)
    # Either may be missing: a long history is thinned, and may hold skipped steps alone.
    if after := history.get("gradient_norm_total"):
        _draw_line(axes, after, color="black", linewidth=1.8, label="all layers")
    if before := history.get("gradient_norm_total_before_clipping"):
        _draw_line(
            axes, before, color="black", linewidth=1.2, linestyle=(0, (4, 2)), label="all layers, before clipping"
        )
    axes.set(title="gradient norm", xlabel="step", yscale="log")
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(frameon=False, loc="best")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_line(axes: Any, series: list[tuple[int, float]], **style: Any) -> None:
    marker = "o" if len(series) < 3 else None
    axes.plot(*zip(*series, strict=True), marker=marker, markersize=4, **style)


def _draw_histograms(axes: Any, histograms: dict[str, list[int]], colors: dict[str, Any], record: Record) -> None:
    """Draw ridges: each row shows the share of the layer's elements in each bin."""
    filled = [index for counts in histograms.values() for index, count in enumerate(counts) if count]
    first, last = (min(filled), max(filled) + 1) if filled else (0, len(FINITE_EDGES) - 1)
    edges = [edge - math.log2(record.unscaled_by()) for edge in FINITE_EDGES[first : last + 1]]
    highest = max((max(counts) / max(sum(counts), 1) for counts in histograms.values()), default=0.0) or 1.0
    for row, (layer, counts) in enumerate(histograms.items()):
        shares = [row - 0.9 * count / max(sum(counts), 1) / highest for count in counts[first:last]]
        axes.stairs(shares, edges, baseline=row, fill=True, color=colors[layer], alpha=0.85)
        axes.axhline(row, color="0.85", linewidth=0.6, zorder=0)
    axes.set(title=f"gradient elements at step {record.step}", xlabel="log2 |g|", xlim=(edges[0], edges[-1]))
    axes.set_yticks(range(len(histograms)), list(histograms))
    for label, color in zip(axes.get_yticklabels(), colors.values(), strict=True):
        label.set_color(color)
    axes.set_ylim(len(histograms) - 0.85, -1.05)
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
