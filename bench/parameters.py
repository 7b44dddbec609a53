"""Passes over the parameters of a model, against PyTorch's multi-tensor calls.

    python bench/parameters.py --json bench/results/parameters.json

"l2_loss" is the weight decay term, alone and with its gradient; "adaptive clipping" clips gradients by the norms of
weights, and is measured twice: with no unit (tensor or row) above its limit, and with most units above it. "and
statistics" also computes most of what `clip_gradients_` returns: norms, maxima, and counts of zeros, NaN and inf. Bytes
that must move: the loss reads the parameters once, and with the gradient reads them twice and writes once; clipping
reads gradients and weights once, and if it changes the gradients, it reads and writes them once more.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

import torch
from torch import nn

import gradscale_ext as gs
import harness
from gradients import usual as statistics

Tensors = list[torch.Tensor]
WEIGHT = 1e-4


def residual_blocks(channels: int, blocks: int) -> list[nn.Module]:
    halves = [(nn.Conv2d(channels, channels, 3, bias=False), nn.BatchNorm2d(channels)) for _ in range(2 * blocks)]
    return [layer for half in halves for layer in half]


def head(outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(64, 16, 1), nn.BatchNorm2d(16), nn.Linear(576, 32), nn.BatchNorm1d(32), nn.Linear(32, outputs)]


def efficient_zero() -> nn.Module:
    """The layers of EfficientZero's networks: representation, dynamics with an LSTM, three heads."""
    representation = [nn.Conv2d(12, 32, 3), nn.Conv2d(32, 64, 3), *residual_blocks(64, 5)]
    dynamics = [nn.Conv2d(65, 64, 3), *residual_blocks(64, 2), nn.LSTM(576, 512)]
    return nn.ModuleList([*representation, *dynamics, *head(601), *head(601), *head(18)])


def mlp() -> nn.Module:
    widths = (784, 1024, 1024, 1024, 10)
    return nn.Sequential(*(nn.Linear(*sizes) for sizes in pairwise(widths)))


def small() -> nn.Module:
    return nn.ParameterList(torch.randn(256) for _ in range(300))


MODELS: dict[str, Callable[[], nn.Module]] = {"EfficientZero": efficient_zero, "MLP": mlp, "300 x 256": small}


def foreach_loss(parameters: Tensors) -> torch.Tensor:
    return 0.5 * WEIGHT * torch.stack(torch._foreach_norm(parameters)).square().sum()


def sum_of_squares(parameters: Tensors) -> torch.Tensor:
    return 0.5 * WEIGHT * sum(parameter.square().sum() for parameter in parameters)


def our_loss(parameters: Tensors) -> torch.Tensor:
    return gs.l2_loss(parameters, WEIGHT)


def clipped_foreach(parameters: Tensors, gradients: Tensors, adaptive: float) -> None:
    """Clip by parameter, as DreamerV3 does."""
    limits, norms = torch._foreach_norm(parameters), torch._foreach_norm(gradients)
    torch._foreach_clamp_min_(limits, 1e-3)
    torch._foreach_mul_(limits, adaptive)
    torch._foreach_clamp_min_(norms, 1e-12)
    torch._foreach_div_(limits, norms)
    torch._foreach_clamp_max_(limits, 1.0)
    torch._foreach_mul_(gradients, limits)


def clipped_foreach_with_statistics(parameters: Tensors, gradients: Tensors, adaptive: float) -> Tensors:
    found = statistics(gradients)
    clipped_foreach(parameters, gradients, adaptive)
    return found


def clipped_by_loop(parameters: Tensors, gradients: Tensors, adaptive: float) -> None:
    """Clip by row, as timm does."""

    def norm(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.norm(2.0, dim=tuple(range(1, tensor.ndim)) or None, keepdim=True)

    for parameter, gradient in zip(parameters, gradients, strict=True):
        limit, length = norm(parameter).clamp_(min=1e-3).mul_(adaptive), norm(gradient)
        clipped = gradient * (limit / length.clamp(min=1e-6))
        gradient.copy_(torch.where(length < limit, gradient, clipped))


def clipping(unit: str, function: Any, values: Tensors, adaptive: float, falls: float) -> Callable[[], object]:
    """Each limit is `falls` times the previous one.

    If `falls` is below 1, every call clips; if it is 1 and the limit is high, no call clips. `function` is None for
    `clip_gradients_`.
    """
    parameters = [value.clone() for value in values]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    limits = (adaptive * falls**call for call in count(1))
    if function is None:
        return lambda: gs.clip_gradients_(parameters, adaptive=next(limits), unit=unit)
    return lambda: function(parameters, gradients, next(limits))


def clipping_rows(label: dict[str, Any], values: Tensors, seconds: float, size: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    foreach = {
        "_foreach_norm, _foreach_mul_": clipped_foreach,
        "_foreach_norm, _foreach_mul_ and statistics": clipped_foreach_with_statistics,
    }
    for unit, others in {"tensor": foreach, "row": {"loop of timm": clipped_by_loop}}.items():
        for what, adaptive, falls, passes in ((", norms within the limits", 1e3, 1.0, 2), ("", 1e-3, 0.9999, 4)):
            contestants = {
                name: clipping(unit, function, values, adaptive, falls)
                for name, function in {"clip_gradients_": None, **others}.items()
            }
            labelled = {**label, "pass": f"adaptive clipping by {unit}{what}"}
            rows += harness.rows(labelled, contestants, seconds, passes * size, "clip_gradients_")
    return rows


def rows_of(name: str, model: nn.Module, seconds: float) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    values = [parameter.detach() for parameter in parameters]
    losses = {"l2_loss": our_loss, "_foreach_norm": foreach_loss, "sum of squares": sum_of_squares}
    forward = {contestant: lambda loss=loss: loss(values) for contestant, loss in losses.items()}
    both = {
        contestant: lambda loss=loss: torch.autograd.grad(loss(parameters), parameters)
        for contestant, loss in losses.items()
    }
    size = sum(value.nbytes for value in values)
    label = {"size": f"{name}, {len(values)} tensors, {size / 4e6:.1f} M", "threads": torch.get_num_threads()}
    return [
        *harness.rows({**label, "pass": "l2_loss, forward"}, forward, seconds, size, "l2_loss"),
        *harness.rows({**label, "pass": "l2_loss, fwd+bwd"}, both, seconds, 3 * size, "l2_loss"),
        *clipping_rows(label, values, seconds, size),
    ]


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    results: list[dict[str, Any]] = []
    for threads in dict.fromkeys((1, arguments.threads)):
        torch.set_num_threads(threads)
        print(f"threads: {threads}")
        for name, make in MODELS.items():
            for row in rows_of(name, make(), arguments.seconds):
                harness.show(row)
                results.append(row)
    harness.write(arguments.json, "parameters", results)


if __name__ == "__main__":
    main()
