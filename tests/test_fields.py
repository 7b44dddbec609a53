"""Predictions and targets by field, and batches without steps."""

from __future__ import annotations

import math

import pytest
import torch
from test_policy_losses import (
    INF,
    B,
    close,
    doubles,
    every_implementation,
    gradient_of,
    leaf,
    normal,
    run,
)

import gradscale_ext as gs

# ---- Fields of other heads ------------------------------------------------------------------------------------------


@every_implementation
def test_classes_with_probabilities(impl):
    x, classes = leaf([[0.0] * 5]), torch.tensor([[0, 3]])
    out = run(gs.SoftCrossEntropy(), x, {"classes": classes, "probabilities": doubles(0.25, 0.75).unsqueeze(0)}, impl)
    close(out.loss, math.log(5))
    close(gradient_of(out.loss, x)[0], [[0.2 - 0.25, 0.2, 0.2, 0.2 - 0.75, 0.2]])


@every_implementation
@pytest.mark.parametrize("subtract", [False, True])
def test_sampled_classes_are_a_sparse_distribution(subtract, impl):
    """The loss of the same distribution over all classes; the entropy of the target is over the entries."""
    x, t = (2 * normal(B, 9)).requires_grad_(), normal(B, 4, seed=1).softmax(-1)
    classes = torch.stack([torch.randperm(9)[:4] for _ in range(B)])
    head = gs.SoftCrossEntropy(entropy_weight=0.1, subtract_target_entropy=subtract)
    sparse = {"classes": classes, "probabilities": t}
    dense = torch.zeros(B, 9, dtype=torch.float64).scatter(1, classes, t)
    found, expected = run(head, x, sparse, impl), run(head, x, dense, impl)
    close(found.loss, expected.loss.detach())
    close(gradient_of(found.loss, x)[0], gradient_of(expected.loss, x)[0])
    close(found.entropy["h"], expected.entropy["h"])


@every_implementation
def test_details_of_sampled_classes(impl):
    """Twice the same class, padding, illegal actions, and classes out of range."""
    x = leaf([[0, 0, 0, -INF]])
    head = gs.SoftCrossEntropy(subtract_target_entropy=True)

    def result(classes: list[int], *probabilities: float) -> gs.MultiStepLossOutput:
        target = {"classes": torch.tensor([classes]), "probabilities": doubles(*probabilities).unsqueeze(0)}
        return run(head, x, target, impl)

    twice = result([1, 1], 0.25, 0.75)
    close(twice.loss, math.log(3) + 0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    close(gradient_of(twice.loss, x)[0], [[1 / 3, -2 / 3, 1 / 3, 0]])
    close(result([1, 0], 1, 0).loss, math.log(3))
    close(result([1, 3], 1, 0).loss, math.log(3))
    assert result([1, 3], 0.5, 0.5).loss == INF


@every_implementation
def test_sampled_fractions(impl):
    """The loss of IQN, pair by pair."""
    x, samples, fractions = normal(B, 5).requires_grad_(), normal(B, 3, seed=1), normal(B, 5, seed=2).sigmoid()
    u = samples.unsqueeze(1) - x.unsqueeze(2)
    huber = torch.where(u.abs() <= 0.7, u.square() / 2, 0.7 * (u.abs() - 0.35))
    loss = ((fractions.unsqueeze(2) - (u.detach() < 0).double()).abs() * huber / 0.7).mean(2).sum(1).mean()
    out = run(gs.QuantileHuber(kappa=0.7), x, {"samples": samples, "fractions": fractions}, impl)
    close(out.loss, loss.detach())
    close(gradient_of(out.loss, x)[0], gradient_of(loss, x)[0])
    middle = ((2 * torch.arange(5).double() + 1) / 10).expand(B, 5)
    plain = run(gs.QuantileHuber(), x, samples, impl).loss
    close(run(gs.QuantileHuber(), x, {"samples": samples, "fractions": middle}, impl).loss, plain.detach())
