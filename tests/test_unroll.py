"""The unroll of the pseudocode, and where it scales the gradient of the hidden state."""

from __future__ import annotations

import pytest
import torch

import gradscale_ext as gs


def _sums(hidden_scale, actions):
    """s' = w s with unit head losses on the root and five recurrent states: gradients of the root state and of w."""
    root = torch.ones(1, dtype=torch.float64, requires_grad=True)
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    outputs = gs.unroll(
        lambda observation: ({"value": observation}, observation),
        lambda hidden, action: ({"value": w * hidden}, w * hidden),
        root,
        actions,
        hidden_scale=hidden_scale,
    )
    sum(entry.sum() for entry in outputs["value"]).backward()
    return root.grad.item(), w.grad.item()


@pytest.mark.parametrize("actions", [torch.zeros(1, 5), list(torch.zeros(5, 1)), torch.zeros(1, 5, 2)])
def test_scales_only_the_state_that_is_passed_on(actions):
    assert _sums(1.0, actions) == (6, 15)
    root, w = _sums(0.5, actions)
    assert root == pytest.approx(2.9375, abs=1e-12)
    assert w == pytest.approx(8.0625, abs=1e-12)


def test_heads_without_a_root():
    outputs = gs.unroll(
        lambda observation: ({"value": observation}, observation),
        lambda hidden, action: ({"value": hidden, "reward": action}, hidden),
        torch.zeros(2),
        torch.ones(2, 3),
    )
    assert {name: len(entries) for name, entries in outputs.items()} == {"value": 4, "reward": 3}


def test_no_actions():
    outputs = gs.unroll(lambda x: ({"value": x}, x), lambda h, a: ({"value": h}, h), torch.zeros(2), torch.ones(2, 0))
    assert len(outputs["value"]) == 1


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"recurrent step 1 gave the heads \['reward'\]"):
        gs.unroll(lambda x: ({"value": x}, x), lambda h, a: ({"reward": h}, h), torch.zeros(2), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\[B, K, \.\.\.\], but it has \(3,\)"):
        gs.unroll(lambda x: ({"value": x}, x), lambda h, a: ({"value": h}, h), torch.zeros(2), torch.ones(3))
