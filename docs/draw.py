"""Draws the images in docs/images/ from numbers that it computes, and from bench/results/matrix.json.

python docs/draw.py            # all of them
python docs/draw.py matrix     # one

Pictures are at most 4.6 inches wide, so that a phone shows all of it, with words that can be read.
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
        axes.text(x + (0 if is_level else 0.1), y + (0.05 if is_level else 0), text, color=color, fontsize=9, **place)


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
    """The unrolled network, a step in each row, with the factors of the gradient on its way back to the observation."""
    steps = 3
    scale = inspect.signature(gs.unroll).parameters["hidden_scale"].default
    arriving = root_gradients(steps, scale, "unroll")
    figure, axes = plt.subplots(figsize=(4.6, 4.2))
    empty(axes, 6.2, 5.4)
    state, heads, loss, sums = 1.35, 3.15, 4.85, 5.85
    box(axes, state, 5.1, "observation", 1.4, GREY)
    axes.text(sums, 4.7, "arrives\nat $s_0$", fontsize=9, ha="center", va="center")
    for k, arrived in enumerate(arriving):
        y = 4.0 - 1.15 * k
        box(axes, state, y, f"state $s_{k}$", 1.2)
        box(axes, heads, y, f"heads, step {k}", 1.6, GREEN)
        box(axes, loss, y, f"loss {k}", 0.85, GOLD)
        arrow(axes, (loss - 0.43, y), (heads + 0.81, y), "1" if k == 0 else "1/K", color=RED)
        arrow(axes, (heads - 0.81, y), (state + 0.61, y), color=RED)
        axes.text(sums, y, f"{arrived:.3g}", fontsize=9, ha="center", va="center")
        # The factor is for the way from the state of a recurrent step back to the previous state.
        factor = f"{scale:g}" if k > 1 else ""
        arrow(axes, (state, y + 0.27), (state, y + (0.82 if k == 0 else 0.88)), factor, color=RED)
        if k > 0:
            axes.text(state - 0.1, y + 0.57, "dynamics", ha="right", va="center", fontsize=8, color=GREY)
    return figure


def hidden_norms() -> Figure:
    """Gradient of the hidden state of an LSTM at each of its steps, with and without scaling."""
    steps, size, batch = 20, 64, 16
    ways = {
        "as it is": (1.0, None),
        "hidden_scale=0.5": (0.5, None),
        'hidden_scale=0.5,\nstep_gradient_scale="unroll"': (0.5, "unroll"),
    }
    figure, axes = plt.subplots(figsize=(4.6, 3.4))
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
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(4.6, 5.6))
    x = torch.linspace(-100, 100, 401, dtype=torch.float64)
    upper.plot(x, gs.signed_hyperbolic(x), color=BLUE, label="signed_hyperbolic")
    upper.plot(x, gs.symlog(x), color=GOLD, label="symlog")
    upper.set(xlabel="raw value", ylabel="transformed value", title="transforms")
    upper.grid(alpha=0.3)
    upper.legend(frameon=False, fontsize=8)
    low, high, share = 0.0, 100.0, torch.linspace(0, 1, 21, dtype=torch.float64)
    for space, color in (("transformed", RED), ("raw", BLUE)):
        support = gs.Support(-300, 300, 601, space=space)
        ends = support.two_hot(torch.tensor([low, high], dtype=torch.float64))
        distribution = (1 - share)[:, None] * ends[0] + share[:, None] * ends[1]
        decoded = support.decode(distribution.log())
        lower.plot(share, decoded, color=color, marker="o", markersize=3, label=f'space="{space}"')
    lower.plot(share, low + share * (high - low), color=GREY, linestyle="--", linewidth=1, label="true mean")
    lower.set(
        xlabel=f"share of returns of {high:g}, the others {low:g}",
        ylabel="decoded value",
        title="expectation of a mixture",
    )
    lower.grid(alpha=0.3)
    lower.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def clipping() -> Figure:
    """Gradient norms of the samples of a batch with one outlier, before and after clipping."""
    torch.manual_seed(0)
    gradient = torch.randn(12, 8) * 0.2
    gradient[4] *= 20
    figure, panels = plt.subplots(3, 1, figsize=(4.6, 5), sharex=True, sharey=True)
    titles = ["incoming gradient", "clip_gradient_norm(x, 1.0)", "clip_gradient_norm(x, 1.0, batch_dims=1)"]
    for axes, title, batch_dims in zip(panels, titles, (None, 0, 1), strict=True):
        x = torch.zeros(12, 8, requires_grad=True)
        y = x.view_as(x) if batch_dims is None else gs.clip_gradient_norm(x, 1.0, batch_dims=batch_dims)
        y.backward(gradient)
        norms = x.grad.norm(dim=1).tolist()
        axes.bar(range(12), norms, color=[RED if sample == 4 else BLUE for sample in range(12)])
        axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
        axes.set(yscale="log", ylabel="gradient norm")
        axes.set_title(title, fontsize=9)
    panels[-1].set_xlabel("sample")
    figure.tight_layout()
    return figure


def kernel_or_reference() -> Figure:
    """The path that a call of the loss takes."""
    figure, axes = plt.subplots(figsize=(4.6, 4.0))
    empty(axes, 5.6, 4.9)
    questions = [
        'impl="reference"?',
        "wrapper subclasses,\ntorch.func transforms\nor forward mode?",
        "another device than\nCPU and CUDA?",
        "torch.compile or\ntorch.export tracing?",
        "no: the fused kernel",
    ]
    places = [4.5 - 1.0 * row for row in range(len(questions))]
    for y, question in zip(places, questions, strict=True):
        is_last = y == places[-1]
        box(axes, 1.35, y, question, 2.4, GREEN if is_last else GREY, 0.5 if is_last else 0.7)
        if not is_last:
            arrow(axes, (2.58, y), (3.28, y), "yes")
            arrow(axes, (1.35, y - 0.37), (1.35, y - 0.63 - 0.1 * (y == places[-2])), "no" if y != places[-2] else "")
    box(axes, 4.4, 4.0, "the reference,\nin plain PyTorch", 2.2, GOLD, 1.7)
    box(axes, 4.4, places[2], "the reference,\ncompiled", 2.2, GOLD, 0.7)
    box(axes, 4.4, places[3], "one operator\nin the graph", 2.2, GREEN, 0.7)
    return figure


# ---- Which value belongs where --------------------------------------------------------------------------------------


class Timeline:
    """Transitions from above to below: states, what ends them, their flags and what each bootstraps from."""

    def __init__(self, title: str, columns: tuple[str, str]) -> None:
        self.figure, self.axes = plt.subplots(figsize=(4.6, 5.2))
        empty(self.axes, 5.9, 7.0)
        self.axes.text(0.1, 6.75, title, fontsize=9.5, fontweight="bold", va="center")
        for x, column in zip((3.95, 5.3), columns, strict=True):
            self.axes.text(x, 6.3, column, fontsize=8, ha="center", va="center", family="monospace")

    def y(self, t: float) -> float:
        return 5.9 - 0.92 * t

    def state(self, t: int, name: str, color: str) -> None:
        box(self.axes, 0.6, self.y(t), name, 0.7, color, 0.42)

    def step(self, t: int, text: str, **options: Any) -> None:
        arrow(self.axes, (0.6, self.y(t) - 0.23), (0.6, self.y(t + 1) + 0.23), text, **options)

    def cells(self, t: int, flag: str, bootstrap: str, color: str = "black") -> None:
        for x, text in ((3.95, flag), (5.3, bootstrap)):
            self.axes.text(x, self.y(t + 0.5), text, fontsize=9, ha="center", va="center", color=color)


def which_value() -> Figure:
    """Transitions with a termination and a truncation whose final observations are returned on the side."""
    line = Timeline("The final observation is on the side", ("flag", "next_values"))
    colors = {2: RED, 4: GREEN}
    ends = {2: "$s'_2$: worth 0", 4: "$s'_4$: final_obs"}
    flags = {2: "terminated", 4: "truncated"}
    bootstraps = ["$V(s_1)$", "$V(s_2)$", "not read", "$V(s_4)$", "$V(s'_4)$", "$V(s'_5)$"]
    for t, color in enumerate((BLUE, BLUE, BLUE, GOLD, GOLD, GREY, GREY)):
        line.state(t, f"$s_{t}$" if t < 6 else "$s'_5$", color)
        if t in ends:
            y, end = line.y(t + 0.5), colors[t]
            box(line.axes, 2.3, y, ends[t], 1.5, end, 0.42)
            arrow(line.axes, (0.97, line.y(t) - 0.1), (1.52, y + 0.05), color=end)
            line.axes.text(1.35, line.y(t) - 0.12, f"$r_{t}$", ha="left", va="center", fontsize=9, color=end)
            line.step(t, "reset", color=GREY, linestyle=":")
        elif t < 6:
            line.step(t, f"$r_{t}$")
        if t < 6:
            line.cells(t, flags.get(t, ""), bootstraps[t], colors.get(t, "black"))
    line.axes.text(1.1, line.y(6), "the window ends", fontsize=8, va="center", color=GREY)
    return line.figure


def which_value_next_step() -> Figure:
    """A truncation whose final observation is one of the T + 1, where the next step resets."""
    line = Timeline("The final observation is one of the T + 1", ("mask", "values[:, 1:]"))
    names = ("$s_0$", "$s_1$", "$s_2$", "$s'_2$", "$s_4$", "$s_5$", "$s_6$")
    read = ["$V(s_1)$", "$V(s_2)$", "$V(s'_2)$", "–", "$V(s_5)$", "$V(s_6)$"]
    for t, (name, color) in enumerate(zip(names, (BLUE, BLUE, BLUE, GREEN, GOLD, GOLD, GOLD), strict=True)):
        line.state(t, name, color)
        if t == 3:
            line.step(t, "reset", color=GREY, linestyle=":")
        elif t < 6:
            line.step(t, f"$r_{t}$")
        if t < 6:
            line.cells(t, "False" if t == 3 else "", read[t], {2: GREEN, 3: RED}.get(t, "black"))
    line.axes.text(1.1, line.y(3), "the final observation", fontsize=8, va="center", color=GREEN)
    line.axes.text(1.1, line.y(6), "the window ends", fontsize=8, va="center", color=GREY)
    return line.figure


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
    figure, axes = plt.subplots(figsize=(4.6, 6.4))
    colors = matplotlib.colors.ListedColormap(["#cfe3d4", "#efe2b0", "#c8532f"])
    colors.set_under("white")
    axes.imshow(worst, cmap=colors, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(names)), names, rotation=90, ha="center", fontsize=8)
    axes.set_yticks(range(len(contexts)), contexts, fontsize=8)
    for row in range(1, len(contexts)):
        axes.axhline(row - 0.5, color="white", linewidth=1.2)
    for column in range(1, len(names)):
        axes.axvline(column - 0.5, color="white", linewidth=1.2)
    for row, verdicts in enumerate(worst):
        for column, verdict in enumerate(verdicts):
            if verdict > 0:
                axes.text(column, row, ("", "–", "×")[verdict], ha="center", va="center", fontsize=9)
    axes.set_xlabel("green: right   –: raises   ×: silently wrong   white: does not apply", fontsize=8, loc="right")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.tight_layout()
    return figure


# ---- Design ---------------------------------------------------------------------------------------------------------


def house() -> Figure:
    """The folders of the package and of csrc/, from the public API down to the formulas."""
    figure, axes = plt.subplots(figsize=(4.6, 5.2))
    empty(axes, 6.0, 6.8)
    rows = [
        (6.5, ["flow.py", "returns.py"], BLUE),
        (5.95, ["loss/, heads.py, support.py"], BLUE),
        (5.4, ["statistics/", "monitor/", "diagnosis/", "capture/"], BLUE),
        (4.6, ["reference/: all of it in plain PyTorch"], GOLD),
        (4.05, ["_context.py: the context of a call"], GREY),
        (3.25, ["csrc/module.cpp: the Python module"], GREY),
        (2.45, ["csrc/flow/", "csrc/loss/", "csrc/support/"], GREEN),
        (1.9, ["csrc/statistics/", "csrc/returns/", "csrc/capture/"], GREEN),
        (1.1, ["csrc/torch/: autograd, contexts, memory"], GREY),
        (0.3, ["csrc/cpu/", "csrc/cuda/"], GREY),
        (-0.25, ["csrc/formulas/: formulas for CPU and GPU"], RED),
    ]
    axes.set_ylim(-0.6, 6.8)
    for y, parts, color in rows:
        width = 5.8 / len(parts)
        for index, text in enumerate(parts):
            box(axes, 0.1 + width * (index + 0.5), y, text, width - 0.1, color, 0.45)
    return figure


DRAWINGS: dict[str, Callable[[], Figure]] = {
    drawing.__name__: drawing
    for drawing in (
        unroll,
        hidden_norms,
        spaces,
        clipping,
        kernel_or_reference,
        which_value,
        which_value_next_step,
        matrix,
        house,
    )
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
