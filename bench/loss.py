"""The multi-step loss of a MuZero update: fused, in eager PyTorch as it is usually written, and that compiled.

    python bench/loss.py --json bench/results/loss.json

Bytes that must move, for GB/s: every logit and target read once, and with a backward pass every gradient written once.
Peak memory is that of PyTorch's allocator during the call, gradients included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

import gradscale_ext as gs
import harness

Tensors = list[torch.Tensor]

#: B, K, S, A: LightZero's board games and Atari, MuZero's Atari, Go; and the smallest, for the cost of a call.
SIZES = [(1, 5, 601, 18), (64, 5, 601, 6), (256, 5, 601, 18), (1024, 5, 601, 18), (1024, 5, 601, 362), (256, 5, 21, 2)]
SUPPORT = gs.Support.muzero()


def usual_two_hot(x: torch.Tensor, num_bins: int, limit: float) -> torch.Tensor:
    """Two-hot targets as MuZero implementations build them: transform, clamp, scatter into zeros."""
    x = torch.sign(x) * (torch.sqrt(torch.abs(x) + 1) - 1) + 0.001 * x
    x = x.clamp(-limit, limit)
    floor = x.floor()
    upper = x - floor
    target = torch.zeros(x.shape[0], num_bins, device=x.device)
    index = (floor + limit).long()
    target.scatter_(1, index.unsqueeze(1), (1 - upper).unsqueeze(1))
    index = index + 1
    upper = upper.masked_fill(index >= num_bins, 0.0)
    index = index.masked_fill(index >= num_bins, 0)
    return target.scatter_add_(1, index.unsqueeze(1), upper.unsqueeze(1))


def usual_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -(torch.log_softmax(logits, dim=1) * target).sum(1)


def usual_loss(predictions: dict[str, Tensors], targets: dict[str, Tensors], weights: torch.Tensor) -> torch.Tensor:
    """One scalar from per-step losses, with the gradient of the K recurrent steps scaled by 1/K."""
    steps = len(predictions["value"])
    num_bins = predictions["value"][0].shape[1]
    limit = (num_bins - 1) / 2
    total = torch.zeros_like(weights)
    for k in range(steps):
        loss = (
            0.25 * usual_cross_entropy(predictions["value"][k], usual_two_hot(targets["value"][k], num_bins, limit))
            + usual_cross_entropy(predictions["reward"][k], usual_two_hot(targets["reward"][k], num_bins, limit))
            + usual_cross_entropy(predictions["policy"][k], targets["policy"][k])
        )
        if k > 0:
            scale = 1 / (steps - 1)
            loss = loss * scale + loss.detach() * (1 - scale)
        total = total + loss
    return (total * weights).mean()


def make_inputs(
    batch: int, unroll_steps: int, num_bins: int, actions: int, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensors], dict[str, Tensors], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    steps = range(unroll_steps + 1)

    def logits(width: int) -> Tensors:
        return [torch.randn(batch, width, generator=generator).to(dtype).requires_grad_() for _ in steps]

    def scalars(scale: float) -> Tensors:
        return [torch.randn(batch, generator=generator) * scale for _ in steps]

    predictions = {"value": logits(num_bins), "reward": logits(num_bins), "policy": logits(actions)}
    visits = [torch.rand(batch, actions, generator=generator).softmax(1) for _ in steps]
    return (
        predictions,
        {"value": scalars(30), "reward": scalars(1), "policy": visits},
        torch.rand(batch, generator=generator),
    )


def make_fused(num_bins: int, keeps_memory: bool = True) -> Callable[..., torch.Tensor]:
    """The module keeps the gradients' memory from call to call; the function asks for it every time."""
    limit = (num_bins - 1) / 2
    module = gs.MultiStepLoss.muzero(gs.Support(-limit, limit, num_bins), value_weight=0.25)
    loss_fn = module if keeps_memory else functools.partial(gs.multi_step_loss, module.heads)

    def fused(predictions: dict[str, Tensors], targets: dict[str, Tensors], weights: torch.Tensor) -> torch.Tensor:
        return loss_fn(predictions, targets, step_gradient_scale="unroll", importance_weights=weights).loss

    return fused


def check_same(functions: dict[str, Callable[..., torch.Tensor]], inputs: tuple) -> None:  # type: ignore[type-arg]
    """Contestants that differ in value or gradient are not compared."""
    leaves = [leaf for entries in inputs[0].values() for leaf in entries]
    expected = None
    for name, function in functions.items():
        loss = function(*inputs)
        actual = [loss.detach(), *torch.autograd.grad(loss, leaves)]
        expected = expected or actual
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    results = []
    for size in SIZES:
        inputs = make_inputs(*size)
        leaves = [leaf for entries in inputs[0].values() for leaf in entries]
        elements = sum(leaf.numel() for leaf in leaves)
        targets = sum(target.numel() for entries in inputs[1].values() for target in entries)
        torch._dynamo.reset()
        functions = {
            "fused": make_fused(size[2]),
            "eager": usual_loss,
            "torch.compile": torch.compile(usual_loss, dynamic=False),
        }
        check_same(functions, inputs)

        def forward(function: Callable[..., torch.Tensor], inputs=inputs) -> Callable[[], object]:  # type: ignore[no-untyped-def]
            def run() -> None:
                with torch.no_grad():
                    function(*inputs)

            return run

        def both(function: Callable[..., torch.Tensor], inputs=inputs, leaves=leaves) -> Callable[[], object]:  # type: ignore[no-untyped-def]
            return lambda: torch.autograd.grad(function(*inputs), leaves)

        label = "B {} K {} S {} A {}".format(*size)
        for name, make, moved in (
            ("forward", forward, 4 * (elements + targets)),
            ("forward+backward", both, 4 * (2 * elements + targets)),
        ):
            contestants = {contestant: make(function) for contestant, function in functions.items()}
            for_memory = {"fused": make(make_fused(size[2], keeps_memory=False))}
            for row in harness.rows(
                {"size": label, "pass": name}, contestants, arguments.seconds, moved, "fused", for_memory
            ):
                harness.show(row)
                results.append(row)
    harness.write(arguments.json, "loss", results)


if __name__ == "__main__":
    main()
