"""The figure of a monitor: gradient norms of layers by step, the last histograms, updates, calls, and clipping."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._remedies import INSTALL
from ._charts import FINITE_EDGES, Record, Selection, counts_by_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LAYERS = 40
"""The largest number of rows; more layers are merged into their parent modules."""

MANY_PARAMETERS = 4
"""The largest number of a module's own parameters that share one row."""

LONGEST_NAME = 32
"""The largest number of characters of a label; longer names are shown without their middle."""

STRAY = 0.005
"""Outer bins of the histograms are not drawn if they have at most this share of each layer's elements."""

EARLIER = 8
"""The largest number of earlier steps in the chart of calls."""

LABEL_GAP = 0.075
"""The smallest distance of two labels, as a share of the axes' height."""

COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red")

Series = list[tuple[int, float]]
History = dict[str, Series]


def draw(history: History, record: Record, selection: Selection, path: str | Path | None) -> Figure:
    """Draw one row per layer at the top, and lines over the steps at the bottom."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ImportError(f"GradientMonitor.plot needs matplotlib: {INSTALL} matplotlib") from error

    by_parameter = {name: row for name, row in counts_by_name(record.gradients) if selection.has(name)}
    layers = layers_of(list(by_parameter))
    histograms = {
        layer: [sum(bins) for bins in zip(*map(by_parameter.__getitem__, names), strict=True)]
        for layer, names in layers.items()
    }
    norms, short = _layer_norms(history, layers), short_names(layers)
    ratios, clip_rate = _by_tag(history, "update_to_weight_ratio/"), history.get("clip_rate")
    calls = _by_tag(history, "activation_gradient_norm/")
    num_panels = 1 + bool(ratios) + bool(calls) + bool(clip_rate)
    height = max(2.2, 1.1 + 0.2 * len(histograms))
    figure = matplotlib.figure.Figure(figsize=(max(13, 4.5 * num_panels), height + 3.4), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(height, 3.4))
    upper, lower = halves
    heat, bins = upper.subplots(1, 2, sharey=True, width_ratios=(1.6, 1))
    _draw_norms(upper, heat, norms, short)
    _draw_histograms(bins, histograms, record)

    panels = iter(lower.subplots(1, num_panels, squeeze=False)[0])
    _draw_lines(next(panels), "gradient norm", _totals(history), norms)
    if ratios:
        _draw_lines(next(panels), "update-to-weight ratio (usually about 1e-3)", {}, ratios)
    if calls:
        _draw_calls(next(panels), calls)
    if clip_rate:
        _draw_clip_rate(next(panels), clip_rate)
    if path is not None:
        figure.savefig(os.path.expanduser(path), dpi=150)
    return figure


# ---- Layers and names ------------------------------------------------------------------------------------------------


def layers_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Parameters by module, at the greatest depth of the tree with at most `MOST_LAYERS` modules.

    A module with many parameters of its own, such as an LSTM with several layers, is split into its parameters. If a
    depth has too many modules and the depth above it has few, as with a hundred blocks in a list, neighbours are
    merged.
    """
    own = Counter(name.rpartition(".")[0] for name in names)
    paths = {name: name.split(".") for name in names}
    paths = {
        name: path if own[".".join(path[:-1])] > MANY_PARAMETERS else path[:-1] or path for name, path in paths.items()
    }
    layers: dict[str, list[str]] = {}
    deeper: dict[str, list[str]] = {}
    for depth in range(max(map(len, paths.values()), default=1), 0, -1):
        layers, deeper = {}, layers
        for name, path in paths.items():
            layers.setdefault(".".join(path[:depth]), []).append(name)
        if len(layers) <= MOST_LAYERS:
            break
    if len(layers) > MOST_LAYERS:
        return _merged(layers, math.ceil(len(layers) / MOST_LAYERS))
    if deeper and 4 * len(layers) < MOST_LAYERS:
        return _merged(deeper, math.ceil(len(deeper) / (MOST_LAYERS - len(layers))))
    return layers


def _merged(layers: dict[str, list[str]], size: int) -> dict[str, list[str]]:
    """Merge up to `size` neighbours of the same module into one row, about the same number in each row."""
    merged: dict[str, list[str]] = {}
    for _, group in groupby(layers, lambda layer: layer.rpartition(".")[0]):
        siblings = list(group)
        rows = math.ceil(len(siblings) / size)
        for start, end in pairwise(len(siblings) * row // rows for row in range(rows + 1)):
            first, last = siblings[start], siblings[end - 1]
            joint = first if first == last else f"{first}…{last.rpartition('.')[2]}"
            merged[joint] = [name for layer in siblings[start:end] for name in layers[layer]]
    return merged


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Names without the parts that all names begin or end with; long ones without their middle."""
    paths = [name.split(".") for name in names]
    most = min(map(len, paths), default=1) - 1 if len(paths) > 1 else 0
    first = _shared(paths, most)
    last = _shared([path[::-1] for path in paths], most - first)
    half = LONGEST_NAME // 2
    short = {".".join(path): ".".join(path[first : len(path) - last]) for path in paths}
    return {
        name: cut if len(cut) <= LONGEST_NAME else f"{cut[: half - 1]}…{cut[-half:]}" for name, cut in short.items()
    }


def _shared(paths: list[list[str]], most: int) -> int:
    """Number of parts, up to `most`, that all paths begin with."""
    return next((n for n in range(most) if len({path[n] for path in paths}) > 1), most)


def _by_tag(history: History, prefix: str) -> History:
    """Series of the tags with this prefix, by the rest of the tag."""
    return {tag.removeprefix(prefix): series for tag, series in history.items() if tag.startswith(prefix)}


def _layer_norms(history: History, layers: dict[str, list[str]]) -> History:
    found = {
        layer: history.get(f"module_gradient_norm/{layer}")
        or _joint_norm(history[tag] for name in names if (tag := f"gradient_norm/{name}") in history)
        for layer, names in layers.items()
    }
    return {layer: series for layer, series in found.items() if series}


def _joint_norm(parts: Iterable[Series]) -> Series:
    norms: dict[int, list[float]] = {}
    for step, norm in chain.from_iterable(parts):
        norms.setdefault(step, []).append(norm)
    return [(step, math.hypot(*norms[step])) for step in sorted(norms)]


def _totals(history: History) -> History:
    """The two total norms. Either may be missing, because a thinned history may contain only skipped steps."""
    tags = {"all layers": "gradient_norm_total", "before clipping": "gradient_norm_total_before_clipping"}
    return {label: history[tag] for label, tag in tags.items() if tag in history}


# ---- Rows of layers --------------------------------------------------------------------------------------------------


def _draw_norms(figure: Any, axes: Any, norms: History, short: dict[str, str]) -> None:
    """Draw a heat map of layer by step. Black is a norm of 0, and grey a step without a gradient."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    series = {layer: dict(found) for layer, found in norms.items()}
    steps = sorted({step for found in series.values() for step in found})
    rows = [[series.get(layer, {}).get(step, math.nan) for step in steps] for layer in short]
    positive = [norm for row in rows for norm in row if 0 < norm < math.inf]
    if positive:
        low = min(positive)
        high = max(*positive, 2 * low)  # so that rounding does not look like a difference
        is_zero = any(norm == 0 for row in rows for norm in row)
        shown = [[low / 2 if norm == 0 else norm for norm in row] for row in rows]
        edges = [(a + b) / 2 for a, b in pairwise([2 * steps[0] - [*steps, steps[0] + 1][1], *steps])]
        edges.append(2 * steps[-1] - edges[-1])
        mesh = axes.pcolormesh(
            edges,
            [row - 0.5 for row in range(len(short) + 1)],
            shown,
            cmap=colormaps["viridis"].with_extremes(under="black", bad="0.85"),
            norm=LogNorm(low, high),
            rasterized=True,
        )
        figure.colorbar(mesh, ax=axes, extend="min" if is_zero else "neither", pad=0.01, aspect=30)
    axes.set(title="gradient norm of each layer", xlabel="step")
    _label_integers(axes)
    axes.set_yticks(range(len(short)), list(short.values()), fontsize=8)
    axes.set_ylim(len(short) - 0.4, -0.9)
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)


def _draw_histograms(axes: Any, histograms: dict[str, list[int]], record: Record) -> None:
    """Draw ridges: each row shows the share of the layer's elements in each bin."""
    shares = {layer: [count / max(sum(counts), 1) for count in counts] for layer, counts in histograms.items()}
    filled = [index for row in shares.values() for index, share in enumerate(row) if share > STRAY]
    first, last = (min(filled), max(filled) + 1) if filled else (0, len(FINITE_EDGES) - 1)
    edges = [edge - math.log2(record.unscaled_by()) for edge in FINITE_EDGES[first : last + 1]]
    highest = max(map(max, shares.values()), default=0.0) or 1.0
    for row, layer in enumerate(shares):
        tops = [row + 0.45 - 0.9 * share / highest for share in shares[layer][first:last]]
        axes.stairs(tops, edges, baseline=row + 0.45, fill=True, color="tab:blue", alpha=0.85)
        axes.axhline(row + 0.45, color="0.85", linewidth=0.6, zorder=0)
    total = sum(map(sum, histograms.values()))
    outside = total - sum(sum(counts[first:last]) for counts in histograms.values())
    note = f"   ({100 * outside / total:.1g} % are outside)" if outside else ""
    axes.set(title=f"gradient elements at step {record.step}", xlabel=f"log2 |g|{note}", xlim=(edges[0], edges[-1]))
    _label_integers(axes)
    axes.tick_params(left=False, labelleft=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


# ---- Lines over the steps --------------------------------------------------------------------------------------------


def _draw_lines(axes: Any, title: str, totals: History, series: History) -> None:
    """Draw the totals in black, the two lines with the highest and the two with the lowest last values in colours, and
    the others in grey. Grey lines have no labels."""
    series = {name: found for name, found in series.items() if any(0 < y < math.inf for _, y in found)}
    colors, short = _colors_of(series), short_names(series)
    for name in series.keys() - colors:
        _draw_line(axes, series[name], color="0.8", linewidth=0.8)
    labels: list[tuple[float, str, str]] = []
    for name, color in colors.items():
        _draw_line(axes, series[name], color=color, linewidth=1.2)
        labels.append((series[name][-1][1], short[name], color))
    for (label, found), style in zip(totals.items(), ("-", (0, (4, 2))), strict=False):
        _draw_line(axes, found, color="black", linewidth=1.6, linestyle=style)
        labels.append((found[-1][1], label, "black"))
    grey = "   (grey: the others)" if len(series) > len(colors) else ""
    axes.set(title=title, xlabel=f"step{grey}", yscale=_scale_of({**totals, **series}))
    _finish(axes)
    _label_ends(axes, labels)


def _colors_of(series: History) -> dict[str, str]:
    """The colours of the two lines with the highest and the two with the lowest last values."""
    ordered = sorted(series, key=lambda name: series[name][-1][1])
    marked = dict.fromkeys([*ordered[:-3:-1], *ordered[:2][::-1]])
    return dict(zip(marked, COLORS, strict=False))


def _draw_calls(axes: Any, history: History) -> None:
    """Draw the gradient norms of modules' outputs over the calls in one pass, and label lines as `_draw_lines` does:
    a line for the last recorded step, and pale ones for up to `EARLIER` steps before it."""
    by_module: dict[str, dict[int, Series]] = {}
    for tag, series in sorted(history.items(), key=lambda entry: int(entry[0].rpartition("/")[2])):
        module, _, call = tag.rpartition("/")
        for step, norm in series:
            by_module.setdefault(module, {}).setdefault(step, []).append((int(call), norm))
    newest = {module: by_step[max(by_step)] for module, by_step in by_module.items()}
    colors, short = _colors_of(newest), short_names(by_module)
    for module, by_step in by_module.items():
        color = colors.get(module, "0.8")
        *earlier, _ = sorted(by_step)
        for step in earlier[:: math.ceil(len(earlier) / EARLIER) or 1]:
            _draw_line(axes, by_step[step], color=color, linewidth=0.8, alpha=0.3)
        _draw_line(axes, newest[module], color=color, linewidth=1.6)
    xlabel = f"call in a pass of step {max(map(max, by_module.values()))}   (pale: earlier steps)"
    axes.set(title="gradient norm at each call", xlabel=xlabel, yscale=_scale_of(history))
    _finish(axes)
    _label_ends(axes, [(newest[module][-1][1], short[module], color) for module, color in colors.items()])


def _draw_clip_rate(axes: Any, series: Series) -> None:
    _draw_line(axes, series, color="tab:blue", linewidth=1.4)
    axes.set(title="share of steps that were clipped", xlabel="step", ylim=(-0.03, 1.03))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    _finish(axes)


def _draw_line(axes: Any, series: Series, **style: Any) -> None:
    axes.plot(*zip(*series, strict=True), marker="o" if len(series) < 3 else None, markersize=4, **style)


def _scale_of(history: History) -> str:
    """Logarithmic, unless nothing can be drawn then."""
    return "log" if any(0 < y < math.inf for series in history.values() for _, y in series) else "linear"


def _label_integers(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)


def _finish(axes: Any) -> None:
    axes.margins(x=0)
    _label_integers(axes)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _label_ends(axes: Any, labels: list[tuple[float, str, str]]) -> None:
    """Write names next to the lines' last values."""
    low, high = map(math.log, axes.get_ylim()) if axes.get_yscale() == "log" else (0.0, 1.0)

    def height_of(value: float) -> float:
        """Between 0 and 1. The value 0 is at the bottom, and inf and NaN are at the top."""
        return (math.log(value) - low) / (high - low) if 0 < value < math.inf else float(value != 0)

    placed = -math.inf
    for index, (value, label, color) in enumerate(sorted(labels, key=lambda entry: height_of(entry[0]))):
        height = height_of(value)
        room_above = 1 - LABEL_GAP * (len(labels) - 1 - index)
        placed = max(min(height, room_above), placed + LABEL_GAP)
        axes.annotate(
            label,
            (1, height),
            (1.06, placed),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=color,
            fontsize=8,
            va="center",
            arrowprops=dict(arrowstyle="-", color=color, linewidth=0.6, shrinkA=0, shrinkB=0, relpos=(0, 0.5)),
            annotation_clip=False,
        )
