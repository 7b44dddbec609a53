"""Times of PPO's loss with its value, forward and backward.

    python bench/policy_losses.py --json bench/results/policy_losses.json

A minibatch of B rows: logits of 4, 18 and 362 actions, three choices of 3, 5 and 2 actions, and 6 and 17 normal
distributions with shared deviations. The usual code is that of CleanRL, with `torch.distributions`. Bytes that must
move: predictions, actions and the seven numbers of a row read once, gradients written once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import gradscale_ext as gs
import harness
from pieces import Piece

BATCHES = (2048, 32768)
CLIP = 0.2


def usual(
    log_prob: torch.Tensor, entropy: torch.Tensor, value: torch.Tensor, rows: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The lines of a usual PPO after the distribution."""
    ratio = (log_prob - rows["log_probs"]).exp()
    advantages, returns, old = rows["advantages"], rows["returns"], rows["values"]
    policy = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    clipped = old + (value - old).clamp(-CLIP, CLIP)
    of_value = torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
    with torch.no_grad():
        ((ratio - 1) - ratio.log()).mean(), ((ratio - 1).abs() > CLIP).float().mean()
    return policy - 0.01 * entropy.mean() + 0.25 * of_value


def categorical(logits: torch.Tensor, sizes: tuple[int, ...], actions: torch.Tensor) -> tuple[Any, Any]:
    parts = [torch.distributions.Categorical(logits=part) for part in logits.split(sizes, 1)]
    columns = actions.unsqueeze(1) if actions.dim() == 1 else actions
    log_probs = [part.log_prob(columns[:, i]) for i, part in enumerate(parts)]
    return sum(log_probs), sum(part.entropy() for part in parts)


def gaussian(means: torch.Tensor, log_stds: torch.Tensor, actions: torch.Tensor) -> tuple[Any, Any]:
    distribution = torch.distributions.Normal(means, log_stds.exp().expand_as(means))
    return distribution.log_prob(actions).sum(1), distribution.entropy().sum(1)


def losses(batch: int, device: torch.device) -> Iterator[Piece]:
    """PPO's losses, each with the usual code and its compiled form."""
    g = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device)

    value = normal(batch).requires_grad_()
    rows = {name: normal(batch) for name in ("log_probs", "advantages", "returns", "values")}
    policies: dict[str, tuple[int, tuple[int, ...] | None]] = {
        "4 actions": (4, (4,)),
        "18 actions": (18, (18,)),
        "362 actions": (362, (362,)),
        "choices of 3, 5 and 2": (10, (3, 5, 2)),
        "6 normal distributions": (6, None),
        "17 normal distributions": (17, None),
    }
    for name, (width, sizes) in policies.items():
        x = normal(batch, width).requires_grad_()
        leaves, prediction, actions = [x, value], x, normal(batch, width)
        module = gs.MultiStepLoss.ppo(CLIP, CLIP, continuous=sizes is None)
        if sizes is None:
            log_stds = torch.zeros(width, device=device, requires_grad=True)
            leaves, prediction = [x, log_stds, value], {"means": x, "log_stds": log_stds}
            distribution: Callable[..., Any] = functools.partial(gaussian, x, log_stds)
        else:
            actions = torch.stack([torch.randint(size, (batch,), generator=g, device=device) for size in sizes], 1)
            actions = actions if len(sizes) > 1 else actions[:, 0]
            module = gs.MultiStepLoss.ppo(CLIP, CLIP, choices=sizes if len(sizes) > 1 else None)
            distribution = functools.partial(categorical, x, sizes)
        with torch.no_grad():
            old = distribution(actions)[0] + 0.3 * rows["log_probs"]
        own = {**rows, "log_probs": old}
        targets = {
            "policy": {"actions": actions, "advantages": own["advantages"], "log_probs": own["log_probs"]},
            "value": {"returns": own["returns"], "values": own["values"]},
        }

        def ours(module=module, prediction=prediction, targets=targets, leaves=leaves) -> object:  # type: ignore[no-untyped-def]
            loss = module({"policy": prediction, "value": value}, targets, steps=False).loss
            return torch.autograd.grad(loss, leaves)

        def eager(distribution=distribution, actions=actions, own=own) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return usual(*distribution(actions), value, own)

        def gradient(loss, leaves=leaves) -> object:  # type: ignore[no-untyped-def]
            return torch.autograd.grad(loss(), leaves)

        torch.testing.assert_close(ours(), gradient(eager), rtol=1e-3, atol=1e-6)
        others = {
            "eager": functools.partial(gradient, eager),
            "torch.compile": functools.partial(gradient, torch.compile(eager, dynamic=False)),
        }
        moved = 2 * sum(leaf.nbytes for leaf in leaves) + actions.nbytes + 4 * value.nbytes
        yield Piece(f"{name}: B {batch}", ours, others, moved)


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    results = []
    for batch in BATCHES:
        for piece in losses(batch, torch.device("cpu")):
            torch._dynamo.reset()
            copied = torch.empty(int(piece.moved) // 8)
            contestants = {"fused": piece.ours, **piece.others, "copy": functools.partial(copied.clone().copy_, copied)}
            label = {"size": piece.size, "pass": "forward+backward"}
            for row in harness.rows(label, contestants, arguments.seconds, piece.moved, "fused"):
                results.append(row)
                harness.show(row)
    harness.write(arguments.json, "policy_losses", results)


if __name__ == "__main__":
    main()
