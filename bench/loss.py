"""Time the multi-step loss of whole updates: fused, and in the usual PyTorch code, eager and compiled.

    python bench/loss.py --json bench/results/loss.json

The sizes are taken from published agents; one of them is measured with B from 1 to 4096. The forward pass is measured
alone and with the backward pass, in fp32 and bf16, with all threads and with one.

A loss with gradients must read every prediction and write a gradient of the same size. As a lower bound, a copy of the
predictions into existing buffers is timed in turn with the losses, and times are also given relative to it.

GB/s counts the bytes that must move: every logit and target is read once, and a backward pass writes every gradient
once.
Peak memory is the peak of PyTorch's allocator during the call, gradients included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import gradscale_ext as gs
import harness
import usual

Tensors = list[torch.Tensor]
Inputs = tuple[dict[str, Tensors], dict[str, Tensors], torch.Tensor]
Loss = Callable[..., torch.Tensor]

#: Sizes (B, K, S, A) with a growing batch.
GROWTH = [(batch, 5, 601, 18) for batch in (1, 8, 64, 256, 1024, 4096)]
#: Sizes of LightZero's board games, MuZero's Go and chess, CartPole.
MUZERO = [(64, 5, 601, 6), (1024, 5, 601, 362), (2048, 5, 601, 82), (256, 5, 601, 4672), (256, 5, 21, 2)]
#: Sizes for one thread, and for bf16.
MAIN = [(64, 5, 601, 6), (256, 5, 601, 18), (1024, 5, 601, 362)]


# ---- MuZero: value, reward, policy ----------------------------------------------------------------------------------


def make_inputs(
    batch: int, unroll_steps: int, num_bins: int, actions: int, dtype: torch.dtype = torch.float32
) -> Inputs:
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


def usual_loss(predictions: dict[str, Tensors], targets: dict[str, Tensors], weights: torch.Tensor) -> torch.Tensor:
    """One scalar from per-step losses, with the gradient of the K recurrent steps scaled by 1/K."""
    steps = len(predictions["value"])
    num_bins = predictions["value"][0].shape[1]
    limit = (num_bins - 1) / 2
    total = torch.zeros_like(weights)
    for k in range(steps):
        value, reward = (usual.two_hot(usual.h(targets[name][k]), num_bins, limit) for name in ("value", "reward"))
        loss = (
            0.25 * usual.cross_entropy(predictions["value"][k], value)
            + usual.cross_entropy(predictions["reward"][k], reward)
            + usual.cross_entropy(predictions["policy"][k], targets["policy"][k])
        )
        if k > 0:
            scale = 1 / (steps - 1)
            loss = loss * scale + loss.detach() * (1 - scale)
        total = total + loss
    return (total * weights).mean()


def make_fused(num_bins: int, as_function: bool = False, **options: Any) -> Loss:
    limit = (num_bins - 1) // 2
    module = gs.MultiStepLoss.muzero(gs.Support.muzero(limit), value_weight=0.25)
    loss_fn = functools.partial(gs.multi_step_loss, module.heads) if as_function else module

    def fused(predictions: dict[str, Tensors], targets: dict[str, Tensors], weights: torch.Tensor) -> torch.Tensor:
        return loss_fn(predictions, targets, step_gradient_scale="unroll", importance_weights=weights, **options).loss

    return fused


# ---- TD-MPC2: consistency, reward, five critics ---------------------------------------------------------------------

CRITICS = [f"value_{number}" for number in range(5)]
RHO = 0.5


def make_tdmpc2_inputs(batch: int = 256, horizon: int = 3, latent: int = 512) -> Inputs:
    """Logits and targets of all steps in one tensor [H, B, ...], as in TD-MPC2; latents are a list."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    categorical = ["reward", *CRITICS]
    predictions: dict[str, Any] = {name: normal(horizon, batch, 101).requires_grad_() for name in categorical}
    predictions["latent"] = [normal(batch, latent).requires_grad_() for _ in range(horizon)]
    targets: dict[str, Any] = {name: normal(horizon, batch) * 5 for name in categorical}
    targets["latent"] = normal(horizon, batch, latent)
    return predictions, targets, torch.ones(batch)


def usual_tdmpc2(predictions: dict[str, Any], targets: dict[str, Any], weights: torch.Tensor) -> torch.Tensor:
    logits = {name: predictions[name].unbind(0) for name in ("reward", *CRITICS)}
    horizon = len(predictions["latent"])
    total = torch.zeros(())
    for k in range(horizon):
        categorical = torch.zeros(())
        for name in logits:
            target = usual.two_hot(10 * usual.symlog(targets[name][k]) / 2, 101, 50)
            factor = 1.0 if name == "reward" else 1 / len(CRITICS)
            categorical = categorical + factor * usual.cross_entropy(logits[name][k], target).mean()
        consistency = torch.nn.functional.mse_loss(predictions["latent"][k], targets["latent"][k])
        total = total + RHO**k / horizon * (20 * consistency + 0.1 * categorical)
    return total


def make_fused_tdmpc2() -> Loss:
    support = gs.Support.tdmpc2()
    module = gs.MultiStepLoss(
        reward=gs.TwoHot(support, weight=0.1),
        latent=gs.MeanSquaredError(weight=20.0),
        **{name: gs.TwoHot(support, weight=0.1 / len(CRITICS)) for name in CRITICS},
    )

    def fused(predictions: Any, targets: Any, weights: torch.Tensor) -> torch.Tensor:
        horizon = len(predictions["latent"])
        decay = [RHO**k / horizon for k in range(horizon)]
        return module(predictions, targets, step_weights=decay, batch_first=False).loss

    return fused


# ---- DreamerV3: reward, critic and continue heads over 16 sequences of 64; no KL and no decoder terms ---------------


def make_dreamer_inputs(batch: int = 16, length: int = 64) -> Inputs:
    """All steps in one tensor [B, T, ...], as in DreamerV3."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, length, *shape, generator=generator)

    predictions: dict[str, Any] = {"reward": normal(255), "value": normal(255), "go_on": normal()}
    targets: dict[str, Any] = {"reward": normal(), "value": normal() * 100, "go_on": (normal() > -2).float()}
    return {name: x.requires_grad_() for name, x in predictions.items()}, targets, torch.ones(batch)


def usual_dreamer(
    predictions: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], weights: torch.Tensor
) -> torch.Tensor:
    total = torch.zeros(())
    for name in ("reward", "value"):
        target = usual.raw_two_hot(targets[name], 255, 20.0)
        total = total + usual.cross_entropy(predictions[name], target).mean()
    go_on = torch.nn.functional.binary_cross_entropy_with_logits(predictions["go_on"], targets["go_on"])
    return total + go_on


def make_fused_dreamer() -> Loss:
    support = gs.Support.dreamer_v3()
    module = gs.MultiStepLoss(reward=gs.TwoHot(support), value=gs.TwoHot(support), go_on=gs.BinaryCrossEntropy())

    def fused(predictions: Any, targets: Any, weights: torch.Tensor) -> torch.Tensor:
        return module(predictions, targets, reduction="valid_mean").loss

    return fused


# ---- Running --------------------------------------------------------------------------------------------------------


def leaves_of(predictions: dict[str, Any]) -> Tensors:
    return [
        tensor
        for entries in predictions.values()
        for tensor in ([entries] if isinstance(entries, torch.Tensor) else entries)
    ]


def check_same(functions: dict[str, Loss], inputs: Inputs) -> None:
    """Raise an error if contestants differ in value or gradient."""
    leaves = leaves_of(inputs[0])
    half = leaves[0].dtype != torch.float32
    expected = None
    for name, function in functions.items():
        loss = function(*inputs)
        actual = [loss.detach(), *torch.autograd.grad(loss, leaves)]
        expected = expected or actual
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(
                a, b, rtol=2e-2 if half else 1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )


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
    check_same(functions, inputs)
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


def main() -> None:
    import doors  # not at the top, because doors imports this file

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
        run({"agent": "MuZero", "size": name}, make_inputs(*size), functools.partial(make_fused, size[2]), usual_loss)
    run({"agent": "TD-MPC2", "size": "B 256 H 3 S 101"}, make_tdmpc2_inputs(), make_fused_tdmpc2, usual_tdmpc2)
    dreamer = {"agent": "reward, critic and continue heads of DreamerV3", "size": "B 16 T 64 S 255"}
    run(dreamer, make_dreamer_inputs(), make_fused_dreamer, usual_dreamer)
    for row in doors.benchmark(arguments.seconds):
        harness.show(row)
        results.append(row)
    for size in MAIN:
        name = "B {} K {} S {} A {}".format(*size)
        make = functools.partial(make_fused, size[2])
        half = make_inputs(*size, dtype=torch.bfloat16)
        run({"agent": "MuZero", "size": name, "dtype": "bf16"}, half, make, usual_loss, passes=("forward+backward",))
        if threads > 1:
            torch.set_num_threads(1)
            run({"agent": "MuZero", "size": name}, make_inputs(*size), make, usual_loss, passes=("forward+backward",))
            torch.set_num_threads(threads)
    harness.write(arguments.json, "loss", results)


if __name__ == "__main__":
    main()
