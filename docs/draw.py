"""Draws the images in docs/images/ from numbers that it computes, and from bench/results/matrix.json.

python docs/draw.py            # all of them
python docs/draw.py matrix     # one
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import gradscale_ext as gs

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
MATRIX = ROOT / "bench" / "results" / "matrix.json"
BLUE, RED, GOLD, GREEN, GREY = "#1f5f8b", "#b2522f", "#c9a227", "#3b7d4f", "#8a8a8a"


def box(axes: Axes, x: float, y: float, text: str, width: float, color: str = BLUE, height: float = 0.5) -> None:
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0.02,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=color + "22", edgecolor=color))
    axes.text(x, y, text, ha="center", va="center", fontsize=9)


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], text: str = "", **options: Any) -> None:
    color = options.pop("color", "black")
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "color": color, "linewidth": 1.2, **options}
    axes.add_patch(FancyArrowPatch(begin, end, **style))
    if text:
        x, y = (begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2
        is_level = abs(begin[1] - end[1]) < abs(begin[0] - end[0])
        place = {"ha": "center", "va": "bottom"} if is_level else {"ha": "left", "va": "center"}
        axes.text(x + (0 if is_level else 0.07), y + (0.05 if is_level else 0), text, color=color, fontsize=9, **place)


def empty(axes: Axes, width: float, height: float) -> None:
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")


# ---- Concepts -------------------------------------------------------------------------------------------------------


def root_gradients(steps: int, hidden_scale: float, step_gradient_scale: str | None) -> list[float]:
    """Gradient of the root state from the loss of each step; dynamics and heads are the identity."""
    gradients = []
    for chosen in range(steps + 1):
        root = torch.ones(1, dtype=torch.float64, requires_grad=True)
        losses = gs.unroll(
            lambda s: ({"loss": s}, s),
            lambda s, _: ({"loss": s}, s),
            root,
            torch.ones(1, steps),
            hidden_scale=hidden_scale,
        )["loss"]
        mask = torch.zeros(1, steps + 1, dtype=torch.bool)
        mask[:, chosen] = True
        gs.reduce_multi_step(losses, mask=mask, step_gradient_scale=step_gradient_scale).loss.backward()
        gradients.append(root.grad.item())
    return gradients


def unroll() -> Figure:
    """The unrolled network, with the factors of the gradient on its way back, and the gradient at the root."""
    steps = 3
    scale = inspect.signature(gs.unroll).parameters["hidden_scale"].default
    arriving = root_gradients(steps, scale, "unroll")
    figure, axes = plt.subplots(figsize=(8.4, 4.0))
    empty(axes, 9.0, 4.2)
    places = [1.0 + 2.3 * k for k in range(steps + 1)]
    for k, x in enumerate(places):
        box(axes, x, 1.7, f"state $s_{k}$", 1.1)
        box(axes, x, 2.9, f"heads, step {k}", 1.3, GREEN)
        box(axes, x, 3.9, f"loss {k}", 0.9, GOLD, 0.4)
        arrow(axes, (x, 2.62), (x, 1.98), color=RED)
        arrow(axes, (x, 3.67), (x, 3.18), "1" if k == 0 else "1/K", color=RED)
        if k > 0:
            arrow(axes, (x - 0.58, 1.7), (places[k - 1] + 0.58, 1.7), "", color=RED)
            axes.text((x + places[k - 1]) / 2, 1.6, "dynamics", ha="center", va="top", fontsize=8, color=GREY)
            if k > 1:  # from the state of a recurrent step back to the previous state
                axes.text((x + places[k - 1]) / 2, 1.77, f"{scale:g}", color=RED, fontsize=9, ha="center", va="bottom")
    box(axes, places[0], 0.5, "observation", 1.1, GREY)
    arrow(axes, (places[0], 1.42), (places[0], 0.78), color=RED)
    text = "arriving at $s_0$ from the loss of each step (K = 3):  " + ",  ".join(f"{g:.3g}" for g in arriving)
    axes.text(places[0] + 0.9, 0.5, text, fontsize=9, va="center")
    return figure


def hidden_norms() -> Figure:
    """Gradient of the hidden state of an LSTM at each of its steps, with and without scaling."""
    steps, size, batch = 20, 64, 16
    ways = {
        "as it is": (1.0, None),
        "hidden_scale=0.5": (0.5, None),
        'hidden_scale=0.5, step_gradient_scale="unroll"': (0.5, "unroll"),
    }
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    for (name, (hidden_scale, step_gradient_scale)), color in zip(ways.items(), (RED, GOLD, BLUE), strict=True):
        torch.manual_seed(0)
        cell, head = torch.nn.LSTMCell(size, size), torch.nn.Linear(size, 1)
        torch.nn.init.normal_(cell.weight_hh, std=0.4)  # large enough that gradients grow on their way back
        torch.nn.init.ones_(cell.bias_ih[size : 2 * size])  # forget gate bias, as usual
        states: list[torch.Tensor] = []

        def recurrent(hidden: Any, x: torch.Tensor, cell: Any = cell, head: Any = head, states: Any = states) -> Any:
            hidden = cell(x, hidden)
            hidden[1].retain_grad()
            states.append(hidden[1])
            return {"value": head(hidden[0]).squeeze(1)}, hidden

        zeros = (torch.zeros(batch, size), torch.zeros(batch, size))
        actions = torch.randn(batch, steps, size)
        outputs = gs.unroll(lambda hidden: ({}, hidden), recurrent, zeros, actions, hidden_scale=hidden_scale)
        losses = [torch.zeros(batch), *(value.square() for value in outputs["value"])]
        gs.reduce_multi_step(losses, step_gradient_scale=step_gradient_scale).loss.backward()
        norms = [state.grad.norm().item() for state in states]
        axes.plot(range(1, steps + 1), norms, color=color, marker="o", markersize=3, label=name)
    axes.set(yscale="log", xlabel=f"step of the unroll, of {steps}", ylabel="gradient norm of the cell state")
    axes.set_xticks([1, 5, 10, 15, 20])
    axes.grid(which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def spaces() -> Figure:
    """The transforms, and the value that a head decodes after learning a mixture of two returns, in either space."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4))
    x = torch.linspace(-100, 100, 401, dtype=torch.float64)
    left.plot(x, gs.signed_hyperbolic(x), color=BLUE, label="signed_hyperbolic")
    left.plot(x, gs.symlog(x), color=GOLD, label="symlog")
    left.set(xlabel="raw value", ylabel="transformed value", title="transforms")
    left.grid(alpha=0.3)
    left.legend(frameon=False, fontsize=8)
    low, high, share = 0.0, 100.0, torch.linspace(0, 1, 21, dtype=torch.float64)
    for space, color in (("transformed", RED), ("raw", BLUE)):
        support = gs.Support(-300, 300, 601, space=space)
        ends = support.two_hot(torch.tensor([low, high], dtype=torch.float64))
        distribution = (1 - share)[:, None] * ends[0] + share[:, None] * ends[1]
        decoded = support.decode(distribution.log())
        right.plot(share, decoded, color=color, marker="o", markersize=3, label=f'space="{space}"')
    right.plot(share, low + share * (high - low), color=GREY, linestyle="--", linewidth=1, label="true mean")
    right.set(
        xlabel=f"share of returns of {high:g}, the others {low:g}",
        ylabel="decoded value",
        title="expectation of a mixture",
    )
    right.grid(alpha=0.3)
    right.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def clipping() -> Figure:
    """Gradient norms of the samples of a batch with one outlier, before and after clipping."""
    torch.manual_seed(0)
    gradient = torch.randn(12, 8) * 0.2
    gradient[4] *= 20
    figure, panels = plt.subplots(1, 3, figsize=(8.4, 2.9), sharey=True)
    titles = ["incoming gradient", "clip_gradient_norm(x, 1.0)", "clip_gradient_norm(x, 1.0, batch_dims=1)"]
    for axes, title, batch_dims in zip(panels, titles, (None, 0, 1), strict=True):
        x = torch.zeros(12, 8, requires_grad=True)
        y = x.view_as(x) if batch_dims is None else gs.clip_gradient_norm(x, 1.0, batch_dims=batch_dims)
        y.backward(gradient)
        norms = x.grad.norm(dim=1).tolist()
        axes.bar(range(12), norms, color=[RED if sample == 4 else BLUE for sample in range(12)])
        axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
        axes.set(yscale="log", xlabel="sample")
        axes.set_title(title, fontsize=8.5)
    panels[0].set_ylabel("gradient norm")
    figure.tight_layout()
    return figure


def kernel_or_reference() -> Figure:
    """The path that a call of the loss takes."""
    figure, axes = plt.subplots(figsize=(8.4, 3.7))
    empty(axes, 9.0, 4.0)
    questions = [
        'impl="reference"?',
        "wrapper subclasses, torch.func\ntransforms or forward mode?",
        "another device\nthan CPU and CUDA?",
        "torch.compile or\ntorch.export tracing?",
    ]
    for row, question in enumerate(questions):
        y = 3.55 - 0.95 * row
        box(axes, 2.1, y, question, 3.2, GREY, 0.62)
        arrow(axes, (3.75, y), (5.35, y), "yes")
        if row < len(questions) - 1:
            arrow(axes, (2.1, y - 0.34), (2.1, y - 0.61), "no")
    box(axes, 7.1, 3.075, "gradscale_ext.reference:\nthe same formulas in plain PyTorch", 3.4, GOLD, 1.57)
    box(axes, 7.1, 1.65, "gradscale_ext.reference,\ncompiled by torch.compile", 3.4, GOLD, 0.62)
    box(axes, 7.1, 0.7, "one operator in the graph,\nwhose kernel runs with it", 3.4, GREEN, 0.62)
    arrow(axes, (2.1, 0.36), (2.1, 0.14), "")
    axes.text(2.3, 0.1, "no: the fused kernel, at once", fontsize=9, va="center", color=BLUE)
    return figure


def which_value() -> Figure:
    """Transitions with a termination and a truncation, by the environment's reset mode: where each value is stored."""
    figure, axes = plt.subplots(figsize=(8.4, 5.6))
    empty(axes, 10.2, 6.8)
    places = [1.9 + 1.25 * t for t in range(7)]

    def title(y: float, text: str) -> None:
        axes.text(0.1, y, text, fontsize=9.5, fontweight="bold", va="center")

    def row(y: float, name: str, cells: list[str], colors: dict[int, str]) -> None:
        axes.text(0.1, y, name, fontsize=8.5, va="center", family="monospace")
        for t, cell in enumerate(cells):
            x = (places[t] + places[t + 1]) / 2
            axes.text(x, y, cell, fontsize=9, ha="center", va="center", color=colors.get(t, "black"))

    def step(t: int, y: float, reward: str) -> None:
        arrow(axes, (places[t] + 0.3, y), (places[t + 1] - 0.3, y), reward)

    title(6.55, "The final observation is returned on the side: final_obs (SAME_STEP autoreset)")
    y, ends = 5.0, {2: ("$s'_2$: worth 0", RED), 4: ("$s'_4$: final_obs", GREEN)}
    for t, color in enumerate((BLUE, BLUE, BLUE, GOLD, GOLD, GREY, GREY)):
        box(axes, places[t], y, f"$s_{t}$" if t < 6 else "$s'_5$", 0.52, color, 0.42)
        if t in ends:
            text, end_color = ends[t]
            box(axes, places[t] + 0.75, y + 0.95, text, 1.45, end_color, 0.42)
            arrow(axes, (places[t] + 0.1, y + 0.25), (places[t] + 0.45, y + 0.7), color=end_color)
            axes.text(places[t] + 0.1, y + 0.52, f"$r_{t}$", ha="right", va="center", fontsize=9, color=end_color)
            arrow(axes, (places[t + 1] - 0.2, y + 0.7), (places[t + 1], y + 0.27), color=GREY, linestyle=":")
            axes.text(places[t + 1] + 0.02, y + 0.52, "reset", ha="left", va="center", fontsize=9, color=GREY)
        elif t < 6:
            step(t, y, f"$r_{t}$")
    colors = {2: RED, 4: GREEN}
    row(4.3, "terminated", ["", "", "True", "", "", ""], colors)
    row(3.95, "truncated", ["", "", "", "", "True", ""], colors)
    bootstraps = ["$V(s_1)$", "$V(s_2)$", "not read", "$V(s_4)$", "$V(s'_4)$", "$V(s'_5)$"]
    row(3.6, "next_values", bootstraps, colors)
    axes.text(places[6] - 0.3, 4.3, "the window ends", fontsize=8, ha="center", va="center", color=GREY)

    title(2.75, "The final observation is one of the T + 1: the next step resets (NEXT_STEP autoreset)")
    y = 2.0
    names = ("$s_0$", "$s_1$", "$s_2$", "$s'_2$", "$s_4$", "$s_5$", "$s_6$")
    for t, (name, color) in enumerate(zip(names, (BLUE, BLUE, BLUE, GREEN, GOLD, GOLD, GOLD), strict=True)):
        box(axes, places[t], y, name, 0.52, color, 0.42)
        if t == 3:
            arrow(axes, (places[t] + 0.3, y), (places[t + 1] - 0.3, y), "reset", color=GREY, linestyle=":")
        elif t < 6:
            step(t, y, f"$r_{t}$")
    row(1.3, "mask", ["", "", "", "False", "", ""], {3: RED})
    read = ["$V(s_1)$", "$V(s_2)$", "$V(s'_2)$", "–", "$V(s_5)$", "$V(s_6)$"]
    row(0.95, "values[:, 1:]", read, {2: GREEN, 3: GREY})
    note = "No truncated here: the transition before a masked one bootstraps from the final observation."
    axes.text(0.1, 0.45, note, fontsize=8.5, va="center")
    return figure


# ---- Benchmarks -----------------------------------------------------------------------------------------------------


def matrix() -> Figure:
    """Contexts of PyTorch by ways of changing a gradient: the worst verdict over all versions of PyTorch."""
    everything = json.loads(MATRIX.read_text())
    names = list(dict.fromkeys(name for verdicts in everything.values() for name in verdicts))
    contexts = list(next(iter(everything.values()))[names[0]])
    order = {"right": 0, "error": 1, "wrong": 2}
    missing = -1
    worst = [
        [
            max(order.get(verdicts.get(name, {}).get(context, ""), missing) for verdicts in everything.values())
            for name in names
        ]
        for context in contexts
    ]
    figure, axes = plt.subplots(figsize=(9.6, 7.4))
    colors = matplotlib.colors.ListedColormap(["#cfe3d4", "#efe2b0", "#c8532f"])
    colors.set_under("white")
    axes.imshow(worst, cmap=colors, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(names)), names, rotation=40, ha="left", fontsize=8)
    axes.set_yticks(range(len(contexts)), contexts, fontsize=8)
    for row in range(1, len(contexts)):
        axes.axhline(row - 0.5, color="white", linewidth=1.2)
    for column in range(1, len(names)):
        axes.axvline(column - 0.5, color="white", linewidth=1.2)
    for row, verdicts in enumerate(worst):
        for column, verdict in enumerate(verdicts):
            if verdict > 0:
                axes.text(column, row, ("", "–", "×")[verdict], ha="center", va="center", fontsize=9)
    axes.set_xlabel("pale: right      – : raises      × : silently wrong      white: does not apply", fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.tight_layout()
    return figure


# ---- Design ---------------------------------------------------------------------------------------------------------


def house() -> Figure:
    """The folders of the package and of csrc/, from the public API down to the formulas."""
    figure, axes = plt.subplots(figsize=(8.4, 4.6))
    empty(axes, 9.0, 5.0)
    rows = [
        (4.7, [("flow.py", BLUE), ("loss/, heads.py, support.py", BLUE), ("returns.py", BLUE)]),
        (4.15, [("statistics/", BLUE), ("monitor/", BLUE), ("diagnosis/", BLUE), ("capture/", BLUE)]),
        (
            3.4,
            [("reference/: all of it in plain PyTorch", GOLD), ("_context.py: which context is this call in?", GREY)],
        ),
        (2.7, [("csrc/module.cpp: the Python module", GREY)]),
        (1.8, [(f"csrc/{name}/", GREEN) for name in ("flow", "loss", "support", "statistics", "returns", "capture")]),
        (1.1, [("csrc/torch/: autograd, contexts, the pool of gradients' memory", GREY)]),
        (
            0.4,
            [
                ("csrc/formulas/: for both", RED),
                ("csrc/cpu/: lanes", GREY),
                ("csrc/cuda/: lanes, launches", GREY),
            ],
        ),
    ]
    for y, parts in rows:
        width = 8.6 / len(parts)
        for index, (text, color) in enumerate(parts):
            box(axes, 0.2 + width * (index + 0.5), y, text, width - 0.1, color, 0.45)
    return figure


DRAWINGS: dict[str, Callable[[], Figure]] = {
    drawing.__name__: drawing
    for drawing in (unroll, hidden_norms, spaces, clipping, kernel_or_reference, which_value, matrix, house)
}


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "gradscale_ext"  # same numbers, same file
    plt.rcParams["axes.spines.top"] = plt.rcParams["axes.spines.right"] = False
    IMAGES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or DRAWINGS:
        figure = DRAWINGS[name]()
        path = IMAGES / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
        print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
