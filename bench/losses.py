"""Multi-step losses of MuZero, TD-MPC2 and DreamerV3: fused, in the usual eager PyTorch, and inputs for both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import gradscale_ext as gs
import usual

Tensors = list[torch.Tensor]
Inputs = tuple[dict[str, Tensors], dict[str, Tensors], torch.Tensor]
Loss = Callable[..., torch.Tensor]

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


# ---- All losses -----------------------------------------------------------------------------------------------------


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
