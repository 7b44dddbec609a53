"""DANN: `CNNModel.forward` with its gradient reversal layer. The loop is ours: the project's own is Python 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import nll_loss

import gradscale_ext as gs

from .checkout import Checkout, Edit
from .lockstep import Side, clear, leaves
from .project import Project

BATCH, FEATURES, STEPS = 128, 50 * 4 * 4, 20

EDITS = [
    Edit(
        "models/model.py",
        "forward",
        "reverse_feature = ",
        "class_output = ",
        "reverse_feature = gs.reverse_gradient(feature, alpha)",
    )
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    import model
    from functions import ReverseLayerF

    edited = checkout.edited("models/model.py", EDITS, {"gs": gs})
    return _side(model, ReverseLayerF.apply), _side(edited, gs.reverse_gradient)


def _side(module: Any, reverse: Callable[[torch.Tensor, float], torch.Tensor]) -> Side:
    torch.manual_seed(0)
    network = module.CNNModel()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    (feature,), gradient = leaves([BATCH, FEATURES]), torch.randn(BATCH, FEATURES)

    def step(data: Any) -> dict[str, Any]:
        source, target, labels, alpha = data
        classes, domains = network(source, alpha)
        _, others = network(target, alpha)
        own, other = torch.zeros(BATCH, dtype=torch.long), torch.ones(BATCH, dtype=torch.long)
        loss = nll_loss(classes, labels) + nll_loss(domains, own) + nll_loss(others, other)
        network.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    def loss() -> list[torch.Tensor]:
        clear([feature])
        reverse(feature, 0.5).backward(gradient)
        return [feature]

    return Side(step, [optimizer], loss)


def batch(seed: int) -> tuple[Any, ...]:
    """Images and labels, and the schedule of the paper."""
    random = torch.Generator().manual_seed(seed)
    source, target = (torch.randn(BATCH, 3, 28, 28, generator=random) for _ in range(2))
    alpha = 2 / (1 + math.exp(-10 * seed / STEPS)) - 1
    return source, target, torch.randint(10, (BATCH,), generator=random), alpha


PROJECT = Project(
    name="DANN",
    repository="fungtion/DANN",
    commit="476147f70bb818a63bb3461a6ecc12f97f7ab15e",
    marker="models/functions.py",
    case=f"B {BATCH} of each domain, images 3 x 28 x 28; alone: the reversal layer, {FEATURES} features",
    edits=EDITS,
    sides=sides,
    batch=batch,
    roots=["models"],
)
