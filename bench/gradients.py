"""Statistics of many gradients, and clipping by their total norm.

    python bench/gradients.py --json bench/results/gradients.json

1000 tensors of 1000 elements, the 148 tensors of a transformer with 25 M parameters, and one tensor of 100 M; float32,
and the last also in bfloat16 and with zeros, as after a ReLU. Bytes that must move: all elements are read once;
clipping that changes them reads twice and writes once. "read once" is `torch.sum`, which reads everything and computes
less.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

import gradscale_ext as gs
import harness

Tensors = list[torch.Tensor]


def usual(tensors: Tensors) -> Tensors:
    """Multi-tensor norms and maxima, and a loop for the counts."""
    norms = torch._foreach_norm(tensors)
    largest = torch._foreach_max(torch._foreach_abs(tensors))
    zeros = [(tensor == 0).sum() for tensor in tensors]
    nans = [tensor.isnan().sum() for tensor in tensors]
    infs = [tensor.isinf().sum() for tensor in tensors]
    return [torch.stack(column) for column in (norms, largest, zeros, nans, infs)]  # type: ignore[return-value]


def by_parameter(tensors: Tensors) -> list[float]:
    """The usual loop that logs each norm."""
    return [tensor.norm().item() for tensor in tensors]


def transformer(layers: int = 12, width: int = 416) -> Tensors:
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    return [torch.randn_like(p) * 1e-3 for _ in range(layers) for p in layer.parameters()] + [
        torch.randn(width) * 1e-3
    ] * 4


def cases() -> dict[str, Tensors]:
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(100_000_000, generator=generator) * 1e-3
    return {
        "1000 x 1000": [torch.randn(1000, generator=generator) * 1e-3 for _ in range(1000)],
        "transformer, 25 M": transformer(),
        "1 x 100 M": [large],
        "1 x 100 M, bfloat16": [large.bfloat16()],
        "1 x 100 M, half of them 0": [large.relu()],
    }


def clipping(function: Callable[..., Any], tensors: Tensors, max_norm: float, falls: float) -> Callable[[], Any]:
    """Each limit is `falls` times the previous one.

    If `falls` is below 1, every call clips; if it is 1 and the limit is high, no call clips.
    """
    parameters = [torch.empty_like(tensor) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    limits = (max_norm * falls**call for call in itertools.count(1))
    return lambda: function(parameters, next(limits))


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    results: list[dict[str, Any]] = []
    for size, tensors in cases().items():
        moved = sum(tensor.nbytes for tensor in tensors)
        contestants: harness.Contestants = {
            "gradient_statistics": functools.partial(gs.gradient_statistics, tensors),
            "foreach and counting loops": functools.partial(usual, tensors),
            "norm().item() of each": functools.partial(by_parameter, tensors),
        }
        if len(tensors) == 1:
            contestants["read once"] = tensors[0].sum
        found = gs.gradient_statistics(tensors).norm
        truth = torch.stack([tensor.double().norm() for tensor in tensors])
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=0)
        label = {"size": size, "pass": "statistics"}
        results += harness.rows(label, contestants, arguments.seconds, moved, "gradient_statistics")
        norm = float(found.norm())
        passes_of_kinds = (("clipping, norm below the limit", 2 * norm, 1.0, 1), ("clipping", norm, 0.9999, 3))
        for what, limit, falls, passes in passes_of_kinds:
            contestants = {
                "clip_gradients_": clipping(gs.clip_gradients_, tensors, limit, falls),
                "torch.nn.utils.clip_grad_norm_": clipping(torch.nn.utils.clip_grad_norm_, tensors, limit, falls),
            }
            label = {"size": size, "pass": what}
            results += harness.rows(label, contestants, arguments.seconds, passes * moved, "clip_gradients_")
    for row in results:
        harness.show(row)
    harness.write(arguments.json, "gradients", results)


if __name__ == "__main__":
    main()
