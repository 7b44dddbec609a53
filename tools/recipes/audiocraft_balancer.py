"""audiocraft: `Balancer.backward` for the output of a decoder. A stub replaces flashy, and averages over one step only.

The project averages the norms of gradients over steps. gradscale_ext does not, so each step of this check creates a
new balancer. With `per_batch_item=False` the balancer takes one norm of the whole output.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import l1_loss, mse_loss

import gradscale_ext as gs

from .checkout import Checkout
from .lockstep import Side, clear, leaves
from .project import Project

BATCH, CHANNELS, SAMPLES = 16, 32, 24000
WEIGHTS = {"l1": 0.1, "l2": 2.0, "slope": 4.0}


def balanced(output, weights, total_norm=1.0):
    """The output, once for each loss, with gradient norms in proportion to the weights."""
    total = sum(weights.values())
    return {name: gs.normalize_gradient(output, total_norm * weight / total) for name, weight in weights.items()}


def losses_of(outputs: dict[str, torch.Tensor], target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Three losses whose gradients differ in size."""
    return {
        "l1": l1_loss(outputs["l1"], target),
        "l2": 1e3 * mse_loss(outputs["l2"], target),
        "slope": l1_loss(outputs["slope"].diff(), target.diff()),
    }


def sides(checkout: Checkout) -> tuple[Side, Side]:
    balancer = checkout.edited("audiocraft/losses/balancer.py", [], {})

    def theirs(output: torch.Tensor, target: torch.Tensor) -> None:
        losses = losses_of(dict.fromkeys(WEIGHTS, output), target)
        balancer.Balancer(WEIGHTS, per_batch_item=False).backward(losses, output)

    def ours(output: torch.Tensor, target: torch.Tensor) -> None:
        sum(losses_of(balanced(output, WEIGHTS), target).values()).backward()  # type: ignore[union-attr]

    return _side(theirs), _side(ours)


def _side(backward: Any) -> Side:
    torch.manual_seed(0)
    decoder = nn.Sequential(nn.Conv1d(CHANNELS, 32, 7, padding=3), nn.ELU(), nn.Conv1d(32, 1, 7, padding=3))
    optimizer = torch.optim.Adam(decoder.parameters(), lr=3e-4, betas=(0.5, 0.9))
    (output,), target = leaves([BATCH, 1, SAMPLES]), torch.randn(BATCH, 1, SAMPLES)

    def step(data: Any) -> dict[str, Any]:
        latent, wanted = data
        optimizer.zero_grad()
        backward(decoder(latent), wanted)
        optimizer.step()
        return {}

    def loss() -> list[torch.Tensor]:
        clear([output])
        backward(output, target)
        return [output]

    return Side(step, [optimizer], loss)


def batch(seed: int) -> tuple[Any, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(BATCH, size, SAMPLES, generator=random) for size in (CHANNELS, 1))


def _average(_: float) -> Any:
    return lambda norms: norms


PROJECT = Project(
    name="audiocraft",
    repository="facebookresearch/audiocraft",
    commit="896ec7c47f5e5d1e5aa1e4b260c4405328bf009d",
    marker="audiocraft/losses/balancer.py",
    case=f"three losses on B {BATCH}, {SAMPLES} samples, of a decoder of two convolutions",
    edits=[],
    sides=sides,
    batch=batch,
    tolerance=1e-9,  # the project adds 1e-12 to norms of about 1e-3
    stand_ins={
        "flashy": {"averager": _average, "distrib": SimpleNamespace(average_metrics=lambda norms, _: norms)},
    },
)
