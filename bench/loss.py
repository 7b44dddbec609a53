"""Time the multi-step loss of whole updates: fused, and in the usual PyTorch code, eager and compiled.

    python bench/loss.py --json bench/results/loss.json

The sizes are taken from published agents; one of them is measured with B from 1 to 4096. In fp32 with all threads, the
forward pass is measured alone and with the backward pass. Three sizes are also measured in bf16, and in fp32 with one
thread, only with the backward pass.

A loss with gradients must read every prediction and write a gradient of the same size. As a lower bound, a copy of the
predictions into existing buffers is timed in turn with the losses, and times are also given relative to it.

doors.py adds rows for each way to call the loss: module, function, torch.compile, each `impl`, AVX2.

GB/s counts the bytes that must move: every logit and target is read once, and a backward pass writes every gradient
once. Peak memory is the peak of PyTorch's allocator during the call, gradients included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import doors
import harness
import losses
from losses import Inputs, Loss, Tensors, leaves_of, make_inputs, usual_loss

#: Sizes (B, K, S, A) with a growing batch.
GROWTH = [(batch, 5, 601, 18) for batch in (1, 8, 64, 256, 1024, 4096)]
#: Sizes of LightZero's board games, MuZero's Go and chess, CartPole.
MUZERO = [(64, 5, 601, 6), (1024, 5, 601, 362), (2048, 5, 601, 82), (256, 5, 601, 4672), (256, 5, 21, 2)]
#: Small batches, whose time is mostly the host's.
SMALL = [(64, 5, 601, 6), (256, 5, 21, 2)]
#: Sizes for one thread, and for bf16.
MAIN = [(64, 5, 601, 6), (256, 5, 601, 18), (1024, 5, 601, 362)]


def make_copy(leaves: Tensors) -> Callable[[], object]:
    sources = [leaf.detach() for leaf in leaves]
    buffers = [torch.empty_like(source) for source in sources]
    return lambda: torch._foreach_copy_(buffers, sources)


def over_copy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with its time relative to the copy's time."""
    copied = next((row["median_ms"] for row in rows if row["contestant"] == "copy"), None)
    return [row if copied is None else {**row, "over_copy": row["median_ms"] / copied} for row in rows]


def benchmark(
    label: dict[str, Any],
    inputs: Inputs,
    make: Callable[[], Loss],
    eager: Loss,
    seconds: float,
    passes: tuple[str, ...] = ("forward", "forward+backward"),
) -> Iterator[dict[str, Any]]:
    leaves = leaves_of(inputs[0])
    torch._dynamo.reset()
    functions = {"fused": make(), "eager": eager, "torch.compile": torch.compile(eager, dynamic=False)}
    losses.check_same(functions, inputs)
    elements = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    targets = sum(target.numel() * target.element_size() for target in leaves_of(inputs[1]))

    def forward(function: Loss) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                function(*inputs)

        return run

    def both(function: Loss) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*inputs), leaves)

    for name in passes:
        choose, moved = (forward, elements) if name == "forward" else (both, 2 * elements)
        contestants = {contestant: choose(function) for contestant, function in functions.items()}
        if name == "forward+backward":
            contestants["copy"] = make_copy(leaves)
        rows = harness.rows({**label, "pass": name}, contestants, seconds, moved + targets, "fused")
        yield from over_copy(rows)


def parts(size: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    """What the time of a small batch consists of.

    "autograd alone" is PyTorch's engine with a node for each prediction, a view, and gradients that are given. The loss
    has one node for all predictions.
    """
    inputs, fused = make_inputs(*size), losses.make_fused(size[2])
    leaves = leaves_of(inputs[0])
    views, gradients = [leaf.view_as(leaf) for leaf in leaves], [torch.zeros_like(leaf) for leaf in leaves]

    def call() -> None:
        with torch.no_grad():
            fused(*inputs)

    contestants = {
        "forward and backward": lambda: torch.autograd.grad(fused(*inputs), leaves),
        "the call without gradients": call,
        "autograd alone": lambda: torch.autograd.grad(views, leaves, gradients, retain_graph=True),
        "copy": make_copy(leaves),
    }
    label = {"agent": "parts of a small batch", "size": "B {} K {} S {} A {}".format(*size)}
    label |= {"dtype": "fp32", "threads": torch.get_num_threads()}
    moved = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    return harness.rows({**label, "pass": "parts"}, contestants, seconds, moved, "forward and backward")


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    threads = torch.get_num_threads()
    results = []

    def run(label: dict[str, Any], inputs: Inputs, make: Callable[[], Loss], eager: Loss, **options: Any) -> None:
        label = {"dtype": "fp32", "threads": torch.get_num_threads(), **label}
        for row in benchmark(label, inputs, make, eager, arguments.seconds, **options):
            harness.show(row)
            results.append(row)

    for size in sorted({*GROWTH, *MUZERO}):
        name = "B {} K {} S {} A {}".format(*size)
        run(
            {"agent": "MuZero", "size": name},
            make_inputs(*size),
            functools.partial(losses.make_fused, size[2]),
            usual_loss,
        )
    run(
        {"agent": "TD-MPC2", "size": "B 256 H 3 S 101"},
        losses.make_tdmpc2_inputs(),
        losses.make_fused_tdmpc2,
        losses.usual_tdmpc2,
    )
    dreamer = {"agent": "reward, critic and continue heads of DreamerV3", "size": "B 16 T 64 S 255"}
    run(dreamer, losses.make_dreamer_inputs(), losses.make_fused_dreamer, losses.usual_dreamer)
    for row in (
        *doors.benchmark(arguments.seconds),
        *(row for size in SMALL for row in parts(size, arguments.seconds)),
    ):
        harness.show(row)
        results.append(row)
    for size in MAIN:
        name = "B {} K {} S {} A {}".format(*size)
        make = functools.partial(losses.make_fused, size[2])
        half = make_inputs(*size, dtype=torch.bfloat16)
        run(
            {"agent": "MuZero", "size": name, "dtype": "bf16"},
            half,
            make,
            usual_loss,
            passes=("forward+backward",),
        )
        if threads > 1:
            torch.set_num_threads(1)
            run(
                {"agent": "MuZero", "size": name},
                make_inputs(*size),
                make,
                usual_loss,
                passes=("forward+backward",),
            )
            torch.set_num_threads(threads)
    harness.write(arguments.json, "loss", results)


if __name__ == "__main__":
    main()
