"""Operators that change a gradient, and results of the loss that must not depend on the number of threads."""

from __future__ import annotations

import torch

import gradscale_ext as gs

OPERATORS = {
    "clip_norm": lambda x: gs.clip_gradient_norm(x, 1.0),
    "clip_norm per sample": lambda x: gs.clip_gradient_norm(x, 1.0, batch_dims=1),
    "normalize": lambda x: gs.normalize_gradient(x, 1.0),
    "normalize per sample": lambda x: gs.normalize_gradient(x, 1.0, batch_dims=1),
    "clip_value": lambda x: gs.clip_gradient_value(x, -0.5, 0.5),
}


def through(operator, gradient: torch.Tensor, create_graph: bool = False) -> torch.Tensor:
    """The gradient that an operator passes on."""
    x = torch.zeros_like(gradient, requires_grad=True)
    (result,) = torch.autograd.grad(operator(x), x, gradient, create_graph=create_graph)
    assert result.dtype == gradient.dtype
    assert result.shape == gradient.shape
    return result.detach()


def loss_digest(batch=64, *, threads=None):
    """Loss, metrics and gradients of MuZero's heads."""
    if threads:
        torch.set_num_threads(threads)
    heads = dict(gs.MultiStepLoss.muzero().heads)
    generator = torch.Generator().manual_seed(1)
    predictions = {
        name: [
            torch.randn(batch, 18 if name == "policy" else 601, generator=generator).requires_grad_() for _ in range(3)
        ]
        for name in heads
    }
    targets = {
        name: [
            torch.rand(batch, 18, generator=generator) if name == "policy" else torch.randn(batch, generator=generator)
            for _ in range(3)
        ]
        for name in heads
    }
    out = gs.multi_step_loss(heads, predictions, targets)
    leaves = [entry for entries in predictions.values() for entry in entries]
    return [out.loss.detach(), *out.head_gradient_norms.values(), *torch.autograd.grad(out.loss, leaves)]
